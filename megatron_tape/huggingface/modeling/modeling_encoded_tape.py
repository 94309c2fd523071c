"""Language models for transformers with any positional encoding: a Llama-like decoder that calls
the encoding.

`encoding_tape.py` imports the class of the encoding from its own file. Encodings use the sequence
as the first axis. Axes: B batch, S new tokens, T all tokens, C hidden size, H query heads, G
key/value heads, D head dimension.
"""

import types

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_encoded_tape import (
    attend_in_window,
    attend_with_scores,
    under_autocast,
    without_autocast,
)
from .attention_tape import TapeAttention
from .cache_encoded_tape import EncodingCache, check_cache, use_encoded_layers
from .cache_tape import CACHE
from .configuration_encoded_tape import EncodedConfig
from .encoding_tape import (
    Encoding,
    SingleProcess,
    TokenCache,
    in_some_layers,
    temperature,
)
from .modeling_tape import (
    TapeForCausalLM,
    TapeForSequenceClassification,
    TapeMLP,
    TapeModel,
    TapePreTrainedModel,
)

# The attention implementations of transformers that these models support.
_IMPLEMENTATIONS = ("sdpa", "eager")


def make_encoding(config: EncodedConfig):
    """Return an instance of this directory's encoding class, `Encoding`, with the settings in
    `config`.

    Raises ValueError if `config` is for another encoding.
    """
    if config.position_encoding != Encoding.name:
        raise ValueError(
            f"position_encoding is {config.position_encoding!r}, but the code in this model's"
            f" directory implements {Encoding.name}; do not mix files of different exports"
        )

    settings = Encoding.Settings(**config.position_settings)
    # Encodings read a ModelConfig of the training code, which exports do not contain.
    model = types.SimpleNamespace(
        position=settings,
        position_encoding=config.position_encoding,
        layers_without_positions=config.layers_without_positions,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        head_dim=config.head_dim,
        seq_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        init_std=config.initializer_range,
        norm_epsilon=config.rms_norm_eps,
        qkv_bias=config.attention_bias,
        qk_norm=config.qk_norm,
        attention_output_gate=config.attention_output_gate,
        tie_embeddings=config.tie_word_embeddings,
        sliding_window=config.sliding_window,
        window_of=config.window_of,
        has_positions=config.has_positions,
    )

    encoding_class = Encoding
    if config.layers_without_positions is not None:
        # A subclass that encodes nothing in every n-th layer, n = layers_without_positions.
        encoding_class = in_some_layers(Encoding)
    return encoding_class(model, SingleProcess())


class EncodedParameter(nn.Module):
    """One parameter of an encoding. It is a module so that its name ends in `weight`.

    `declared` is the encoding's `Parameter`: its shape and its initial value or distribution.
    """

    def __init__(self, declared):
        super().__init__()
        self.declared = declared
        self.weight = nn.Parameter(torch.empty(declared.shape))

    def forward(self) -> Tensor:
        """Return the parameter.

        It is read by a call, because offloaded weights are loaded only while their module is
        called.
        """
        return self.weight


class EncodedPosition(nn.Module):
    """The encoding's parameters in one layer.

    `declared` has the encoding's `Parameter`s by name.
    """

    def __init__(self, declared: dict):
        super().__init__()
        for name, parameter in declared.items():
            self.add_module(name, EncodedParameter(parameter))

    def forward(self) -> dict[str, Tensor]:
        """Return the parameters by name.

        They are read by a call, because peft trains a copy of a module in `modules_to_save`, and
        redirects only calls to it.
        """
        return {name: module() for name, module in self.named_children()}


