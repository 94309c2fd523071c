"""Selective copying with as many blanks as in training, and with fewer and more.

The sequences are those of `synthetic.selective_copy`, on which `data.generator: {task: selective_copy}` trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_tape.errors import refuse
from megatron_tape.evaluation.base import ModelInfo
from megatron_tape.evaluation.variants import Variants
from megatron_tape.synthetic import SelectiveCopy as Copies


@dataclass(kw_only=True)
class SelectiveCopySettings:
    """Copying symbols from among blanks."""

    copied: int = 128
    """Symbols to copy, as in training."""
    symbols: int = 16
    """Different symbols, as in training."""
    blanks: dict[str, int] = field(default_factory=lambda: {"IID": 128, "dense": 64, "sparse": 256})
    """Blanks among the symbols, by the name of the variant; the first variant is that of the training."""
    samples: int = 1000
    """Sequences per variant."""
    seed: int = 0
    """Seed of the sequences. They are never those of training."""
    batch_size: int = 50
    """Sequences that the model reads at once."""


class SelectiveCopy(Variants):
    """Copying by the number of blanks."""

    name = "selective_copy"
    Settings = SelectiveCopySettings

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError for settings that cannot work."""
        refuse(not self.settings.blanks, f"{self.name}.blanks is empty; name a variant, such as {{IID: 128}}")
        super().check(info)

    def generators(self) -> dict[str, Copies]:
        """Return the generator of each variant."""
        sizes = {"copied": self.settings.copied, "symbols": self.settings.symbols}
        return {name: Copies(blanks=blanks, **sizes) for name, blanks in self.settings.blanks.items()}
