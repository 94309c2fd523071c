"""Megatron-core transformer layers with a positional encoding and its position state.

Axes: B batch, S all tokens of a sequence, s this rank's tokens, C hidden size, h this rank's heads, D head dimension,
G key/value groups. The position state z is what the encoding passes from layer to layer (see `position.encoding`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_tape.ops.activation_checkpointing import AttentionRecorder, run_directly
from megatron_tape.ops.attention import attend
from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.shifted import ShiftedSegments, attend_in_segments
from megatron_tape.ops.stage_boundary import pack
from megatron_tape.ops.swiglu import swiglu
from megatron_tape.parallel import megatron_patches
from megatron_tape.parallel.token_layout import TokenLayout
from megatron_tape.position import PositionEncoding, Positions
from megatron_tape.position.encoding import NO_CACHE

megatron_patches.split_qkv_with_torch()


class RMSNorm(torch.nn.Module):
    """Torch's RMSNorm, whose weight has Megatron's attribute `sequence_parallel`.

    Megatron's own torch norm does not support sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last axis."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class SwiGLU(torch.nn.Module):
    """The gated MLP's activation, silu(gate) * up. It saves only its input for the backward pass."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.fused = False
        """Whether to use the Triton kernel."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map (..., 2 F), the gate and then the up projection, to (..., F); see `megatron_tape.ops.swiglu`."""
        return swiglu(gate_and_up, self.fused)


class Shared(NamedTuple):
    """Inputs shared by all layers of a forward pass; Megatron passes them to each layer as `packed_seq_params`."""

    packing: Packing | ShiftedSegments | None = None
    """The boundaries of packed documents, or the segments of shifted sparse attention."""
    recorder: AttentionRecorder | None = None
    """Records and replays attention under selective activation checkpointing; None otherwise."""


class CoreAttention(torch.nn.Module):
    """Attention of projected queries, keys and values. Megatron's `SelfAttention` builds it from its spec."""

    def __init__(self, *args, backend: str, **kwargs):
        super().__init__()
        self.backend = backend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Positions,
        packing: Packing | ShiftedSegments | None,
        run: Callable[..., tuple[Tensor, ...]],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output (S, B, h, D), and the position state averaged with the attention weights or None.

        Tensors have the axes of `ops.attention_inputs.AttentionInputs`. `packing` selects full attention, attention
        within documents, or shifted sparse attention. `run` calls the kernels (see `ops.activation_checkpointing`).
        """
        inputs = AttentionInputs(q_SBHD=query, k_TBGD=key, v_TBGD=value, run=run, **vars(positions))
        if isinstance(packing, ShiftedSegments):
            return attend_in_segments(inputs, packing, self.backend)
        return attend(replace(inputs, packing=packing), self.backend)


class PositionSelfAttention(SelfAttention):
    """Megatron's tensor-parallel self-attention with a positional encoding.

    `output_gate` multiplies the output of attention by a sigmoid of a projection of the hidden states.
    """

    def __init__(self, config: TransformerConfig, *args, output_gate: bool = False, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.tokens = TokenLayout.of(self.pg_collection, config.sequence_parallel)
        self.linear_gate = None
        if output_gate:
            self.linear_gate = ColumnParallelLinear(
                config.hidden_size,
                self.query_projection_size,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.pg_collection.tp,
            )

    def forward(
        self, hidden_states: Tensor, positions: Positions, shared: Shared
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute attention of this rank's normalized hidden states (s, B, C).

        Returns the projected output (s, B, C), its bias (None), and the position state averaged with the attention
        weights (S, B, h, D), which is None if the encoding does not average it.
        """
        projected = self.get_query_key_value_tensors(hidden_states)
        run = run_directly if shared.recorder is None else partial(shared.recorder.run, self.layer_number)
        entered = self.tokens.enter_attention(*projected)
        output, averaged = self.core_attention(*entered, positions, shared.packing, run)
        output = self.tokens.leave_attention(output).flatten(2)
        if self.linear_gate is not None:
            output = output * self.linear_gate(hidden_states)[0].sigmoid()
        output, bias = self.linear_proj(output)
        return output, bias, averaged


