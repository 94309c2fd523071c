"""The model that was trained, in plain torch of any precision, for comparison with an inference
engine.

It uses the positional encodings of the training itself, and the reference backend of attention. The
weights of only one layer are in memory at a time. `model/reference.py` is an independent
implementation, with which tests compare it.

Axes: S tokens of a sequence, P compared tokens, C hidden size, H query heads, G key/value groups, D
head dimension, V vocabulary. As in training, the first axis of tensors is the sequence, and the
second the batch, which has size 1 here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tape.config.schema import ModelConfig
from megatron_tape.huggingface.imports.weight_files import LazyTensors
from megatron_tape.huggingface.verification.sequences import Outputs, Sequence
from megatron_tape.model.names import HUGGING_FACE_OUTPUT, POSITION, hugging_face_prefix
from megatron_tape.model.shapes import hugging_face_shapes
from megatron_tape.ops.attention import attend
from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.rotation import rotate_groups
from megatron_tape.ops.visibility import Visibility
from megatron_tape.position import PositionEncoding, PositionInputs, encoding_of
from megatron_tape.position.encoding import NO_CACHE, SingleProcess
from megatron_tape.position.some_layers import temperature

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
_NAIVE_TOKENS = 512
"""Longest sequence for which the scores of all pairs of tokens are in memory at once."""


@dataclass(frozen=True)
class SharedInputs:
    """What all layers of a forward pass share."""

    window_phases: Tensor | None
    """The result of `PositionEncoding.window_phases`."""
    temperature_S111: Tensor | None
    """Factor of the queries in layers without positions."""


class PlainModel:
    """A model of this project in plain torch.

    Subclasses change one method each, to compute what a known fault would compute (see `causes`).
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
        rounded_to: torch.dtype = torch.float32,
    ):
        """Prepare the model with the settings `model`.

        Args:
            weights: unsharded weights by Hugging Face's names of Llama, read when they are needed.
            dtype: of the computation.
            rounded_to: dtype to which the weights are rounded first: that in which an engine has
                them.
        """
        self.model = model
        self.encoding: PositionEncoding = self.make_encoding()
        self.dtype = dtype
        self._weights = weights
        self._rounded_to = rounded_to
        self._names = list(hugging_face_shapes(model))

    # Overridden by faults.

    def make_encoding(self) -> PositionEncoding:
        """Return the positional encoding."""
        return encoding_of(self.model, SingleProcess())  # type: ignore[arg-type]

    def window_of(self, layer: int) -> int | None:
        """Return the size of the window in layer `layer` (from 0), or None."""
        return self.model.window_of(layer)

    def pattern_layer(self, layer: int) -> int:
        """Return the layer whose kind (with or without positions) layer `layer` has."""
        return layer

    def changed_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Return the parameter `name` of the encoding in a layer."""
        return parameter

    def changed_state(self, state: Any) -> Any:
        """Return the position state that a layer passes to the next one."""
        return state

    # The forward pass.

    @torch.no_grad()
    def run(self, sequence: Sequence, on_layer: Callable[[int], None] | None = None) -> Outputs:
        """Return what the model computes for the compared tokens of a sequence.

        `on_layer` is called with the index of each layer before it is computed, to show progress.
        """
        hidden_states, state, shared = self.embedded(sequence)
        compared = list(sequence.compared)
        of_layers = []
        for layer in range(self.model.num_layers):
            if on_layer is not None:
                on_layer(layer)
            hidden_states, state = self.run_layer(layer, hidden_states, state, shared)
            of_layers.append(hidden_states[compared, 0])
        logits = self.logits(hidden_states[compared, 0])
        return Outputs(logits, torch.stack(of_layers))

    def embedded(self, sequence: Sequence) -> tuple[Tensor, Any, SharedInputs]:
        """Return the first layer's hidden states (S, 1, C) and position state, and what all layers
        share.
        """
        positions = sequence.positions
        # None, or the positions that replace 0, 1, ...
        table = self.encoding.token_positions(int(positions[-1]) + 1, None)
        if table is not None:
            positions = torch.as_tensor(table)[positions]
        positions_SB = positions[:, None]

        # Only the rows of these tokens are converted.
        rows = self._weights[EMBEDDING][sequence.ids]
        hidden_states = self._cast(rows)[:, None]
        embedding = self.encoding.embedding(positions_SB, self.dtype)
        if embedding is not None:
            hidden_states = hidden_states + embedding

        temperature_S111 = None
        if self.model.temperature_scale:
            temperature_S = temperature(
                sequence.positions, self.model.temperature_scale, self.model.temperature_floor_scale
            )
            temperature_S111 = temperature_S[:, None, None, None]
        window_phases = self.encoding.window_phases(positions_SB, self.dtype)
        shared = SharedInputs(window_phases, temperature_S111)
        state = self.encoding.initial_state(positions_SB, self.dtype)
        return hidden_states, state, shared

    def run_layer(
        self,
        layer: int,
        hidden_states: Tensor,
        state: Any,
        shared: SharedInputs,
        queries: list[int] | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the hidden states (S, 1, C) and the position state after layer `layer` (from 0),
        given those before it.

        With `queries`, the indices of some tokens, only the results of these tokens are computed:
        (P, 1, C). This requires an encoding that does not change scores.
        """
        weights = self._layer_weights(layer)
        parameters = self._parameters(layer, weights)
        epsilon = self.model.norm_epsilon
        normed = _rms_norm(hidden_states, weights["input_layernorm.weight"], epsilon)
        if queries is not None:
            # Here, so that those of all tokens need no memory during attention.
            hidden_states = hidden_states[queries]

        kind = self.pattern_layer(layer)
        state = self.encoding.enter(kind, parameters, state, normed, NO_CACHE)
        positions = self.encoding.position_inputs(kind, parameters, state, normed, NO_CACHE)
        output, averaged = self._attention(layer, weights, normed, positions, shared, queries)
        if queries is not None:
            normed = normed[queries]
            positions = _of_tokens(positions, queries)
            state = self.encoding.state_tensor(state)
            if state is not None:
                state = state[queries]

        output = output.flatten(2)
        if self.model.attention_output_gate:
            output = output * F.linear(normed, weights["self_attn.gate_proj.weight"]).sigmoid()
        attention_output = F.linear(output, weights["self_attn.o_proj.weight"])
        hidden_states = hidden_states + attention_output

        normed = _rms_norm(hidden_states, weights["post_attention_layernorm.weight"], epsilon)
        mlp_output = _mlp(normed, weights)
        hidden_states = hidden_states + mlp_output

        if self.encoding.updates(layer):
            new = self.encoding.next_state(
                layer, parameters, state, positions, averaged, attention_output, mlp_output
            )
            state = self.changed_state(self.encoding.state_tensor(new))
        return hidden_states, state

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (P, V) of the hidden states (P, C) after the last layer."""
        norm = self._cast(self._weights[NORM])
        normed = _rms_norm(hidden_states, norm, self.model.norm_epsilon)
        name = HUGGING_FACE_OUTPUT
        if self.model.tie_embeddings:
            name = EMBEDDING
        return F.linear(normed, self._cast(self._weights[name]))

    def _attention(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        normed: Tensor,
        positions: PositionInputs,
        shared: SharedInputs,
        queries: list[int] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the averages of the values (S or P, 1, H, D), and of the position state or
        None.
        """
        selected = slice(None) if queries is None else queries
        query = self._heads(weights, "q", normed[selected])
        key = self._heads(weights, "k", normed)
        value = self._heads(weights, "v", normed)

        window = self.window_of(layer)
        has_positions = self.model.has_positions(self.pattern_layer(layer))
        if shared.temperature_S111 is not None and not has_positions:
            query = (query * shared.temperature_S111[selected]).to(self.dtype)
        # Layers with a window may have frequencies of their own.
        window_phases = shared.window_phases
        if window is None or not has_positions:
            window_phases = None
        if window_phases is not None:
            positions = self.encoding.inputs_in_window(positions, window_phases)

        inputs = AttentionInputs(q_SBHD=query, k_TBGD=key, v_TBGD=value, **vars(positions))
        if queries is None:
            averages, averaged_state = _attend(inputs, window)
        else:
            averages, averaged_state = _attend_for(queries, inputs, window)
        if window_phases is not None and averaged_state is not None:
            if queries is not None:
                window_phases = window_phases[queries]
            averaged_state = self.encoding.average_from_window(averaged_state, window_phases)
        return averages, averaged_state

    def _heads(self, weights: Mapping[str, Tensor], kind: str, normed: Tensor) -> Tensor:
        """Return the queries ("q"), keys ("k") or values ("v") of tokens (N, 1, C), with an axis of
        heads: (N, 1, H or G, D).
        """
        weight = weights[f"self_attn.{kind}_proj.weight"]
        bias = weights.get(f"self_attn.{kind}_proj.bias")
        projected = F.linear(normed, weight, bias)
        heads = projected.unflatten(-1, (-1, self.model.head_dim))
        if self.model.qk_norm and kind != "v":
            norm = weights[f"self_attn.{kind}_norm.weight"]
            heads = _rms_norm(heads, norm, self.model.norm_epsilon)
        return heads

    def _layer_weights(self, layer: int) -> LazyTensors:
        """Return the weights of a layer by their names in the layer, which are read when they are
        accessed.
        """
        prefix = hugging_face_prefix(layer)
        names = [name.removeprefix(prefix) for name in self._names if name.startswith(prefix)]
        return LazyTensors(names, lambda name: self._cast(self._weights[prefix + name]))

    def _parameters(self, layer: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoding's parameters in a layer by name, given the layer's weights."""
        parameters = {}
        for name, declared in self.encoding.parameters(layer).items():
            parameter = weights[f"{POSITION}{name}.weight"]
            if declared.diagonal:
                parameter = parameter.diagonal()
            parameters[name] = self.changed_parameter(name, parameter)
        return parameters

    def _cast(self, weight: Tensor) -> Tensor:
        """Return a weight in the dtype of the computation, rounded as in an engine."""
        return weight.to(self._rounded_to).to(self.dtype)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x (..., N), normalized along the last axis and multiplied by the weight (N,)."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _mlp(normed: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the output of a layer's MLP, with the shape of its normalized input (N, 1, C)."""
    gate = F.silu(F.linear(normed, weights["mlp.gate_proj.weight"]))
    up = F.linear(normed, weights["mlp.up_proj.weight"])
    return F.linear(gate * up, weights["mlp.down_proj.weight"])


def _attend(inputs: AttentionInputs, window: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the averages (S, 1, H, D) of the values, and of the position state or None."""
    tokens_BS = inputs.q_SBHD[:, :, 0, 0].T
    if window is not None and window < tokens_BS.shape[1]:
        inputs = replace(inputs, visibility=Visibility.of_whole(tokens_BS).with_window(window))
    backend = "naive"
    if tokens_BS.shape[1] > _NAIVE_TOKENS:
        backend = "tiled"
    return attend(inputs, backend)


def _attend_for(
    queries: list[int], inputs: AttentionInputs, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the averages (P, 1, H, D) of `_attend` for some queries only, which are all that
    `inputs.q_SBHD` has.
    """
    groups = inputs.k_TBGD.shape[2]
    # One group at a time, since all rotated keys together may need more memory than a layer.
    of_groups = [
        _attend_in_group(queries, _of_group(inputs, group, groups), window)
        for group in range(groups)
    ]
    values, states = zip(*of_groups, strict=True)
    if states[0] is None:
        return torch.cat(values, dim=2), None
    return torch.cat(values, dim=2), torch.cat(states, dim=2)


def _of_group(inputs: AttentionInputs, group: int, groups: int) -> AttentionInputs:
    """Return the inputs of one of `groups` key/value groups and of its query heads."""
    heads_per_group = inputs.q_SBHD.shape[2] // groups
    first_head = group * heads_per_group
    own_heads = slice(first_head, first_head + heads_per_group)
    own = slice(group, group + 1)
    z = inputs.z_TBGD
    # All groups may share one state.
    if z is not None and z.shape[2] > 1:
        z = z[:, :, own]
    return replace(
        inputs,
        q_SBHD=inputs.q_SBHD[:, :, own_heads],
        k_TBGD=inputs.k_TBGD[:, :, own],
        v_TBGD=inputs.v_TBGD[:, :, own],
        z_TBGD=z,
        joined_TBGE=None,
    )


def _attend_in_group(
    queries: list[int], inputs: AttentionInputs, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the averages of `_attend_for` for the heads of one group."""
    query = inputs.q_SBHD
    key = inputs.k_TBGD
    z = inputs.z_TBGD
    if z is not None:
        query = rotate_groups(query, z[queries])
        key = rotate_groups(key, z)
    if inputs.factor_TB1D is not None:
        query = query * inputs.factor_TB1D[queries]
        key = key / inputs.factor_TB1D

    of_queries = []
    for row, index in enumerate(queries):
        # Without the keys that the query does not attend to, no mask is needed.
        first = 0
        if window is not None:
            first = max(0, index - window + 1)
        visible = slice(first, index + 1)
        one = replace(
            inputs,
            q_SBHD=query[row : row + 1],
            k_TBGD=key[visible],
            v_TBGD=inputs.v_TBGD[visible],
            z_TBGD=None if z is None else z[visible],
            factor_TB1D=None,
            rotate=False,
        )
        of_queries.append(attend(one, "naive"))
    values, states = zip(*of_queries, strict=True)
    if states[0] is None:
        return torch.cat(values), None
    return torch.cat(values), torch.cat(states)


def _of_tokens(positions: PositionInputs, tokens: list[int]) -> PositionInputs:
    """Return the inputs of some tokens, for an encoding that only rotates."""
    if positions.z_TBGD is None:
        return positions
    return replace(positions, z_TBGD=positions.z_TBGD[tokens], joined_TBGE=None)
