"""Wall attention (Tilde Research, 2026): each channel of a key decays with every later token."""

from dataclasses import dataclass
from typing import Annotated

from megatron_tape.ops.backends import DECAY, GATE, SINK
from megatron_tape.position.encoding import (
    Bounds,
    Costs,
    EncodingSettings,
    Parameter,
    PositionEncoding,
    PositionInputs,
)


@dataclass(frozen=True, kw_only=True)
class WallSettings(EncodingSettings):
    """Initialization and bound of the decays, and optional parts of the authors' kernels."""

    wall_bias_start: float = 8.0
    """wall: initial bias of the decays and of the scalar gates. Larger values mean weaker decays at
    the start of training: with 8, half of a channel is left after 2,067 tokens.
    """
    wall_strongest: Annotated[float, Bounds(gt=0, le=1)] = 0.86
    """wall: bound m of a channel's decay per token in nats. Decays g are m (1 - exp(g / m)), which
    is about g for weak ones.
    """
    wall_scalar_gate: bool = False
    """wall: also lower the scores with a forget gate for each head, as `fox` does."""
    wall_sink: bool = False
    """wall: add a learned logit for each head, a sink that takes a part of the attention weights.
    """


class WallPosition(PositionEncoding):
    """The score of query i and key j is sum_n q_in k_jn exp(P_in - P_jn) / sqrt(D).

    P is the running sum of log decays, one for each query head and channel: m (exp(g / m) - 1) for
    the bound m, with g = logsigmoid(W x + b) of the layer's normalized input x. Parameters: `decay`
    W (H D, C) and `decay_bias` b (H D,). With scalar gates: `gate` (H, C) and `gate_bias` (H,), the
    parameters of `fox`. With a sink: `sink` (H,). Vectors have no weight decay.
    """

    name = "wall"
    Settings = WallSettings

    @property
    def needs(self):
        """Decays, and the optional parts that the settings select."""
        needs = {DECAY}
        if self.settings.wall_scalar_gate:
            needs.add(GATE)
        if self.settings.wall_sink:
            needs.add(SINK)
        return frozenset(needs)

    def parameters(self, layer):
        """Return the parameters. Each rank holds all projections, to compute the decays of all
        heads for its tokens.
        """
        model = self.model
        settings = self.settings
        heads = model.num_attention_heads
        channels = heads * model.head_dim
        start = settings.wall_bias_start
        parameters = {
            "decay": Parameter((channels, model.hidden_size), std=model.init_std),
            "decay_bias": Parameter((channels,), value=start, decay=False),
        }
        if settings.wall_scalar_gate:
            parameters["gate"] = Parameter((heads, model.hidden_size), std=model.init_std)
            parameters["gate_bias"] = Parameter((heads,), value=start, decay=False)
        if settings.wall_sink:
            parameters["sink"] = Parameter((heads,), partition_dim=0, decay=False)
        return parameters

    def costs(self, layer, batch):
        """Return the costs of the projections, and of the factors of queries and keys.

        The backward pass needs the inputs of log-sigmoid (on a CPU also a buffer of the same size),
        the results of the exponential, and the decays. Each rank computes the decays of all heads
        for its own tokens; an all-to-all then gives it those of its own heads for all tokens.
        """
        model = self.model
        heads = model.num_attention_heads
        width = heads * model.head_dim
        decay_bytes = 4 * batch.local_tokens * width  # in fp32
        multiply_adds = width * model.hidden_size
        saved = 3 * decay_bytes + 4 * batch.tokens * width // batch.head_shards
        sent = decay_bytes
        if self.settings.wall_scalar_gate:
            gate_bytes = 4 * batch.local_tokens * heads
            multiply_adds += heads * model.hidden_size + int(heads * model.keys_per_query(layer))
            saved += 2 * gate_bytes + 8 * batch.tokens * heads // batch.head_shards
            sent += gate_bytes
        return Costs(
            # Queries and keys are multiplied by two factors each.
            multiply_adds=multiply_adds + 4 * width,
            saved=saved,
            sent_forward=sent,
            sent_backward=sent,
            reads_hidden_states=True,
        )

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the decays (S, B, h, D) and the gates (S, B, h), at least in float32, and the
        sink.
        """
        from torch import expm1

        from megatron_tape.ops.decay import with_decay

        def log_sigmoid(name):
            return _log_sigmoid(hidden_states_sBC, parameters[name], parameters[f"{name}_bias"])

        strongest = self.settings.wall_strongest
        log_decay = strongest * expm1(log_sigmoid("decay") / strongest)
        log_decay = log_decay.unflatten(2, (self.model.num_attention_heads, -1))
        log_decay = cache.append("decays", self.token_layout.to_heads(log_decay))
        log_gate = None
        if self.settings.wall_scalar_gate:
            log_gate = cache.append("gates", self.token_layout.to_heads(log_sigmoid("gate")))
        return PositionInputs(
            rescore=with_decay(log_decay),
            log_gate_TBH=log_gate,
            sink_H=parameters.get("sink"),
        )


def _log_sigmoid(hidden_states, weight, bias):
    """Return the logarithm of the sigmoid of a projection, at least in float32."""
    import torch
    from torch.nn.functional import linear, logsigmoid

    logits = linear(hidden_states, weight)
    wider = torch.promote_types(logits.dtype, torch.float32)
    return logsigmoid(logits.to(wider) + bias)