class LayerPosition(torch.nn.Module):
    """The positional encoding in one layer: its parameters, and the update of the position state after the MLP.

    Parameters are created uninitialized (see `model.initialization`). `layer` counts from 0.
    """

    def __init__(self, encoding: PositionEncoding, layer: int, config: TransformerConfig):
        super().__init__()
        self.encoding = encoding
        self.layer = layer
        self._head_axes: dict[str, int] = {}
        for name, declared in encoding.parameters(layer).items():
            shard = torch.empty(declared.shape, dtype=config.params_dtype)
            if declared.head_axis is not None:
                shard = encoding.tokens.tensor_parallel_shard(shard, declared.head_axis).contiguous()
            weight = torch.nn.Parameter(shard)
            weight.sequence_parallel = config.sequence_parallel and declared.head_axis is None
            if declared.head_axis is not None:
                set_tensor_model_parallel_attributes(weight, True, declared.head_axis, 1)
                self._head_axes[name] = declared.head_axis
            if declared.decay is not None:
                weight.decay = declared.decay
            self.register_parameter(name, weight)
        self.record_norms = False
        """Whether `forward` computes `norms`."""
        self.norms: Tensor | None = None
        """(3, G): for each group, the sums of |z''|^2 and |z'' - z|^2 over the local tokens, and the number of complex
        numbers in each sum. z is the state before the update, z'' after it."""

        self.updates = encoding.updates(layer)
        """Whether this layer updates the state."""
        self._learned = encoding.state_is_learned(layer)
        self._group = None if config.sequence_parallel else encoding.tokens.model_group

    def enter(self, state: Tensor | None, hidden_states: Tensor) -> tuple[Tensor | None, Positions]:
        """Return the position state to use in this layer, and the encoding's inputs to attention.

        `state` comes from the previous layer; `hidden_states` (s, B, C) are this layer's normalized input.
        """
        if state is not None and not self._learned:
            # Activation checkpointing makes every state require a gradient; fixed phases do not need it.
            state = state.detach()
        hidden_states = self._for_encoding(hidden_states)
        parameters = self._in_attention()
        state = self.encoding.enter(self.layer, parameters, state, hidden_states, NO_CACHE)
        return state, self.encoding.positions(self.layer, parameters, state, hidden_states, NO_CACHE)

    def _in_attention(self) -> Mapping[str, Tensor]:
        """Return the parameters of the heads that this rank has in attention, fewer with context parallelism."""
        if not self._head_axes or self.encoding.tokens.context_shards == 1:
            return self._parameters
        of_heads = {
            name: self.encoding.tokens.heads_in_attention(self._parameters[name], axis)
            for name, axis in self._head_axes.items()
        }
        return {**self._parameters, **of_heads}

    def _for_encoding(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states, and sum their gradient over the tensor-parallel ranks in the backward pass.

        Without sequence parallelism, each rank computes only the gradient from its own heads.
        """
        if self._group is None or self._group.size() == 1:
            return hidden_states
        return copy_to_tensor_model_parallel_region(hidden_states, group=self._group)

    def forward(
        self,
        state: Tensor | None,
        positions: Positions,
        averaged: Tensor | None,
        attention_output: Tensor,
        mlp_output: Tensor,
    ) -> Tensor | None:
        """Return the next layer's position state.

        `state` and `positions` are the results of `enter`, `averaged` is the state that attention averaged.
        `attention_output` and `mlp_output` (s, B, C) do not include the residual stream.
        """
        if not self.updates:
            return state
        outputs = (self._for_encoding(x) for x in (attention_output, mlp_output))
        new = self.encoding.next_state(self.layer, self._in_attention(), state, positions, averaged, *outputs)
        if self.record_norms:
            with torch.no_grad():
                after, before = new.float(), state.float()
                squares = [x.square().sum((0, 1, 3)) for x in (after, after - before)]
                count = squares[0].new_full(squares[0].shape, after.numel() / 2 / after.shape[2])
                self.norms = torch.stack([*squares, count])
        return new


class PositionTransformerLayer(TransformerLayer):
    """A pre-norm transformer layer; Megatron's argument and result `context` is the position state.

    Args:
        first: number of layers before this model chunk. Megatron's `layer_number` counts only within the chunk.
        packs: return the hidden states and the position state as one tensor, to send to the next pipeline stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules,
        encoding: PositionEncoding,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        first: int = 0,
        packs: bool = False,
    ):
        super().__init__(
            config, submodules, layer_number=first + layer_number, pg_collection=pg_collection, vp_stage=vp_stage
        )
        self.position = LayerPosition(encoding, self.layer_number - 1, config)
        self._packs = packs

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        context: Tensor | None = None,
        *,
        packed_seq_params: Shared,
        **_,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the next layer's hidden states (s, B, C) and position state; with `packs`, one tensor and None."""
        normed = self.input_layernorm(hidden_states)
        context, positions = self.position.enter(context, normed)
        attention_output, bias, averaged = self.self_attention(normed, positions, packed_seq_params)
        hidden_states = self._add(self.self_attn_bda, attention_output, bias, hidden_states)
        mlp_output, bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        hidden_states = self._add(self.mlp_bda, mlp_output, bias, hidden_states)
        context = self.position(context, positions, averaged, attention_output, mlp_output)
        return (pack(hidden_states, context), None) if self._packs else (hidden_states, context)

    def _add(self, bias_dropout_add, output: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        # Always in training mode: in evaluation mode Megatron's function adds to `output` in place, but the position
        # update still reads it. Without dropout there is no other difference.
        add = bias_dropout_add(True, self.config.bias_dropout_fusion)
        return add((output, bias), residual, self.hidden_dropout)
