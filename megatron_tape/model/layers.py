"""Megatron-core modules whose attention carries a position state."""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_tape.ops.attention import attention
from megatron_tape.position import PositionEncoding


class RMSNorm(torch.nn.Module):
    """torch's `rms_norm` with a weight flagged `sequence_parallel`, which Megatron's torch norm refuses to be."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class CoreAttention(torch.nn.Module):
    """The parameter-free middle of attention, built by Megatron's `SelfAttention` from its spec."""

    def __init__(self, *args, backend: str, **kwargs):
        super().__init__()
        self.backend = backend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Tensor | None,
        average_state: bool,
        document_bounds: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `megatron_tape.ops.attention.attention`."""
        return attention(query, key, value, state, average_state, document_bounds, self.backend)


class PositionSelfAttention(SelfAttention):
    """Megatron's self-attention (its projections, tensor-parallel as they are) with a position state."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoding: PositionEncoding,
        position_state: Tensor | None,
        average_state: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attend from hidden states (S, B, C), or (S/tp, B, C) under sequence parallelism.

        `attention_mask` holds the bounds of packed documents (2, B, S), see `ops.attention.document_bounds`.
        Returns the projected output, its bias (None), and the position state averaged with the attention map,
        (S, B, local heads, D), or None unless `average_state`.
        """
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        state = encoding.state_for_attention(position_state)
        output, averaged = self.core_attention(query, key, value, state, average_state, attention_mask)
        output, bias = self.linear_proj(output.flatten(2))
        return output, bias, averaged


class PositionTransformerLayer(TransformerLayer):
    """A pre-norm transformer layer that hands the position state on, rewritten, as its `context`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules,
        encoding: PositionEncoding,
        gate_input: str = "mlp",
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config, submodules, layer_number=layer_number, pg_collection=pg_collection, vp_stage=vp_stage)
        self.encoding = encoding
        self.gate_input = gate_input
        self.position_update = encoding.build_update(self.layer_number)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, context: Tensor | None = None, **_
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states (S, B, C) and the position state (`context`) to the next layer's."""
        update = self.position_update
        attention_output, bias, averaged = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask,
            self.encoding,
            context,
            average_state=update is not None,
        )
        hidden_states = self._add(self.self_attn_bda, attention_output, bias, hidden_states)
        mlp_output, bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        hidden_states = self._add(self.mlp_bda, mlp_output, bias, hidden_states)
        if update is not None:
            context = update(context, averaged, mlp_output if self.gate_input == "mlp" else attention_output)
        return hidden_states, context

    def _add(self, bias_dropout_add, output: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        add = bias_dropout_add(self.training, self.config.bias_dropout_fusion)
        return add((output, bias), residual, self.hidden_dropout)