class EncodedAttention(TapeAttention):
    """Attention with the rotation, scales and changes of scores that an encoding provides, and with
    the layer's window.
    """

    def __init__(self, config: EncodedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.attention_output_gate:
            self.gate_proj = nn.Linear(
                config.hidden_size, config.num_attention_heads * config.head_dim, bias=False
            )

    def forward(
        self,
        hidden_states,
        positions,
        attention_mask,
        cache,
        temperature=None,
        cache_position=None,
        **kwargs,
    ):
        """Return the output (B, S, C), the averaged state (S, B, H, D) or None, and the attention
        weights (B, H, S, T) or None.

        hidden_states (B, S, C); `positions` are the encoding's inputs to attention in this layer
        (`PositionInputs`). The mask is that of a layer without a window: None, boolean or additive.
        `cache` is a Cache of transformers, and cache_position (S,) has the indices of the new
        tokens in it. Queries are multiplied by `temperature` (B or 1, S, 1, 1) unless it is None.
        """
        # Encodings have the sequence as the first axis.
        state = positions.z_TBGD
        if state is not None:
            state = state.transpose(0, 1)
        query, key, value = self.project(hidden_states, state, positions.average_state)
        if positions.factor_TB1D is not None:
            # xPos: scores decay with the distance between query and key.
            scale = positions.factor_TB1D.transpose(0, 1)
            query = query * scale
            key = key / scale
        if temperature is not None:
            query = (query * temperature).to(query.dtype)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            key, value = cache.update(
                key, value, self.layer_idx, {"cache_position": cache_position}
            )

        # Read here, since a user may change the window of a loaded model.
        window = self.config.window_of(self.layer_idx)
        dropout = self.config.attention_dropout if self.training else 0.0
        # Without changes of scores, transformers' attention functions can be used.
        changes = (positions.bias, positions.log_gate_TBH, positions.rescore, positions.sink_H)
        if all(change is None for change in changes):
            kwargs |= {"dropout": dropout, "scaling": self.scaling}
            averages, weights = attend_in_window(
                self, query, key, value, attention_mask, window, **kwargs
            )
        else:
            is_eager = self.config._attn_implementation == "eager"
            with without_autocast(query):
                all_averages, weights = attend_with_scores(
                    query,
                    key,
                    value,
                    attention_mask,
                    positions,
                    dropout,
                    with_weights=is_eager,
                    window=window,
                )
            averages = all_averages.split(self.head_dim, dim=-1)

        output = averages[0].flatten(2)
        if self.config.attention_output_gate:
            output = output * self.gate_proj(hidden_states).sigmoid()
        averaged_state = None
        if positions.average_state:
            # `project` has concatenated the state to the values. The second average is the state's.
            averaged_state = averages[1].transpose(0, 1)
        return self.o_proj(output), averaged_state, weights


class EncodedDecoderLayer(GradientCheckpointingLayer):
    """One decoder layer, which computes the hidden states and the encoding's state for the next
    layer.
    """

    def __init__(self, config: EncodedConfig, layer_idx: int, encoding):
        super().__init__()
        self.layer_idx = layer_idx
        self.encoding = encoding
        self.self_attn = EncodedAttention(config, layer_idx)
        self.mlp = TapeMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.position = EncodedPosition(encoding.parameters(layer_idx))
        self.has_positions = config.has_positions(layer_idx)
        self.has_window = config.window_of(layer_idx) is not None

    def forward(
        self,
        hidden_states,
        state,
        attention_mask=None,
        is_last=False,
        window_phases=None,
        temperature=None,
        **kwargs,
    ):
        """Return the next layer's hidden states (B, S, C) and state (S, B or 1, ...) or None, and
        the attention weights (B, H, S, T) or None.

        `state` is the encoding's state that enters this layer. With `is_last`, it is not updated.
        `window_phases` and `temperature` are the inputs that all layers share (see
        `EncodedModel._first_inputs`).
        """
        layer = self.layer_idx
        encoding = self.encoding
        # Gradient checkpointing looks for the cache among the keyword arguments.
        cache = kwargs.pop(CACHE, None)
        token_cache = TokenCache()  # without a cache of transformers, it stores nothing
        if cache is not None:
            token_cache = EncodingCache(cache.layers[layer], len(hidden_states))
        parameters = self.position()
        normed_states = self.input_layernorm(hidden_states)
        # Encodings get the dtype of the weights even under autocast.
        dtype = hidden_states.dtype
        if under_autocast(hidden_states):
            dtype = self.input_layernorm.weight.dtype

        def for_encoding(x: Tensor) -> Tensor:
            """Return x (B, S, ...) as (S, B, ...) in the encoding's dtype."""
            return x.to(dtype).transpose(0, 1)

        # Layers with a window may rotate with frequencies of their own.
        has_own_frequencies = window_phases is not None and self.has_window and self.has_positions
        if self.has_positions:
            temperature = None
        with without_autocast(hidden_states):
            x = for_encoding(normed_states)
            state = encoding.enter(layer, parameters, state, x, token_cache)
            positions = encoding.position_inputs(layer, parameters, state, x, token_cache)
            in_attention = positions
            if has_own_frequencies:
                in_attention = encoding.inputs_in_window(positions, window_phases)
        attention_output, averaged, weights = self.self_attn(
            normed_states,
            in_attention,
            attention_mask,
            cache,
            temperature=temperature,
            **kwargs,
        )
        hidden_states = hidden_states + attention_output
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))

        # No layer reads the state after the last layer.
        if encoding.updates(layer) and not is_last:
            if averaged is not None:
                # Under autocast, attention returns another dtype.
                averaged = averaged.to(dtype)
            with without_autocast(hidden_states):
                if has_own_frequencies and averaged is not None:
                    averaged = encoding.average_from_window(averaged, window_phases)
                state = encoding.next_state(
                    layer,
                    parameters,
                    state,
                    positions,
                    averaged,
                    for_encoding(attention_output),
                    for_encoding(mlp_output),
                )
                # Gradient checkpointing supports only tensors.
                state = encoding.state_tensor(state)
        return hidden_states + mlp_output, state, weights


