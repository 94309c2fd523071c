"""FoX: forget gates, the only sense of order of a Forgetting Transformer (Lin et al., 2025)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_tape.errors import refuse
from megatron_tape.ops.backends import GATE
from megatron_tape.position.encoding import Costs, EncodingSettings, Parameter, PositionEncoding, Positions


@dataclass(frozen=True, kw_only=True)
class FoxSettings(EncodingSettings):
    """The start of the gates."""

    fox_bias_start: float = 0.0
    """fox: number that the bias of the forget gates starts at; the larger, the longer untrained heads remember."""


class FoxPosition(PositionEncoding):
    """The score of query s and key t falls by the sum of -log f over t < j <= s, where f_j is a forget gate of token j.

    f = sigmoid(w x + b) of the layer's normalised input x, for each query head: `gate` w (H, C) and `gate_bias` b (H,),
    to which weight decay does not apply, as its authors trained it.
    """

    name = "fox"
    Settings = FoxSettings
    needs = frozenset({GATE})

    def check(self) -> None:
        start = self.settings.fox_bias_start
        refuse(
            not math.isfinite(start), "model.position.fox_bias_start", f"is {start}", "set it to a number, such as 0"
        )

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        """Return the gates' projection, which every rank holds whole, as it computes all heads' gates of its tokens."""
        heads, hidden = self.model.num_attention_heads, self.model.hidden_size
        return {
            "gate": Parameter((heads, hidden), std=self.model.init_std),
            "gate_bias": Parameter((heads,), value=self.settings.fox_bias_start, decay=False),
        }

    def costs(self, layer, batch) -> Costs:
        """Count the projection and adding the gates once per head, query and key.

        Kept are the inputs of the log-sigmoids, with what they keep besides on a CPU, and the gates' sums in float64.
        The gates are exchanged for those of the rank's heads.
        """
        heads, model = self.model.num_attention_heads, self.model
        gates = 4 * batch.local_tokens * heads
        return Costs(
            multiply_adds=heads * (model.hidden_size + model.seq_length // 2),
            saved=2 * gates + 8 * batch.tokens * heads // batch.head_shards,
            sent_forward=gates,
            sent_backward=gates,
            reads_hidden_states=True,
        )

    def positions(self, layer, parameters, state, hidden_states_sBC, cache) -> Positions:
        """Return the logarithms of the gates, at least in float32; of these only sums between two tokens enter."""
        import torch
        from torch.nn.functional import linear, logsigmoid

        logits = linear(hidden_states_sBC, parameters["gate"])
        wider = torch.promote_types(logits.dtype, torch.float32)
        log_gate = logsigmoid(logits.to(wider) + parameters["gate_bias"])
        return Positions(log_gate_TBH=cache.append("gates", self.tokens.to_heads(log_gate)))
