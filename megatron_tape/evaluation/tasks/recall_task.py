"""`recall`: the accuracy of recalling the values of keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_tape.errors import refuse
from megatron_tape.evaluation.base import ModelInfo
from megatron_tape.evaluation.tasks.synthetic_base import Variants, VariantSettings
from megatron_tape.synthetic import Generator
from megatron_tape.synthetic import Recall as Pairs


@dataclass(kw_only=True)
class RecallSettings(VariantSettings):
    """Recalling the values of keys."""

    keys: int = 128
    """Different keys, and different values, as in training."""
    tokens_per_pair: int = 16
    """How many tokens a sequence has for each of its pairs, as in training."""
    lengths: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024])
    """Tokens of the sequences, each a variant."""


class Recall(Variants):
    """Multi-query associative recall in sequences of several lengths, longer ones with more pairs."""

    name = "recall"
    Settings = RecallSettings

    def check(self, info: ModelInfo) -> None:
        refuse(not self.settings.lengths, self.key("lengths"), "is empty", "name a length, such as [256]")
        super().check(info)

    def generators(self) -> dict[str, Generator]:
        sizes = {"keys": self.settings.keys, "tokens_per_pair": self.settings.tokens_per_pair}
        return {f"{length} tokens": Pairs(tokens=length, **sizes) for length in self.settings.lengths}
