"""The transformer layer: Megatron-core's attention and MLP, with a positional encoding and its
position state.

`PositionTransformerLayer.forward` shows how the state passes through a layer: `LayerEncoding.enter`
turns it into inputs of attention, and `LayerEncoding.forward` updates it for the next layer.

Axes: B batch, S all tokens of a sequence, s this rank's tokens, C hidden size, h this rank's heads,
D head dimension, G key/value groups. The position state z is what the encoding passes from layer to
layer (see `position.encoding`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_tape.config.schema import ModelConfig
from megatron_tape.ops.activation_checkpointing import (
    AttentionRecorder,
    run_directly,
    saved_without_copy,
)
from megatron_tape.ops.attention import attend
from megatron_tape.ops.attention_inputs import AttentionInputs, split
from megatron_tape.ops.shifted import ShiftedSegments, attend_in_segments
from megatron_tape.ops.swiglu import swiglu
from megatron_tape.ops.visibility import Visibility
from megatron_tape.parallel import megatron_patches
from megatron_tape.parallel.token_layout import TokenLayout
from megatron_tape.position import PositionEncoding, PositionInputs
from megatron_tape.position.encoding import NO_CACHE

# These patches must be applied before any module of Megatron is built.
megatron_patches.split_qkv_with(split)
megatron_patches.reduce_tensors_of_any_strides()


class RMSNorm(Module):
    """Torch's RMSNorm, whose weight has the attribute `sequence_parallel`.

    With it, each rank computes the gradient from its own tokens only, and `training.gradients` sums
    these gradients.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
    ):
        super().__init__()
        self.eps = eps
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last axis."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class SwiGLU(Module):
    """The gated MLP's activation, silu(gate) * up. It saves only its input for the backward pass.

    `fused` selects the Triton kernel. Megatron's `MLP` builds this module from its spec.
    """

    def __init__(self, config: TransformerConfig, fused: bool):
        super().__init__()
        self.fused = fused

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map (..., 2 F), the gate and then the up projection, to (..., F); see
        `megatron_tape.ops.swiglu`.
        """
        return swiglu(gate_and_up, self.fused)


@dataclass(frozen=True)
class SharedInputs:
    """What all layers of a forward pass share. Each layer takes what concerns it."""

    visibility: Visibility | ShiftedSegments | None = None
    """Which tokens attend to which in layers without a window: full attention (None), attention
    within documents, or shifted sparse attention."""
    window_visibility: Visibility | ShiftedSegments | None = None
    """The same in layers with a window."""
    window_phases: Tensor | None = None
    """The result of `PositionEncoding.window_phases`."""
    temperature_SB11: Tensor | None = None
    """Factor of the queries in layers without positions, in float32."""
    recorder: AttentionRecorder | None = None
    """Records and replays attention under selective activation checkpointing."""


class CoreAttention(Module):
    """Attention of projected queries, keys and values. Megatron's `SelfAttention` builds it from
    its spec.
    """

    def __init__(self, *args, backend: str, **kwargs):
        # Megatron's arguments, such as the scale of the scores, are not needed.
        super().__init__()
        self.backend = backend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: PositionInputs,
        visibility: Visibility | ShiftedSegments | None,
        run: Callable[..., tuple[Tensor, ...]],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output (S, B, h, D), and the position state averaged with the
        attention weights or None.

        `query` is (S, B, h, D), `key` and `value` are (S, B, g, D) for this rank's g groups.
        `visibility` is one of the fields of `SharedInputs`. `run` calls the kernels (see
        `ops.activation_checkpointing`).
        """
        # The fields of `PositionInputs` are fields of `AttentionInputs`, too.
        inputs = AttentionInputs(
            q_SBHD=query,
            k_TBGD=key,
            v_TBGD=value,
            run=run,
            **vars(positions),
        )
        if isinstance(visibility, ShiftedSegments):
            return attend_in_segments(inputs, visibility, self.backend)
        return attend(replace(inputs, visibility=visibility), self.backend)


