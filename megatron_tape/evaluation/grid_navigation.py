"""Grid navigation as in training, and on maps that are denser and sparser; only revisited cells are scored.

The walks are those of `synthetic.grid_navigation`, on which `data.generator: {task: grid_navigation}` trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_tape.errors import refuse
from megatron_tape.evaluation.base import ModelInfo
from megatron_tape.evaluation.variants import Variants
from megatron_tape.synthetic import GridNavigation as Walks


@dataclass(kw_only=True)
class GridNavigationSettings:
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
    samples: int = 1000
    """Walks per variant."""
    seed: int = 0
    """Seed of the walks. They are never those of training."""
    batch_size: int = 50
    """Walks that the model reads at once."""


class GridNavigation(Variants):
    """Navigation by the size and the density of the map."""

    name = "grid_navigation"
    Settings = GridNavigationSettings

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError for settings that cannot work."""
        variants = self.settings.variants
        refuse(not variants, f"{self.name}.variants is empty; name a variant, such as {{IID: [128, 64, 0.5]}}")
        for name, values in variants.items():
            whole = len(values) == 3 and all(float(value).is_integer() for value in values[:2])
            refuse(
                not whole,
                f"{self.name}.variants.{name} is {values}; give steps, width and share of blanks, such as "
                "[128, 64, 0.5]",
            )
        super().check(info)

    def generators(self) -> dict[str, Walks]:
        """Return the generator of each variant."""
        settings = self.settings
        same = {key: getattr(settings, key) for key in ("dimensions", "objects", "longest_run")}
        return {
            name: Walks(steps=int(steps), width=int(width), blank_probability=blanks, **same)
            for name, (steps, width, blanks) in settings.variants.items()
        }

    def notes(self, blanks: dict[str, float]) -> list[str]:
        """Return how much a model scores that knows nothing but that most cells are blank."""
        shares = ", ".join(f"{share:.1%} ({name})" for name, share in blanks.items())
        return [f"A model that always answers blank would score {shares}."]
