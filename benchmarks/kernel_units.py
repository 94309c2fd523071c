"""The checks of the fused kernels for one shape and number type, each reported at once; see `check_kernels`.

    python -m benchmarks.kernel_units SHAPE PRECISION sizes|lengths LENGTH SKIPPED

It reports as `programs` describes. After a fault of CUDA the process ends, since nothing that it computes afterwards
could be trusted.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from unittest import mock

from benchmarks.programs import report

PRECISIONS = ("bf16", "fp32", "fp16")
LENGTHS = (1, 63, 1025, 4096)
TOKENS = 10_000
"""Tokens of a large position update, of which every program takes many."""


@dataclass(frozen=True)
class Unit:
    """What one process checks: `sizes`, the variants of every kernel at one length, or `lengths`, several lengths."""

    shape: str
    """Heads, or heads/groups, times their width, such as 32/8x128."""
    precision: str
    kind: str = "sizes"
    longest: int | None = None
    """Longest sequence; None means what a GPU has room for."""

    @property
    def name(self) -> str:
        """Its name in the record."""
        return f"{self.shape} {self.precision}{', lengths' if self.kind == 'lengths' else ''}"

    def sizes(self) -> tuple[int, int, int]:
        """Return heads, groups and their width. Raises ValueError if the shape is none."""
        found = re.fullmatch(r"([1-9]\d*)(?:/([1-9]\d*))?x([1-9]\d*)", self.shape)
        heads, groups, dim = (int(n) for n in (found[1], found[2] or found[1], found[3])) if found else (1, 2, 1)
        if heads % groups or dim % 2:
            raise ValueError(f"{self.shape} is not of the form 12x64 or 32/8x128, with heads/groups and an even width")
        return heads, groups, dim

    def arguments(self) -> list[str]:
        """Return the unit as arguments of this program."""
        return [self.shape, self.precision, self.kind, str(self.longest or 0)]


def checks_of(unit: Unit, dtype, device) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Yield the name of every check, and what runs it and returns its result."""
    from megatron_tape.ops.attention import attention
    from megatron_tape.ops.parity import Check, Shapes, kernel_checks

    heads, groups, dim = unit.sizes()
    shapes = Shapes(heads, groups, dim, 4 * heads, averages=True, full_mixing=True, fp32_state=True)
    compare = partial(compared, dtype=dtype)
    if unit.kind == "lengths":
        # A few heads suffice for what depends on the length, and float64's scores of all of them would not fit.
        kept = min(groups, 2 if heads == groups else 1)
        few = replace(shapes, heads=heads // groups * kept, groups=kept)
        for length in LENGTHS:
            if unit.longest and length > unit.longest:
                length = unit.longest
            found = kernel_checks(few, dtype, device, length)
            for name in ("attention", "attention of packed documents"):
                yield f"{name}, {length} tokens", partial(compare, found[name])
            if length == unit.longest:
                break
        tokens = 3 * unit.longest if unit.longest else TOKENS
        if update := kernel_checks(shapes, dtype, device, 1, tokens).get("position update"):
            yield f"position update, {tokens} tokens", partial(compare, update)
        return

    tokens = unit.longest or 48
    found = kernel_checks(shapes, dtype, device, unit.longest, tokens)
    for name, check in found.items():
        yield name, partial(compare, check)
    others = {"position update of a state in the type of the rest": replace(shapes, fp32_state=False)}
    others["position update with a scale per head"] = replace(shapes, full_mixing=False)
    for name, other in others.items():
        if other.full_mixing if unit.precision != "fp32" else groups == heads and not other.full_mixing:
            if update := kernel_checks(other, dtype, device, 1, tokens).get("position update"):
                yield name, partial(compare, update)

    def attends(backend: str, rotate: bool = True, prepare: Callable = lambda x: x) -> Callable:
        return lambda *tensors: attention(*map(prepare, tensors), True, None, backend, rotate)

    inputs = found["attention"].inputs
    unrotated = Check(attends("triton", False), attends("torch", False), inputs)
    yield "attention without rotation", partial(compare, unrotated)
    strided = Check(attends("triton", prepare=apart), attends("torch"), inputs)
    yield "attention of inputs that are not contiguous", partial(compare, strided)
    cached = Check(attends("triton", False), attends("torch", False), [inputs[0][:1], *inputs[1:]])
    yield "attention of one query to a cache", partial(compare, cached)
    for name in ("attention", "attention of packed documents", "position update"):
        if name in found:
            yield f"{name}, repeatable", partial(repeated, found[name], dtype)


def apart(x):
    """Return x as a view whose sequences lie apart, between other numbers, as a model's queries and keys do."""
    import torch

    between = torch.stack([x, torch.full_like(x, float("nan"))], dim=3).transpose(0, 1).contiguous().transpose(0, 1)
    return between[:, :, :, 0]


def compared(check, dtype) -> dict:
    """Return whether a check is exact, and the deviation that is largest in relation to what is allowed."""
    from megatron_tape.ops.parity import deviations

    with nan_in_new_memory():
        worst = max(deviations(*check, dtype), key=lambda d: d.error / d.allowed if isfinite(d.error) else inf)
    figures = {"error": worst.error, "rounding": worst.rounding, "allowed": worst.allowed}
    result = {"passed": worst.exact, **{name: x if isfinite(x) else None for name, x in figures.items()}}
    return result if worst.exact else result | {"why": str(worst)}


def repeated(check, dtype) -> dict:
    """Compare the kernels of a deterministic run, and also with themselves, bit for bit."""
    import torch

    def once() -> list:
        leaves = [x.detach().requires_grad_() for x in check.inputs]
        outputs = [x for x in check.ours(*leaves) if x is not None]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        return [*outputs, *(leaf.grad for leaf in leaves)]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        result = compared(check, dtype)
        differing = [i for i, pair in enumerate(zip(once(), once())) if not torch.equal(*pair)]
    finally:
        torch.use_deterministic_algorithms(False)
    if differing:
        result |= {"passed": False, "why": f"tensors {differing} differ from run to run"}
    return result


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill memory that `torch.empty` and `torch.empty_like` return with NaN, so that what is not written shows."""
    import torch

    def filled(function: Callable) -> Callable:
        def call(*arguments, **named):
            x = function(*arguments, **named)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return call

    with (
        mock.patch.object(torch, "empty", filled(torch.empty)),
        mock.patch.object(torch, "empty_like", filled(torch.empty_like)),
    ):
        yield


class Compiled:
    """Counts the kernels that Triton compiles, and the seconds that this takes."""

    def __init__(self):
        import triton

        self.kernels, self.seconds = 0, 0.0
        triton.knobs.compilation.listener = self._note

    def _note(self, *, times, cache_hit: bool, **_) -> None:
        if not cache_hit:
            self.kernels, self.seconds = self.kernels + 1, self.seconds + times.total / 1e6

    def take(self) -> dict:
        """Return both since the last call."""
        found = {"compiled": self.kernels, "compile_seconds": round(self.seconds, 1)}
        self.kernels, self.seconds = 0, 0.0
        return found


def main() -> int:
    """Run the checks of a unit behind those to skip; return the exit status."""
    *unit, longest, skipped = sys.argv[1:]
    unit = Unit(*unit, int(longest) or None)
    import torch

    from benchmarks.timing import DTYPES

    warnings.filterwarnings("ignore")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return report(checks_of(unit, DTYPES[unit.precision], device), int(skipped), Compiled().take)


if __name__ == "__main__":
    sys.exit(main())
