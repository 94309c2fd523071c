"""A rehearsal beside the arithmetic for the same short run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_tape.planning.communication import ALL_GATHER, Traffic, communication
from megatron_tape.planning.memory import memory_of_stage
from megatron_tape.planning.plan import Plan
from megatron_tape.planning.rehearsal.run import Rehearsal

MIB = 2**20
TOLERANCE, PEAK_TOLERANCE = 0.05, 0.10
SMALL = 0.001
"""Collectives with less than this share of their group's bytes are shown but not compared."""


@dataclass(frozen=True)
class Row:
    """A rehearsed quantity and its estimate, in bytes, FLOPs or calls."""

    name: str
    rehearsed: int
    estimated: int | None
    """None: the arithmetic does not tell."""
    tolerance: float | None
    """The relative difference that is allowed; None allows any."""
    unit: int = MIB
    """What the figures are shown in."""

    @property
    def agrees(self) -> bool:
        if self.tolerance is None or self.estimated is None:
            return True
        return abs(self.rehearsed - self.estimated) <= self.tolerance * max(self.rehearsed, self.estimated)

    def __str__(self) -> str:
        figures = (("-" if figure is None else self._shown(figure)) for figure in (self.rehearsed, self.estimated))
        return f"{self.name:<44}{''.join(f'{figure:>14}' for figure in figures)}{'' if self.agrees else '  DIFFERS'}"

    def _shown(self, figure: int) -> str:
        return f"{figure:,}" if self.unit == 1 else f"{figure / self.unit:,.2f}"


def compared(outcome: Rehearsal, processes: int) -> Iterator[Row]:
    """Yield what both the rehearsal and the arithmetic say about the short run."""
    parallel = outcome.config.parallel
    plan = Plan(
        outcome.config, processes, outcome.rank // parallel.ranks_per_stage % parallel.pipeline_model_parallel_size
    )
    expected = memory_of_stage(plan)
    yield Row("weights", outcome.weights, expected.weights, TOLERANCE)
    yield Row("optimizer state", outcome.optimizer, expected.optimizer, TOLERANCE)
    yield Row("kept by a forward pass", outcome.activations, expected.layer_activations + expected.logits, TOLERANCE)
    yield Row("peak while the weights are made", outcome.start, None, None)
    yield Row("peak", outcome.peak, expected.peak, PEAK_TOLERANCE)
    by_muon = plan.muon_elements > 0  # what it sends is not counted
    planned, sent = communication(plan, outcome.replicated_share), outcome.record.traffic
    totals = Counter()
    for (group, _), traffic in planned.items():
        totals[group] += traffic.bytes
    largest = max(totals.values(), default=0)
    both = [(key, sent.get(key, Traffic()), planned.get(key, Traffic())) for key in sorted({*sent, *planned})]
    for (group, kind), here, there in both:
        small = max(here.bytes, there.bytes) <= SMALL * totals.get(group, largest)
        any_size = small or (by_muon and kind == ALL_GATHER)
        yield Row(f"{group}: {kind}", here.bytes, there.bytes, None if any_size else TOLERANCE)
    for (group, kind), here, there in both:
        any_number = by_muon and kind == ALL_GATHER
        yield Row(f"{group}: {kind} calls", here.calls, there.calls, None if any_number else 0.0, unit=1)
    for (group, kind), here in sorted(outcome.save.traffic.items()):
        yield Row(f"{group}: {kind} in a save", here.bytes, None, None)
