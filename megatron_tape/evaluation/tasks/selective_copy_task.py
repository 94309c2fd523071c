"""`selective_copy`: the accuracy of copying symbols from among blanks."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_tape.errors import refuse
from megatron_tape.evaluation.base import ModelInfo
from megatron_tape.evaluation.tasks.synthetic_base import Variants, VariantSettings
from megatron_tape.synthetic import Generator
from megatron_tape.synthetic import SelectiveCopy as Copies


@dataclass(kw_only=True)
class SelectiveCopySettings(VariantSettings):
    """Copying symbols from among blanks."""

    copied: int = 128
    """Symbols to copy, as in training."""
    symbols: int = 16
    """Different symbols, as in training."""
    blanks: dict[str, int] = field(default_factory=lambda: {"IID": 128, "dense": 64, "sparse": 256})
    """Blanks among the symbols, by the name of the variant; the first variant is that of the training."""


class SelectiveCopy(Variants):
    """Selective copying with as many blanks as in training, and with fewer and more."""

    name = "selective_copy"
    Settings = SelectiveCopySettings

    def check(self, info: ModelInfo) -> None:
        refuse(not self.settings.blanks, self.key("blanks"), "is empty", "name a variant, such as {IID: 128}")
        super().check(info)

    def generators(self) -> dict[str, Generator]:
        sizes = {"copied": self.settings.copied, "symbols": self.settings.symbols}
        return {name: Copies(blanks=blanks, **sizes) for name, blanks in self.settings.blanks.items()}
