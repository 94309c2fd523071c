"""`grid_navigation`: the accuracy of saying what a cell holds where a walk has been before."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_tape.errors import refuse
from megatron_tape.evaluation.base import ModelInfo
from megatron_tape.evaluation.tasks.synthetic_base import Variants, VariantSettings
from megatron_tape.synthetic import Generator
from megatron_tape.synthetic import GridNavigation as Walks


@dataclass(kw_only=True)
class GridNavigationSettings(VariantSettings):
    """Predicting what a cell holds that was visited before."""

    dimensions: int = 2
    """1 for a ring of cells, 2 for a torus, as in training."""
    objects: int = 16
    """Different objects, as in training."""
    longest_run: int | None = None
    """Steps for which a direction is kept at most, as in training; null means 10 in one dimension and 3 in two."""
    variants: dict[str, list[float]] = field(
        default_factory=lambda: {"IID": [128, 64, 0.5], "dense": [64, 32, 0.2], "sparse": [256, 128, 0.8]}
    )
    """Steps, width and share of blank cells, by the name of the variant; the first variant is that of the training."""


class GridNavigation(Variants):
    """Grid navigation as in training, and on maps that are denser and sparser; only revisited cells are scored."""

    name = "grid_navigation"
    Settings = GridNavigationSettings

    def check(self, info: ModelInfo) -> None:
        key, variants = self.key("variants"), self.settings.variants
        refuse(not variants, key, "is empty", "name a variant, such as {IID: [128, 64, 0.5]}")
        for name, values in variants.items():
            whole = len(values) == 3 and all(float(value).is_integer() for value in values[:2])
            fix = "give steps, width and share of blanks, such as [128, 64, 0.5]"
            refuse(not whole, f"{key}.{name}", f"is {values}", fix)
        super().check(info)

    def generators(self) -> dict[str, Generator]:
        settings = self.settings
        same = {key: getattr(settings, key) for key in ("dimensions", "objects", "longest_run")}
        return {
            name: Walks(steps=int(steps), width=int(width), blank_probability=blanks, **same)
            for name, (steps, width, blanks) in settings.variants.items()
        }

    def notes(self, blanks: dict[str, float]) -> list[str]:
        shares = ", ".join(f"{share:.1%} ({name})" for name, share in blanks.items())
        return [f"A model that always answers blank would score {shares}."]
