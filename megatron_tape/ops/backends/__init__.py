"""The attention backends, a module each, and what each of them can do. Imports neither the modules nor torch."""

from collections.abc import Set
from dataclasses import dataclass

ROTATION, AVERAGE, BIAS, GATE, SCORES = "rotation", "average", "bias", "gate", "scores"
MEANINGS = {
    ROTATION: "rotate queries and keys by a position state",
    AVERAGE: "average a position state beside the values",
    BIAS: "add a bias to the scores",
    GATE: "weigh keys down by forget gates",
    SCORES: "take positions from the scores themselves",
}
"""What a positional encoding may need of attention."""


@dataclass(frozen=True)
class Backend:
    """What a backend can do, and the types it computes in; None stands for every type."""

    can: frozenset[str]
    precisions: tuple[str, ...] | None = None


BACKENDS = {
    "triton": Backend(frozenset({ROTATION, AVERAGE}), ("bf16", "fp16", "fp32")),
    "tiled": Backend(frozenset({ROTATION, AVERAGE, BIAS, GATE})),
    "torch": Backend(frozenset({ROTATION, AVERAGE, BIAS, GATE})),
    "flash_attn": Backend(frozenset({ROTATION, AVERAGE}), ("bf16", "fp16")),
    "naive": Backend(frozenset({ROTATION, AVERAGE, BIAS, GATE, SCORES})),
}


def described(needs: Set[str]) -> str:
    """Say what these needs mean, in one order always."""
    ordered = [*(need for need in MEANINGS if need in needs), *sorted(needs - set(MEANINGS))]
    return " and ".join(MEANINGS.get(need, need) for need in ordered)


def lacks(backend: str, needs: Set[str]) -> str | None:
    """Say in half a sentence which of `needs` the backend cannot do, or return None."""
    missing = set(needs) - BACKENDS[backend].can
    return f"cannot {described(missing)}" if missing else None
