"""The attention backends, one module each, and their capabilities. Imports neither the modules nor
torch.
"""

from collections.abc import Set
from dataclasses import dataclass

ROTATION = "rotation"
AVERAGE = "average"
POINTWISE = "pointwise"
BIAS = "bias"
GATE = "gate"
SCORES = "scores"
REFLECTIONS = "reflections"
DECAY = "decay"
SINK = "sink"
WINDOW = "window"
MEANINGS = {
    ROTATION: "rotate queries and keys by a position state",
    AVERAGE: "average a position state along with the values",
    POINTWISE: "add a bias, computed pair by pair, to the scores",
    BIAS: "add a bias, computed tile by tile, to the scores",
    GATE: "lower the scores of keys with forget gates",
    SCORES: "compute scores that depend on all keys of a query",
    REFLECTIONS: "apply the reflections of all tokens between a key and a query",
    DECAY: "lower the products of queries and keys channel by channel",
    SINK: "give a part of the attention weights to a sink",
    WINDOW: "attend within a sliding window",
}
"""Capabilities that a model may require, most of them for its positional encoding, with their
descriptions in messages.
"""


@dataclass(frozen=True)
class Backend:
    """The capabilities (keys of `MEANINGS`), dtypes and head dimensions that a backend supports;
    None means all.
    """

    can: frozenset[str]
    """The capabilities, each of them alone."""
    precisions: tuple[str, ...] | None = None
    """None also means that the backend is in plain torch, and runs on every device."""
    head_dims: tuple[int, ...] | range | None = None
    not_together: frozenset[str] = frozenset()
    """Capabilities that the backend does not have all at once."""


_ALL = frozenset(MEANINGS)
_STATE_ONLY = frozenset({ROTATION, AVERAGE, WINDOW})
_HALF = ("bf16", "fp16")
_HALF_AND_FP32 = (*_HALF, "fp32")
# The arguments are the capabilities, precisions and head dimensions.
BACKENDS = {
    "triton": Backend(_STATE_ONLY, _HALF_AND_FP32, (32, 64, 80, 96, 128)),
    "tiled": Backend(_ALL),
    "torch": Backend(_ALL - {SCORES, REFLECTIONS, DECAY, SINK}),
    "torch_wide": Backend(_STATE_ONLY, _HALF, range(8, 65, 8)),
    "flash_attn": Backend(_STATE_ONLY, _HALF, range(8, 257, 8)),
    "flex": Backend(
        frozenset({ROTATION, POINTWISE, GATE, WINDOW}),
        _HALF_AND_FP32,
        range(16, 257, 8),
    ),
    "fla": Backend(
        frozenset({ROTATION, GATE, REFLECTIONS, DECAY, SINK, WINDOW}),
        _HALF,
        range(16, 257, 8),
        # Its kernels for reflections have no window, those for gates do.
        frozenset({REFLECTIONS, WINDOW}),
    ),
    "naive": Backend(_ALL),
}
ONLY_HALF = frozenset(
    name for name, backend in BACKENDS.items() if "fp32" not in (backend.precisions or ("fp32",))
)
"""Backends that support only 16-bit dtypes. Those without `precisions` support all dtypes."""
LIBRARIES = ("torch", "torch_wide", "flash_attn")
"""Backends that call kernels of torch or flash-attn. If these are inexact, `auto` tries the next
row of its table.
"""


def described(needs: Set[str]) -> str:
    """Return the `MEANINGS` of `needs`, joined by "and", in a fixed order."""
    # Encodings of other packages may have needs that are not in `MEANINGS`.
    ordered = [*(need for need in MEANINGS if need in needs), *sorted(needs - set(MEANINGS))]
    return " and ".join(MEANINGS.get(need, need) for need in ordered)


def unsupported_heads(backend: str, head_dim: int) -> str | None:
    """Return why the backend does not support this head dimension, as the predicate of a sentence,
    or None.
    """
    supported = BACKENDS[backend].head_dims
    if supported is None or head_dim in supported:
        return None
    if isinstance(supported, range):
        in_words = f"{supported[0]} to {supported[-1]} in steps of 8"
    else:
        in_words = ", ".join(map(str, supported))
    return f"supports head dimensions {in_words}, not {head_dim}"


def lacks(backend: str, needs: Set[str]) -> str | None:
    """Return which of `needs` the backend lacks, as the predicate of a sentence, or None."""
    missing = set(needs) - BACKENDS[backend].can
    if missing:
        return f"cannot {described(missing)}"
    together = BACKENDS[backend].not_together
    if together and together <= set(needs):
        return f"cannot {described(together)} at once"
    return None