class PositionSelfAttention(SelfAttention):
    """Megatron's tensor-parallel self-attention with a positional encoding.

    Megatron builds the projections and splits their output; `forward` calls them. With
    `model.attention_output_gate`, the output of attention is multiplied by a sigmoid of a
    projection of the hidden states. `layer` counts from 0.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        token_layout: TokenLayout,
        layer: int,
        backend: str,
    ):
        # Megatron builds these modules, and passes them arguments of its own.
        norm = RMSNorm if model_config.qk_norm else None
        parts = SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=ModuleSpec(module=CoreAttention, params={"backend": backend}),
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        )
        # Megatron counts layers from 1.
        super().__init__(config, parts, layer_number=layer + 1, pg_collection=groups)
        self.token_layout = token_layout
        self.has_window = model_config.window_of(layer) is not None
        self.has_temperature = (
            model_config.temperature_scale > 0 and not model_config.has_positions(layer)
        )
        self.linear_gate = None
        if model_config.attention_output_gate:
            self.linear_gate = ColumnParallelLinear(
                config.hidden_size,
                self.query_projection_size,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=groups.tp,
            )

    def forward(
        self,
        hidden_states: Tensor,
        positions: PositionInputs,
        shared: SharedInputs,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention of this rank's normalized hidden states (s, B, C).

        Returns the projected output (s, B, C), and the position state averaged with the attention
        weights (S, B, h, D), which is None if the encoding does not average it.
        """
        run = run_directly
        if shared.recorder is not None:
            run = partial(shared.recorder.run, self.layer_number)
        visibility = shared.visibility
        if self.has_window:
            visibility = shared.window_visibility

        query, key, value = self.get_query_key_value_tensors(hidden_states)
        # With context parallelism, this exchanges this rank's tokens for all tokens of fewer heads.
        query, key, value = self.token_layout.enter_attention(query, key, value)
        if self.has_temperature:
            query = (query * shared.temperature_SB11).to(query.dtype)
        output, averaged = self.core_attention(query, key, value, positions, visibility, run)
        output = self.token_layout.leave_attention(output)

        # If attention returns a part of [o | u], which it keeps for the backward pass, the input of
        # the projection is a copy.
        with saved_without_copy(output) as output:
            if self.linear_gate is not None:
                gate, _ = self.linear_gate(hidden_states)
                output = output * gate.sigmoid()

            # Megatron's linear layers return a bias, too. It is None here: attention has none after
            # its output.
            output, _ = self.linear_proj(output)
        return output, averaged


class LayerEncoding(Module):
    """The positional encoding in one layer: its parameters, and the update of the position state
    after the MLP.

    Parameters are created uninitialized (see `model.initialization`). `layer` counts from 0.
    """

    def __init__(
        self,
        encoding: PositionEncoding,
        layer: int,
        config: TransformerConfig,
    ):
        super().__init__()
        self.encoding = encoding
        self.layer = layer
        self._head_axes: dict[str, int] = {}
        """The axis of heads or groups of each parameter that has one."""
        for name, declared in encoding.parameters(layer).items():
            shard = torch.empty(declared.shape, dtype=config.params_dtype)
            dim = declared.partition_dim
            if dim is not None:
                # Contiguous, since the shard may be a view of the whole parameter.
                shard = encoding.token_layout.tensor_parallel_shard(shard, dim).contiguous()
            weight = Parameter(shard)
            # Under sequence parallelism, a rank has the gradient of a replicated parameter only
            # from its own tokens; `training.gradients` sums the gradients of flagged parameters.
            weight.sequence_parallel = config.sequence_parallel and dim is None
            if dim is not None:
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
                self._head_axes[name] = dim
            if declared.decay is not None:
                weight.decay = declared.decay
            self.register_parameter(name, weight)

        self.record_norms = False
        """Whether `forward` computes `norms`."""
        self.norms: Tensor | None = None
        """(3, G): for each group, the sums of |z''|^2 and |z'' - z|^2 over the local tokens, and
        the number of complex numbers in each sum. z is the state before the update, z'' after it.
        """

        model = encoding.model
        self._has_window_and_positions = model.window_of(layer) is not None and model.has_positions(
            layer
        )
        """Whether this layer rotates by `SharedInputs.window_phases`, unless that is None."""
        self.updates = encoding.updates(layer)
        """Whether this layer updates the state."""
        self._learned = encoding.state_is_learned(layer)
        """Whether the state that this layer uses depends on parameters."""
        # `_with_summed_gradient` sums over the ranks of this group. With sequence parallelism no
        # sum is needed: each rank has the whole gradient of its own tokens.
        self._group = None if config.sequence_parallel else encoding.token_layout.model_group

    def enter(
        self, state: Tensor | None, hidden_states: Tensor
    ) -> tuple[Tensor | None, PositionInputs]:
        """Return the position state to use in this layer, and the encoding's inputs to attention.

        `state` comes from the previous layer; `hidden_states` (s, B, C) are this layer's normalized
        input.
        """
        if state is not None and not self._learned:
            # Under activation checkpointing, all outputs of a layer require gradients, also a state
            # that depends on no parameter. Detaching it saves the computation of its gradient.
            state = state.detach()
        hidden_states = self._with_summed_gradient(hidden_states)
        parameters = self._attention_parameters()
        state = self.encoding.enter(self.layer, parameters, state, hidden_states, NO_CACHE)
        inputs = self.encoding.position_inputs(
            self.layer,
            parameters,
            state,
            hidden_states,
            NO_CACHE,
        )
        return state, inputs

    def to_attention(self, inputs: PositionInputs, shared: SharedInputs) -> PositionInputs:
        """Return the encoding's inputs, converted to the frequencies of this layer."""
        if not self._has_window_and_positions or shared.window_phases is None:
            return inputs
        return self.encoding.inputs_in_window(inputs, shared.window_phases)

    def from_attention(self, averaged: Tensor | None, shared: SharedInputs) -> Tensor | None:
        """Return the average of the state, converted from the frequencies of this layer to those of
        the state.
        """
        if not self._has_window_and_positions or shared.window_phases is None:
            return averaged
        if averaged is None:
            return None
        return self.encoding.average_from_window(averaged, shared.window_phases)

    def _attention_parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters by name, restricted to the heads that this rank has in attention.

        With context parallelism these are only some of the rank's heads.
        """
        layout = self.encoding.token_layout
        parameters = dict(self._parameters)
        for name, axis in self._head_axes.items():
            parameters[name] = layout.heads_in_attention(parameters[name], axis)
        return parameters

    def _with_summed_gradient(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states, and sum their gradient over the tensor-parallel ranks in the
        backward pass.

        Without sequence parallelism, each rank computes only the gradient from its own heads.
        """
        if self._group is None or self._group.size() == 1:
            return hidden_states
        return copy_to_tensor_model_parallel_region(hidden_states, group=self._group)

    def forward(
        self,
        state: Tensor | None,
        positions: PositionInputs,
        averaged: Tensor | None,
        attention_output: Tensor,
        mlp_output: Tensor,
    ) -> Tensor | None:
        """Return the next layer's position state.

        `state` and `positions` are the results of `enter`, `averaged` is that of `from_attention`.
        `attention_output` and `mlp_output` (s, B, C) do not include the residual stream.
        """
        if not self.updates:
            return state
        outputs = (self._with_summed_gradient(x) for x in (attention_output, mlp_output))
        new = self.encoding.next_state(
            self.layer,
            self._attention_parameters(),
            state,
            positions,
            averaged,
            *outputs,
        )
        if self.record_norms:
            with torch.no_grad():
                # Sums are in fp32, as bf16 would round sums of many squares. The state is (s, B, G,
                # D); only the axis of groups remains. A complex number has two elements.
                before = self.encoding.state_tensor(state).float()
                after = self.encoding.state_tensor(new).float()
                squares = after.square().sum((0, 1, 3))
                update_squares = (after - before).square().sum((0, 1, 3))
                count = torch.full_like(squares, after.numel() / 2 / after.shape[2])
                self.norms = torch.stack([squares, update_squares, count])
        return new


