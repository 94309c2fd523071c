"""The table from which `auto` selects an attention backend. Imports no torch.

Rows are tried from top to bottom. The first row that fits the run, and whose backend runs and is
exact, is selected. Rows without measurements are ordered by their number of matrix products and by
the libraries' published figures (docs/attention.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_tape.ops.backends import (
    AVERAGE,
    BIAS,
    DECAY,
    GATE,
    POINTWISE,
    REFLECTIONS,
    SCORES,
    SINK,
    WINDOW,
    lacks,
)

CPU = "CPU"
OTHER_GPU = "other GPU"
HOPPER = "Hopper"
BLACKWELL = "Blackwell"
"""Generations of devices. Hopper is compute capability 9.x, Blackwell 10.x; AMD's GPUs count as
other GPUs.
"""
GPUS = frozenset({OTHER_GPU, HOPPER, BLACKWELL})
WITH_CUDNN = frozenset({HOPPER, BLACKWELL})
"""Generations on which torch's SDPA runs cuDNN's kernels."""
FLASH_ATTN_4_WIDE = {HOPPER: (64, 128), BLACKWELL: (64,)}
"""Head dimensions for which FlashAttention-4 supports [v | z] as a value, by generation. With
grouped queries, keys and values must be repeated for each query head (`flash`)."""

PLAIN = "plain"
AVERAGES = "averages"
SCORED = "scored"
"""Kinds of attention: plain only rotates queries and keys, if at all; averages also averages the
position state; scored changes the scores by a bias, gates, a sink or a `Rescore`."""


@dataclass(frozen=True)
class Case:
    """The properties of a run that decide which backend is fastest."""

    generation: str
    needs: frozenset[str]
    head_dim: int
    half_precision: bool = True
    """Whether queries, keys and values are in bf16 or fp16."""
    packed: bool = False
    """Whether sequences consist of documents that do not attend to each other."""
    segments: bool = False
    """Whether heads attend within segments (`ops.shifted`)."""
    deterministic: bool = False
    """Whether a run must be reproducible bit for bit."""
    grouped: bool = False
    """Whether query heads share keys and values (GQA)."""

    @property
    def kind(self) -> str:
        """The kind of attention that the encoding requires."""
        if {POINTWISE, BIAS, GATE, SCORES, REFLECTIONS, DECAY, SINK} & self.needs:
            return SCORED
        if AVERAGE in self.needs:
            return AVERAGES
        return PLAIN

    @property
    def is_bounded(self) -> bool:
        """Whether tokens attend only within documents, segments or a window."""
        return self.packed or self.segments or WINDOW in self.needs


@dataclass(frozen=True)
class Row:
    """A backend, the cases in which `auto` tries it, and the reason."""

    kind: str
    generations: frozenset[str]
    backend: str
    reason: str
    head_dims: range | tuple[int, ...] = range(1, 1025)
    condition: Callable[[Case], bool] = lambda case: True
    slow: bool = False
    """Whether training with this backend requires `train.allow_slow_attention`, since faster
    kernels exist.
    """
    flash_attn_4: bool = False
    """Whether `auto` selects this row only if flash-attn runs in version 4."""
    measured: str | None = None
    """Where the measurements that support this row are; None if there are none."""

    def fits(self, case: Case) -> bool:
        """Return whether the row applies to the case."""
        same_kind = self.kind == case.kind and case.generation in self.generations
        return same_kind and case.head_dim in self.head_dims and self.condition(case)

    def __str__(self) -> str:
        """Return the reason for the row, and where it was measured."""
        return f"{self.reason} ({self.measured or 'not measured'})"


def _suits_any_kernel(case: Case) -> bool:
    """Return whether the case has no needs that only some kernels meet: it uses a 16-bit dtype, has
    no documents, segments or window, and need not be deterministic.
    """
    return case.half_precision and not case.is_bounded and not case.deterministic


def _suits_flash_attn_4(case: Case) -> bool:
    """Return whether FlashAttention-4 was measured in such cases."""
    return _suits_any_kernel(case) and not case.grouped


_ON_CPU = frozenset({CPU})
_ON_HOPPER = frozenset({HOPPER})
_H200 = "on an H200: docs/gpu.md"
# Each row begins with its kind, generations, backend and reason.
TABLE = (
    Row(AVERAGES, _ON_CPU, "tiled", "one pass over [v | z]", measured="benchmarks/LOG.md"),
    Row(
        AVERAGES,
        _ON_HOPPER,
        "flash_attn",
        "one call of FlashAttention-4 on [v | z]",
        head_dims=(64, 128),
        condition=_suits_flash_attn_4,
        flash_attn_4=True,
        measured=_H200,
    ),
    Row(
        AVERAGES,
        WITH_CUDNN,
        "torch_wide",
        "one call of cuDNN on [v | z]",
        head_dims=range(8, 65),
        condition=_suits_any_kernel,
        measured=_H200,
    ),
    # Two calls, one for v and one for z, take 14 matrix products instead of 10. By estimates, the
    # difference takes longer than repeating keys and values.
    Row(
        AVERAGES,
        _ON_HOPPER,
        "flash_attn",
        "one call of FlashAttention-4 on [v | z], repeated for each query head",
        head_dims=(128,),
        condition=lambda case: _suits_any_kernel(case) and case.grouped,
        flash_attn_4=True,
    ),
    Row(
        AVERAGES,
        WITH_CUDNN,
        "torch",
        "a call of cuDNN for v and one for z",
        head_dims=range(65, 257),
        condition=_suits_any_kernel,
        measured=_H200,
    ),
    Row(
        AVERAGES,
        GPUS,
        "triton",
        "one pass over [v | z], skips keys outside documents and windows, can be deterministic",
    ),
    Row(AVERAGES, GPUS, "torch", "a call for v and one for z", slow=True),
    Row(SCORED, _ON_CPU, "tiled", "scores tile by tile"),
    Row(SCORED, GPUS, "fla", "a kernel for these scores"),
    Row(SCORED, GPUS, "flex", "a kernel compiled for these scores"),
    Row(SCORED, GPUS, "tiled", "scores tile by tile", slow=True),
    Row(
        PLAIN,
        _ON_CPU,
        "tiled",
        "skips the keys outside segments and windows",
        condition=lambda case: case.segments or WINDOW in case.needs,
    ),
    Row(
        PLAIN,
        GPUS,
        "flash_attn",
        "skips the keys outside documents and windows",
        condition=lambda case: case.is_bounded,
    ),
    Row(
        PLAIN,
        GPUS,
        "triton",
        "skips the keys outside documents and windows",
        condition=lambda case: case.is_bounded,
    ),
    Row(
        PLAIN,
        _ON_HOPPER,
        "flash_attn",
        "FlashAttention-4, faster than torch for these heads",
        head_dims=(128,),
        condition=_suits_flash_attn_4,
        flash_attn_4=True,
        measured=_H200,
    ),
    Row(PLAIN, GPUS | _ON_CPU, "torch", "torch's choice among its kernels", measured=_H200),
    Row(PLAIN, GPUS, "triton", "the project's kernel instead of torch's"),
)


def rows(case: Case) -> Iterator[Row]:
    """Yield the rows that fit a case and whose backends have its capabilities, in order; the
    backend naive comes last.
    """
    last = Row(
        case.kind, frozenset({case.generation}), "naive", "no other backend can run", slow=True
    )
    for row in (*TABLE, last):
        if row.fits(case) and not lacks(row.backend, case.needs):
            yield row
