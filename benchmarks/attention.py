"""Attention with TAPE, in every way there is, beside RoPE with the fastest attention on this machine.

    python -m benchmarks.attention [--shapes 12x64 32/8x128] [--lengths 1024 4096] [--record]

A candidate that cannot run here is named with the reason, one that gives other numbers than float64 gets no figure.
Repetitions alternate between the candidates and medians are reported. `layers` are whole attention layers, projections
included, as the paper measured them. Needs torch alone; `flash_attn` and `triton` are candidates where they are there.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import record
from megatron_tape.ops.attention import attention, unsupported
from megatron_tape.ops.rotation import rotate_groups
from megatron_tape.reference import rope_phases

Candidate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def released(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Average v and both halves of the state at full width, in three calls, as the TAPE authors' code does."""
    real, imaginary = z.chunk(2, dim=-1)
    states = (torch.cat([real, real], dim=-1), torch.cat([imaginary, imaginary], dim=-1))
    q, k = rotate_groups(q, z), rotate_groups(k, z)
    averaged = [_sdpa(q, k, value) for value in (v, *states)]
    half = q.shape[-1] // 2
    return averaged[0], torch.cat([averaged[1][..., :half], averaged[2][..., :half]], dim=-1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).permute(2, 0, 1, 3)


def flex(length: int, device: torch.device) -> Candidate:
    """Let torch's FlexAttention take a value twice as wide as the key."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return query >= key

    # Without these a long mask is built whole, and the ninth compilation silently runs unfused.
    torch._dynamo.reset()
    mask = create_block_mask(causal, None, None, length, length, device=device.type, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.cat([v, z], dim=-1)
        q, k = rotate_groups(q, z), rotate_groups(k, z)
        q, k, value = (x.permute(1, 2, 0, 3) for x in (q, k, value))
        out = compiled(q, k, value, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).permute(2, 0, 1, 3)
        return out.chunk(2, dim=-1)

    return attend


def with_backend(backend: str) -> Candidate:
    """Return TAPE's attention."""
    return lambda q, k, v, z: attention(q, k, v, z, True, None, backend)


def with_phases(backend: str, phases: Tensor) -> Candidate:
    """Return RoPE's attention, whose state is one for all sequences and heads, and has no gradient."""
    return lambda q, k, v, z: attention(q, k, v, phases.to(q.dtype), False, None, backend)


def rope(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return RoPE's phases (S, 1, 1, D)."""
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2).float() / dim)
    return rope_phases(torch.arange(length), frequencies)[:, None, None].to(device, dtype)


def candidates(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Candidate]:
    """Return RoPE's and TAPE's candidates that can run, by name; say why others cannot."""
    found: dict[str, Candidate] = {}
    phases = rope(length, dim, dtype, device)
    for backend in ("torch", "tiled", "flash_attn", "triton"):
        why = unsupported(backend, device, dtype, dim)
        if backend == "tiled" and device.type != "cpu":
            why = "is for CPUs"
        if why:
            print(f"{backend} {why}", file=sys.stderr)
            continue
        found[f"rope {backend}"] = with_phases(backend, phases)
        found[f"tape {backend}"] = with_backend(backend)
    found["tape released"] = released
    if device.type == "cuda":
        found["tape flex"] = flex(length, device)
    else:
        print("flex is compiled for GPUs only here", file=sys.stderr)
    return found


