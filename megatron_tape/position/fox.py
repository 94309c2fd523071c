"""FoX: the forget gates of the Forgetting Transformer, which uses no other positional encoding (Lin
et al., 2025).
"""

from dataclasses import dataclass, replace

from megatron_tape.ops.backends import GATE
from megatron_tape.position.encoding import (
    EncodingSettings,
    Parameter,
    PositionEncoding,
)


@dataclass(frozen=True, kw_only=True)
class FoxSettings(EncodingSettings):
    """Initialization of the forget gates."""

    fox_bias_start: float = 0.0
    """fox: initial bias of the forget gates. Larger values let heads attend farther back at the
    start of training.
    """


class FoxPosition(PositionEncoding):
    """Adds the sum of log f_j over t < j <= s to the score of query s and key t; f_j is the forget
    gate of token j.

    f = sigmoid(w x + b) for each query head, where x is the layer's normalized input. Parameters:
    `gate` w (H, C) and `gate_bias` b (H,), which has no weight decay, as in the authors' training.

    A class with this one and another encoding as its bases, in this order, adds the gates to the
    scores of that encoding; its parameters and costs are those of both.
    """

    name = "fox"
    Settings = FoxSettings
    needs = frozenset({GATE})

    def parameters(self, layer):
        """Return the gates' projection. Each rank holds all of it to compute the gates of all heads
        for its tokens.
        """
        heads = self.model.num_attention_heads
        hidden = self.model.hidden_size
        return {
            **super().parameters(layer),
            "gate": Parameter((heads, hidden), std=self.model.init_std),
            "gate_bias": Parameter((heads,), value=self.settings.fox_bias_start, decay=False),
        }

    def costs(self, layer, batch):
        """Return the costs of the gates: their projection, and one addition per head, query and
        key.

        The backward pass needs the inputs of log-sigmoid (on a CPU also a buffer of the same size)
        and the cumulative sums in float64. Each rank computes the gates of all heads for its own
        tokens; an all-to-all then gives it the gates of its own heads for all tokens.
        """
        without_gates = super().costs(layer, batch)
        model = self.model
        heads = model.num_attention_heads
        additions = int(heads * model.keys_per_query(layer))
        gate_bytes = 4 * batch.local_tokens * heads  # in fp32
        saved = 2 * gate_bytes + 8 * batch.tokens * heads // batch.head_shards
        return replace(
            without_gates,
            multiply_adds=without_gates.multiply_adds + heads * model.hidden_size + additions,
            saved=without_gates.saved + saved,
            sent_forward=without_gates.sent_forward + gate_bytes,
            sent_backward=without_gates.sent_backward + gate_bytes,
            reads_hidden_states=True,
        )

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the logarithms of the gates (S, B, h), at least in float32."""
        import torch
        from torch.nn.functional import linear, logsigmoid

        logits = linear(hidden_states_sBC, parameters["gate"])
        wider = torch.promote_types(logits.dtype, torch.float32)
        log_gate = logsigmoid(logits.to(wider) + parameters["gate_bias"])
        log_gate_TBH = cache.append("gates", self.token_layout.to_heads(log_gate))
        inputs = super().position_inputs(layer, parameters, state, hidden_states_sBC, cache)
        return replace(inputs, log_gate_TBH=log_gate_TBH)
