"""Measure the rates from which step times are predicted, for `python -m pretrain.estimate --rates FILE`.

    python -m benchmarks.rates --output rates.json
    torchrun --nproc-per-node 8 ... -m benchmarks.rates --output rates.json

One process measures its GPU: a large matrix product, attention (what `auto` is for RoPE, and ours, which also averages
the position state; causal, forward and backward), an addition of large tensors, and how long the host needs to start a
small one. Several measure the links, too: all-gathers among the GPUs of the first node and, on several nodes, between
the first GPUs of all. Without a GPU the same code measures the CPU, at small sizes.
"""

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.environment import describe
from benchmarks.timing import matmul_peak, seconds, timed
from megatron_tape import command_line
from megatron_tape.io.records import write_record
from megatron_tape.ops.attention import attention as attend
from megatron_tape.ops.backends.choice import choose_backend
from megatron_tape.parallel.launcher import local_rank, local_world_size, rank_and_size
from megatron_tape.planning.flops import WIDE_HEADS
from megatron_tape.planning.hardware import Rates


def of_one(device: torch.device) -> dict[str, float]:
    """Return the rates of this process's device in bf16, in the units of `hardware.Hardware`."""
    on_gpu, dtype = device.type == "cuda", torch.bfloat16
    heads, length, dim = (16, 4096, 128) if on_gpu else (2, 256, 32)
    gradient = torch.randn(length, 1, heads, dim, dtype=dtype, device=device)
    large = torch.zeros(2**28 if on_gpu else 2**20, dtype=dtype, device=device)
    other, small = torch.ones_like(large), torch.zeros(1, device=device)

    own = [torch.randn(length, 1, heads, dim, dtype=dtype, device=device, requires_grad=True) for _ in range(4)]
    library = choose_backend("auto", device, dtype, dim).backend
    backend = "triton" if on_gpu else "tiled"

    def attention() -> None:
        torch.autograd.grad(attend(*own[:3], None, False, None, library)[0], own[:3], gradient)

    def state_attention() -> None:
        torch.autograd.grad(attend(*own, True, None, backend), own, [gradient] * 2)

    candidates = {"attention": attention, "state_attention": state_attention, "addition": lambda: large.add_(other)}
    found = timed(candidates, 10, device)[0]
    # Matrix products, of which the causal mask leaves half: two forward and five backward; three and, as the planner
    # counts them for these heads, eight or seven with the average of the state.
    product = heads * length**2 * dim
    products = {"attention": 7, "state_attention": 11 if dim > WIDE_HEADS else 10}
    starts = 1000
    started = time.perf_counter()
    for _ in range(starts):
        small.add_(1)
    taken = time.perf_counter() - started
    return {
        "matmul": matmul_peak(dtype, device),
        **{name: count * product / found[name]["seconds"] for name, count in products.items()},
        "memory_bandwidth": 3 * large.nbytes / found["addition"]["seconds"],
        "operation_start": taken / starts,
    }


def of_links(node_size: int, device: torch.device) -> dict[str, float]:
    """Return bandwidth and latency inside and between nodes of `node_size` ranks; all ranks call this together.

    Ranks fill one node after the other.
    """
    ranks = dist.get_world_size()
    groups = {"intra_node": range(min(node_size, ranks)), "inter_node": range(0, ranks, node_size)}
    found = {}
    for where, members in groups.items():
        if len(members) == 1:
            continue
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            small, large = (
                _gather_seconds(size, group, device) for size in (1, 2**27 if device.type == "cuda" else 2**16)
            )
            received = (len(members) - 1) * large[1]
            found[f"{where}_bandwidth"] = received / max(large[0] - small[0], 1e-9)
            found[f"{where}_latency"] = small[0] / (len(members) - 1)
    return found


def _gather_seconds(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[float, int]:
    """Return the least seconds of an all-gather of `size` bytes of every member, and that size."""
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    gathered = torch.zeros(size * dist.get_world_size(group), dtype=torch.uint8, device=device)
    gather = partial(dist.all_gather_into_tensor, gathered, own, group=group)
    return min(seconds(gather, device) for _ in range(10)), size


def main(argv: list[str] | None = None) -> None:
    """Measure, and let the first process write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=command_line.path, required=True, help="file to write")
    options = parser.parse_args(argv)
    on_gpu, several = torch.cuda.is_available(), rank_and_size()[1] > 1
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    rates = of_one(device)
    if several:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        rates |= of_links(local_world_size(), device)
    if not several or dist.get_rank() == 0:
        gpu = torch.cuda.get_device_name() if on_gpu else "CPU"
        write_record(options.output, {**Rates(gpu=gpu, rates=rates), "environment": describe()})
        for name, value in rates.items():
            print(f"{name:<22}{value:12.3e}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
