"""Where a layer of TAPE takes more CPU time than one of RoPE, part by part, forward and backward.

    python -m benchmarks.cpu_parts

One thread, one sequence of 1,024 tokens, 12 heads of 64, fp32: the shape of `python -m benchmarks.train_step` on a CPU.
Every part is run alone, in turn with the others. The figures are CPU time, not time passed, so that other programs on
the machine change them little; the least of all repetitions is the figure.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import positive
from megatron_tape.ops.attention import attention
from megatron_tape.ops.position_update import plain_update
from megatron_tape.ops.rotation import rotate_groups

S, H, D, FFN, P = 1024, 12, 64, 3072, 48
C = H * D


def parts() -> dict[str, tuple[Callable[[], None] | None, Callable[[], None]]]:
    """Return each part as RoPE (or None) and as TAPE has it; how often a layer has it is in its name."""
    torch.manual_seed(0)
    q, k, v, z, do, du = (torch.randn(S, 1, H, D) for _ in range(6))
    phases = torch.randn(S, 1, 1, D)

    def linear(inputs: int, outputs: int) -> Callable[[], None]:
        x, weight, dy = torch.randn(S, inputs), torch.randn(outputs, inputs), torch.randn(S, outputs)
        return _both_ways(lambda x, weight: (F.linear(x, weight),), (x, weight), (dy,))

    def rotated(q: Tensor, k: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_groups(q, z), rotate_groups(k, z)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (attention(q, k, v, phases, backend="torch")[0],)

    def averaging(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, z, average_state=True, backend="tiled")

    states = [x.view(S, H, D) for x in (z, q)]
    matrices = [0.1 * torch.randn(size) for size in ((H, H), (P, H), (H, P))]
    update = _both_ways(lambda *x: (plain_update(*x),), (*states, torch.randn(S, P), *matrices), (do.view(S, H, D),))
    projection, mlp = linear(C, C), linear(C, FFN)
    return {
        "4 projections": (projection, projection),
        "3 products of the MLP": (mlp, mlp),
        "attention, with rotation": (
            _both_ways(plain, (q, k, v), (do,)),
            _both_ways(averaging, (q, k, v, z), (do, du)),
        ),
        "  rotation alone": (
            _both_ways(lambda q, k: rotated(q, k, phases), (q, k), (do, do)),
            _both_ways(rotated, (q, k, z), (do, do)),
        ),
        "gate of the update": (None, linear(C, P)),
        "position update": (None, update),
    }


def _both_ways(part: Callable, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> Callable[[], None]:
    def run() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.autograd.backward(part(*leaves), gradients)

    return run


def measure(repetitions: int) -> list[str]:
    """Return the table."""
    torch.set_num_threads(1)
    found, runs = {}, {(name, i): run for name, pair in parts().items() for i, run in enumerate(pair) if run}
    for repetition in range(repetitions + 1):
        for key, run in runs.items():
            began = time.process_time()
            run()
            if repetition:  # the first is a warm-up
                found[key] = min(found.get(key, float("inf")), 1e3 * (time.process_time() - began))
    rows, sums = [], [0.0, 0.0]
    for name in dict.fromkeys(name for name, _ in runs):
        times = int(name.split()[0]) if name[0].isdigit() else 1
        taken = [times * found.get((name, i), 0.0) for i in (0, 1)]
        rows.append((name, *taken))
        if not name.startswith(" "):
            sums = [a + b for a, b in zip(sums, taken)]
    head = f"{'CPU ms of a layer':28}{'RoPE':>8}{'TAPE':>8}{'more':>8}"
    rows.append(("together", *sums))
    lines = [f"{name:28}{rope:8.1f}{tape:8.1f}{tape - rope:8.1f}" for name, rope, tape in rows]
    return [head, *lines, f"TAPE / RoPE: {sums[1] / sums[0]:.3f}"]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=positive, default=7, metavar="N", help="default: %(default)s")
    print(*measure(parser.parse_args(argv).repetitions), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