class EncodedPreTrainedModel(TapePreTrainedModel):
    """The base class of models with any positional encoding."""

    config_class = EncodedConfig
    _no_split_modules = ["EncodedDecoderLayer"]
    # Encodings may change scores, which these implementations do not support.
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize one module as `TapePreTrainedModel` does, or as the encoding declares it."""
        if not isinstance(module, EncodedParameter):
            return super()._init_weights(module)
        # transformers protects loaded weights only from functions of torch.nn.init.
        if getattr(module.weight, "_is_hf_initialized", False):
            return
        # A standard deviation of 0 stands for a constant.
        if module.declared.std:
            module.weight.normal_(std=module.declared.std)
        else:
            module.weight.copy_(torch.tensor(module.declared.value).expand(module.declared.shape))


class EncodedModel(EncodedPreTrainedModel, TapeModel):
    """The decoder without its language-model head."""

    def _add_layers(self, config: EncodedConfig) -> None:
        """Create the encoding and the decoder layers."""
        self.encoding = make_encoding(config)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([EncodedDecoderLayer(config, i, self.encoding) for i in layers])

    def check_cached(self, length: int) -> None:
        """Raise NotImplementedError if generation with a cache cannot extend a sequence to `length`
        tokens.
        """
        self.encoding.check_cached(length)

    def _check_supported(self, cache) -> None:
        """Raise NotImplementedError for an unsupported attention implementation or cache."""
        implementation = self.config._attn_implementation
        if implementation not in _IMPLEMENTATIONS:
            raise NotImplementedError(
                f"models with the positional encoding {Encoding.name} do not support"
                f" {implementation} attention; call model.set_attn_implementation('sdpa'), or"
                " 'eager' to return attention weights"
            )
        check_cache(cache)

    def _prepare_cache(self, cache, hidden_states: Tensor) -> None:
        """Make `cache` able to store the encoding's tensors, and check its new length."""
        depth = min(self.config.num_hidden_layers, len(self.layers))
        use_encoded_layers(cache, [self.config.window_of(i) for i in range(depth)])
        if cache is not None and (past_length := cache.get_seq_length()) > 0:
            self.check_cached(past_length + hidden_states.shape[1])

    def _default_positions(self, cache_position: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the positions of the new tokens, (B or 1, S), given their indices in the cache,
        (S,).

        Padding is not counted, because encodings may depend on absolute positions. Which tokens are
        padding is known only from a mask (B, T).
        """
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            # A token's position is the number of tokens before it.
            positions = attention_mask.long().cumsum(-1)[:, -len(cache_position) :] - 1
            # A mask with fewer columns than there are new tokens does not describe all of them.
            if positions.shape[1] == len(cache_position):
                # Padding before the first token has the position -1 here.
                return positions.clamp(min=0)
        return cache_position.unsqueeze(0)

    def _first_inputs(
        self, hidden_states: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return the first layer's hidden states (B, S, C), the encoding's initial state (S, B or
        1, ...) or None, and further inputs that all layers share.

        hidden_states (B, S, C) are the embedded tokens, position_ids (B or 1, S).
        """
        config = self.config
        dtype = hidden_states.dtype
        shared_inputs = {}
        if config.temperature_scale:
            factors = temperature(
                position_ids, config.temperature_scale, config.temperature_floor_scale
            )
            shared_inputs["temperature"] = factors[..., None, None]

        # `token_positions` returns None, or positions that replace 0, 1, ... in a sequence of the
        # given length. Its second argument would be a random generator in training.
        if self.encoding.token_positions(1, None) is not None:
            new_ids = []
            for ids in position_ids:
                # The sequence's positions, by the ids 0, 1, ... that they replace.
                table = torch.as_tensor(self.encoding.token_positions(int(ids.max()) + 1, None))
                new_ids.append(table.to(ids.device)[ids])
            position_ids = torch.stack(new_ids)
        positions_SB = position_ids.T
        window_phases = self.encoding.window_phases(positions_SB, dtype)
        if window_phases is not None:
            shared_inputs["window_phases"] = window_phases
        token_embedding = self.encoding.embedding(positions_SB, dtype)
        if token_embedding is not None:
            hidden_states = hidden_states + token_embedding.transpose(0, 1)
        return hidden_states, self.encoding.initial_state(positions_SB, dtype), shared_inputs


class EncodedForCausalLM(EncodedPreTrainedModel, TapeForCausalLM):
    """The decoder with its language-model head."""

    model_class = EncodedModel

    # transformers looks for the name `inputs_embeds` in the signature, which is therefore explicit.
    def prepare_inputs_for_generation(self, *args, inputs_embeds=None, **kwargs) -> dict:
        """Return the inputs of the next step. Raises NotImplementedError for an unsupported cache,
        for which transformers may be unable to compute a mask.
        """
        check_cache(kwargs.get(CACHE))
        return super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)


class EncodedForSequenceClassification(EncodedPreTrainedModel, TapeForSequenceClassification):
    """The decoder with a classification head on the last token that is not padding."""

    model_class = EncodedModel


__all__ = [
    "EncodedForCausalLM",
    "EncodedForSequenceClassification",
    "EncodedModel",
    "EncodedPreTrainedModel",
]