class PositionTransformerLayer(Module):
    """A pre-norm transformer layer, as in Llama, with a positional encoding.

    Args:
        config: the settings of `model` for Megatron.
        groups: the process groups of Megatron's layout.
        encoding: the positional encoding, one object for all layers.
        layer: index of the layer in the whole model, from 0.
        backend: attention backend, one of `ops.backends.BACKENDS`.
        fused_swiglu: use the Triton kernel of the MLP's activation.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        encoding: PositionEncoding,
        layer: int,
        backend: str,
        fused_swiglu: bool,
    ):
        super().__init__()
        parts = MLPSubmodules(
            linear_fc1=ColumnParallelLinear,
            activation_func=ModuleSpec(module=SwiGLU, params={"fused": fused_swiglu}),
            linear_fc2=RowParallelLinear,
        )
        self.input_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attention = PositionSelfAttention(
            model_config,
            config,
            groups,
            encoding.token_layout,
            layer,
            backend,
        )
        self.pre_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config, parts, ffn_hidden_size=config.ffn_hidden_size, tp_group=groups.tp)
        self.position = LayerEncoding(encoding, layer, config)

    def forward(
        self,
        hidden_states: Tensor,
        state: Tensor | None,
        shared: SharedInputs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the next layer's hidden states (s, B, C) and position state.

        Args:
            hidden_states: (s, B, C).
            state: the position state (see `PositionEncoding`); None if the encoding has none.
            shared: the inputs that all layers share.
        """
        normed = self.input_layernorm(hidden_states)
        state, positions = self.position.enter(state, normed)
        in_attention = self.position.to_attention(positions, shared)
        attention_output, averaged = self.self_attention(normed, in_attention, shared)
        averaged = self.position.from_attention(averaged, shared)
        hidden_states = hidden_states + attention_output

        # The second result is the bias, which is None.
        mlp_output, _ = self.mlp(self.pre_mlp_layernorm(hidden_states))
        hidden_states = hidden_states + mlp_output

        # The update is `LayerEncoding.forward`, so that ZeRO 3 gathers its parameters.
        state = self.position(state, positions, averaged, attention_output, mlp_output)
        return hidden_states, state
