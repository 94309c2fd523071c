"""The table by which `auto` chooses an attention backend. Imports no torch.

Rows are tried from top to bottom. The first row that fits a case, and whose backend runs there and is exact, wins. A
row that is not measured has its place by counts of matrix products and by what the libraries publish
(docs/attention.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_tape.ops.backends import AVERAGE, BIAS, GATE, POINTWISE, REFLECTIONS, SCORES, lacks

CPU, OTHER_GPU, HOPPER, BLACKWELL = "CPU", "other GPU", "Hopper", "Blackwell"
"""Generations of devices. Hopper has compute capability 9.x and Blackwell 10.x; AMD's GPUs are other GPUs."""
GPUS = frozenset({OTHER_GPU, HOPPER, BLACKWELL})
WITH_CUDNN = frozenset({HOPPER, BLACKWELL})
"""Generations on which torch's SDPA runs cuDNN's kernels."""

PLAIN, AVERAGES, SCORED = "plain", "averages", "scored"
"""What an encoding asks of attention: rotated queries and keys at most; the position state averaged along with the
values; or scores that are changed by a bias, gates, reflections or whole rows."""


@dataclass(frozen=True)
class Case:
    """What decides which backend is fastest."""

    generation: str
    needs: frozenset[str]
    head_dim: int
    half_precision: bool = True
    """Whether queries, keys and values are in bf16 or fp16."""
    packed: bool = False
    """Whether sequences hold several documents that do not attend to each other."""
    segments: bool = False
    """Whether heads attend within segments (`ops.shifted`)."""
    deterministic: bool = False
    """Whether a run must give the same bits every time."""
    grouped: bool = False
    """Whether query heads share keys and values (GQA)."""

    @property
    def kind(self) -> str:
        """The kind of attention that the encoding asks for."""
        if {POINTWISE, BIAS, GATE, SCORES, REFLECTIONS} & self.needs:
            return SCORED
        return AVERAGES if AVERAGE in self.needs else PLAIN

    @property
    def whole(self) -> bool:
        """Whether every query attends to all earlier tokens of its sequence."""
        return not (self.packed or self.segments)


@dataclass(frozen=True)
class Row:
    """A backend, the cases in which it is tried, and why."""

    kind: str
    generations: frozenset[str]
    backend: str
    reason: str
    head_dims: range | tuple[int, ...] = range(1, 1025)
    condition: Callable[[Case], bool] = lambda case: True
    slow: bool = False
    """Whether a run should not train with it unless the user allows it, since kernels exist that should run."""
    flash_attn_4: bool = False
    """Whether flash-attn must be version 4."""
    measured: str | None = None
    """Where the figures stand that show it to be the fastest; None if there are none."""

    def fits(self, case: Case) -> bool:
        """Return whether the row is for this case."""
        same = self.kind == case.kind and case.generation in self.generations
        return same and case.head_dim in self.head_dims and self.condition(case)

    def __str__(self) -> str:
        return f"{self.reason} ({self.measured or 'not measured'})"


def _free(case: Case) -> bool:
    """Whether a library's kernel can be used: it masks no documents and need not repeat its bits."""
    return case.whole and case.half_precision and not case.deterministic


def _cut(case: Case) -> bool:
    return not case.whole


_ON_CPU = frozenset({CPU})
_H200 = "on an H200: docs/gpu.md"
TABLE = (
    Row(AVERAGES, _ON_CPU, "tiled", "one pass over [v | z]", measured="docs/attention.md"),
    Row(AVERAGES, WITH_CUDNN, "torch_wide", "one call of cuDNN on [v | z]", range(8, 65), _free, measured=_H200),
    Row(
        AVERAGES,
        frozenset({HOPPER}),
        "flash_attn",
        "one call of FlashAttention-4 on [v | z]",
        (128,),
        lambda case: _free(case) and not case.grouped,
        flash_attn_4=True,
        measured=_H200,
    ),
    Row(AVERAGES, WITH_CUDNN, "torch", "a call of cuDNN for v and one for z", range(65, 257), _free, measured=_H200),
    Row(AVERAGES, GPUS, "triton", "one pass over [v | z] that skips other documents and can repeat its bits"),
    Row(AVERAGES, GPUS, "torch", "a call for v and one for z", slow=True),
    Row(SCORED, _ON_CPU, "tiled", "scores tile by tile"),
    Row(SCORED, GPUS, "fla", "a kernel made for these scores"),
    Row(SCORED, GPUS, "flex", "a kernel compiled for these scores"),
    Row(SCORED, GPUS, "tiled", "scores tile by tile", slow=True),
    Row(PLAIN, _ON_CPU, "tiled", "skips the keys of other segments", condition=lambda case: case.segments),
    Row(PLAIN, GPUS, "flash_attn", "skips the keys of other documents", condition=_cut),
    Row(PLAIN, GPUS, "triton", "skips the keys of other documents", condition=_cut),
    Row(PLAIN, GPUS | _ON_CPU, "torch", "torch's choice among its kernels", measured=_H200),
    Row(PLAIN, GPUS, "triton", "our kernel instead of torch's"),
)


def rows(case: Case) -> Iterator[Row]:
    """Yield the rows for a case whose backends can do what it needs, in order; at the end plain torch."""
    last = Row(case.kind, frozenset({case.generation}), "naive", "no other backend can run", slow=True)
    for row in (*TABLE, last):
        if row.fits(case) and not lacks(row.backend, case.needs):
            yield row
