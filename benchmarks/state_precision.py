"""What precision TAPE's position state needs: its drift from float64 over many layers, accumulated in bf16 or fp32.

    python -m benchmarks.state_precision [--record]

Random TAPE updates rewrite the states of tokens between positions 0 and 32,767 in 32 layers; their weights, gates and
attention maps are rounded to bf16 and are the same in all precisions. For several sizes of a layer's update relative to
the state, the table shows the relative errors of the sum of all updates and of attention's scores. In either precision,
queries and keys are rotated by the state rounded to bf16.
"""

import argparse

import torch
from torch import Tensor

from benchmarks.environment import Record, add_record_arguments, positive
from megatron_tape.ops.position_update import plain_update
from megatron_tape.ops.rotation import rotate

SIZES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
HEADS, HEAD_DIM, INNER, TOKENS, POSITIONS = 8, 64, 32, 256, 32768


def phases() -> Tensor:
    """Return RoPE's phases (N, H, D) of tokens evenly spread over the positions, in float64."""
    at = torch.linspace(0, POSITIONS - 1, TOKENS).round().double()
    angles = at[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)[:, None].expand(-1, HEADS, -1)


def draw_layer(generator: torch.Generator) -> list[Tensor]:
    """Return an attention map (H, N, N), a gate (N, P), A, W_up and W_down, with values that bf16 can represent."""
    scores = torch.randn(HEADS, TOKENS, TOKENS, generator=generator) * 2
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    drawn = [scores.masked_fill(~seen, float("-inf")).softmax(-1)]
    shapes = ((TOKENS, INNER), (HEADS, HEADS), (INNER, HEADS), (HEADS, INNER))
    drawn += [torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
    return [x.bfloat16().double() for x in drawn]


def run(layers: list[list[Tensor]], scale: float, state: torch.dtype, arithmetic: torch.dtype) -> Tensor:
    """Return the last state, kept in dtype `state`; updates are in `arithmetic`, with A and W_down times `scale`."""
    z = phases().to(state)
    for layer in layers:
        attention, gate, mixing, up, down = (x.to(arithmetic) for x in layer)
        u = torch.einsum("hnm,mhd->nhd", attention, z.to(arithmetic))
        z = plain_update(z, u, gate, mixing * scale, up, down * scale)
    return z


def scale_for(layer: list[Tensor], size: float) -> float:
    """Return the scale, as a bf16 value, that makes a layer's update the fraction `size` of the state."""
    start = phases()
    unscaled = run([layer], 1e-6, torch.float64, torch.float64)
    return float((size * 1e-6 * start.norm() / (unscaled - start).norm()).bfloat16())


def scores(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scores (H, N, N) of random queries and keys that a state in `dtype` rotates."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator).bfloat16().to(dtype) for _ in range(2))
    q, k = (rotate(x, z.to(dtype)).double() for x in (q, k))
    return torch.einsum("nhd,mhd->hnm", q, k) / HEAD_DIM**0.5


def drift(layers: list[list[Tensor]], size: float) -> dict:
    """Return the relative errors of one size of update, for each precision of the state."""
    scale = scale_for(layers[0], size)
    start, truth = phases(), run(layers, scale, torch.float64, torch.float64)
    moved, true_scores = truth - start, scores(truth, torch.float64)
    found: dict = {"update": size, "moved": float(moved.norm() / start.norm())}
    for name, state in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        z = run(layers, scale, state, torch.bfloat16)
        ours = z.double() - start.to(state).double()
        error = scores(z, torch.bfloat16) - true_scores
        found[name] = {
            "update_error": float((ours - moved).norm() / moved.norm()),
            "score_error": float(error.norm() / true_scores.norm()),
        }
    return found


def main() -> None:
    """Print a table; `--record` or `--output` also writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=32, help="layers (default: %(default)s)")
    add_record_arguments(parser)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    layers = [draw_layer(generator) for _ in range(arguments.layers)]
    print("size of an update | state moved by | error of the updates, bf16 / fp32 | error of scores, bf16 / fp32")
    results = []
    for size in SIZES:
        found = drift(layers, size)
        updates, shown = ([found[name][key] for name in ("bf16", "fp32")] for key in ("update_error", "score_error"))
        print(
            f"{size:17.0e} | {found['moved']:14.3g} | {updates[0]:20.2%} / {updates[1]:9.2%} | "
            f"{shown[0]:16.2%} / {shown[1]:7.2%}",
            flush=True,
        )
        results.append(found)
    Record("state_precision", arguments).write({"positions": POSITIONS, "results": results})


if __name__ == "__main__":
    main()