def inputs(length: int, batch: int, heads: int, groups: int, dim: int, dtype: torch.dtype, device: torch.device):
    """Draw q, k, v and z; z is a state of RoPE's phases that was rewritten a little."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(length, batch, n, dim) for n in (heads, groups, groups, groups)]
    q, k, v, z = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    z.mul_(0.1).add_(rope(length, dim, dtype, device))
    return [x.requires_grad_() for x in (q, k, v, z)]


def run(candidate: Candidate, tensors: list[Tensor], backward: bool) -> None:
    """Run forward, and backward from a gradient of ones."""
    with torch.set_grad_enabled(backward):
        outputs = [x for x in candidate(*tensors) if x is not None]
    if backward:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        for tensor in tensors:
            tensor.grad = None


def check_parity(
    name: str, candidate: Candidate, heads: int, groups: int, dim: int, dtype, device, length
) -> str | None:
    """Return how outputs or gradients differ from float64's, if they do by more than twice plain torch's rounding."""
    tensors = inputs(length, 1, heads, groups, dim, dtype, device)
    naive = with_backend("naive")
    if name.startswith("rope"):
        naive = with_phases("naive", rope(length, dim, dtype, device))

    def all_of(function: Candidate, kind: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(kind).requires_grad_() for x in tensors]
        outputs = [x for x in function(*leaves) if x is not None]
        generator = torch.Generator(device).manual_seed(1)
        directions = [torch.randn(x.shape, generator=generator, device=device).to(x) for x in outputs]
        torch.autograd.backward(outputs, directions)
        return [x.double() for x in (*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None))]

    exact, plain = all_of(naive, torch.float64), all_of(naive, dtype)
    for index, (ours, theirs, truth) in enumerate(zip(all_of(candidate, dtype), plain, exact, strict=True)):
        error, allowed = ((x - truth).norm() / truth.norm() for x in (ours, theirs))
        if not error <= 2 * allowed + 1e-5:
            return f"tensor {index} is off by {error:.1e}, plain torch by {allowed:.1e}"
    return None


def timed(functions: dict[str, Callable[[], None]], repetitions: int, device: torch.device) -> dict[str, dict]:
    """Return the median seconds of each function, and its peak memory above what was there, of alternating runs.

    On a GPU a run is as many calls as take 20 ms, so that launching is hidden. A function that fails has no figure.
    """
    on_gpu = device.type == "cuda"

    def once(function: Callable[[], None], calls: int) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            function()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / calls

    memory: dict[str, int | None] = {}
    calls: dict[str, int] = {}
    for name, function in functions.items():
        try:
            once(function, 1)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            first = once(function, 1)
        except Exception as error:  # out of memory, for instance
            print(f"{name} gets no figure: {type(error).__name__}", file=sys.stderr)
            continue
        memory[name] = torch.cuda.max_memory_allocated() - before if on_gpu else None
        calls[name] = max(1, int(0.02 / first)) if on_gpu else 1
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name in calls:
            seconds[name].append(once(functions[name], calls[name]))
    return {
        name: {"seconds": statistics.median(values), "memory_bytes": memory[name]} for name, values in seconds.items()
    }


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of one large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / timed({"matmul": lambda: a @ b}, 10, device)["matmul"]["seconds"]


def layer(candidate: Candidate, heads: int, groups: int, dim: int, dtype, device) -> Candidate:
    """Return a whole attention layer around `candidate`: its projections from and to hidden states."""
    width = heads * dim
    qkv = torch.randn(width, (heads + 2 * groups) * dim, dtype=dtype, device=device) * width**-0.5
    proj = torch.randn(width, width, dtype=dtype, device=device) * width**-0.5
    qkv.requires_grad_()
    proj.requires_grad_()

    def whole(hidden: Tensor, _k: Tensor, _v: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = (hidden.flatten(2) @ qkv).unflatten(2, (-1, dim)).split([heads, groups, groups], dim=2)
        o, u = candidate(q, k, v, z)
        return o.flatten(2) @ proj, u

    return whole


def measure(
    shape: tuple[int, int, int], length: int, arguments: argparse.Namespace, device: torch.device, peak
) -> dict:
    """Time every candidate at one shape and length, forward and forward with backward, alone and in its layer."""
    (heads, groups, dim), dtype = shape, DTYPES[arguments.precision]
    batch = max(1, arguments.tokens // length)
    found = candidates(length, dim, dtype, device)
    for name in list(found):
        try:
            # FlexAttention's mask is of one length.
            checked = length if name == "tape flex" and length <= 4096 else min(length, 257)
            candidate = flex(checked, device) if name == "tape flex" else found[name]
            why = check_parity(name, candidate, heads, groups, dim, dtype, device, checked)
        except Exception as error:  # a compiler may raise anything
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if why:
            print(f"{name} gets no figure: {why}", file=sys.stderr)
            del found[name]
    tensors = inputs(length, batch, heads, groups, dim, dtype, device)
    result: dict = {"heads": heads, "groups": groups, "head_dim": dim, "length": length, "batch": batch}
    for what, functions in (
        ("attention", found),
        ("layers", {name: layer(f, heads, groups, dim, dtype, device) for name, f in found.items()}),
    ):
        for backward in (False, True):
            timings = timed(
                {name: partial(run, f, tensors, backward) for name, f in functions.items()},
                arguments.repetitions,
                device,
            )
            baselines = [name for name in timings if name.startswith("rope")]
            if not baselines:
                print("RoPE itself gets no figure here, so there are no ratios", file=sys.stderr)
                continue
            fastest = min(baselines, key=lambda name: timings[name]["seconds"])
            for name, timing in timings.items():
                timing["ratio"] = timing["seconds"] / timings[fastest]["seconds"]
                if timing["memory_bytes"]:
                    timing["memory_ratio"] = timing["memory_bytes"] / max(1, timings[fastest]["memory_bytes"])
                if what == "attention":
                    values = 2 if name.startswith("tape") else 1
                    pairs = batch * heads * dim * length * (length + 1) // 2
                    # Forward: scores and each value. Backward: scores again, their gradient twice, each value twice.
                    flops = 2 * pairs * (1 + values + (backward and 3 + 2 * values))
                    timing["tflops"] = flops / timing["seconds"] / 1e12
                    timing["of_matmul_peak"] = flops / timing["seconds"] / peak
            result[f"{what} {'forward+backward' if backward else 'forward'}"] = {"against": fastest, **timings}
    return result


def shape_of(text: str) -> tuple[int, int, int]:
    """Read `12x64` or `32/8x128` as heads, groups and head dimension."""
    heads, dim = text.split("x")
    heads, _, groups = heads.partition("/")
    return int(heads), int(groups or heads), int(dim)


def main() -> None:
    """Print a table; `--record` also writes benchmarks/results/attention-*.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["12x64", "16x64", "32x128", "32/8x128"], metavar="H[/G]xD")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch, if a sequence is not longer")
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/attention-*.json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = matmul_peak(DTYPES[arguments.precision], device)
    print(f"matmul: {peak / 1e12:.1f} TFLOP/s")
    results = []
    for shape, length in itertools.product(arguments.shapes, arguments.lengths):
        result = measure(shape_of(shape), length, arguments, device, peak)
        results.append(result)
        for what, timings in result.items():
            if isinstance(timings, dict):
                print(f"\n{shape}, {length} tokens, batch {result['batch']}, {what}, against {timings['against']}")
                for name, timing in timings.items():
                    if isinstance(timing, dict):
                        print(
                            f"  {name:16} {timing['seconds'] * 1e3:9.2f} ms {timing['ratio']:6.2f}x"
                            + (f" {timing['tflops']:7.1f} TFLOP/s" if "tflops" in timing else "")
                            + (f" memory {timing['memory_ratio']:.2f}x" if "memory_ratio" in timing else ""),
                            flush=True,
                        )
    if arguments.record:
        record("attention", {"arguments": vars(arguments), "matmul_flops": peak, "results": results})


if __name__ == "__main__":
    main()
