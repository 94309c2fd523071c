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

from .attention_encoded_tape import attend_with_scores, under_autocast, without_autocast
from .attention_tape import TapeAttention, attend
from .cache_encoded_tape import EncodingCache, check_cache, prepare_cache
from .cache_tape import CACHE
from .configuration_encoded_tape import EncodedConfig
from .encoding_tape import Encoding, TokenCache, in_some_layers
from .modeling_tape import (
    TapeForCausalLM,
    TapeForSequenceClassification,
    TapeMLP,
    TapeModel,
    TapePreTrainedModel,
)

_IMPLEMENTATIONS = ("sdpa", "eager")


class SingleProcess:
    """The layout of tokens and heads over processes, which encodings expect, for a single
    process.
    """

    model_group = None
    sequence_shards = 1

    def local_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    local_tokens = to_heads = to_tokens = local_heads


def make_encoding(config: EncodedConfig):
    """Return the encoding with the settings in `config`. Raises ValueError if `config` is for
    another encoding.
    """
    if config.position_encoding != Encoding.name:
        raise ValueError(
            f"position_encoding is {config.position_encoding!r}, but the code in this model's"
            f" directory implements {Encoding.name}; do not mix files of different exports"
        )

    settings = Encoding.Settings(**config.position_settings)
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
    )

    encoding = Encoding
    if config.layers_without_positions is not None:
        encoding = in_some_layers(Encoding)
    return encoding(model, SingleProcess())


class EncodedParameter(nn.Module):
    """One parameter of an encoding, which `declared` describes. It is a module so that its name
    ends in `weight`.
    """

    def __init__(self, declared):
        super().__init__()
        self.declared = declared
        self.weight = nn.Parameter(torch.empty(declared.shape))

    def forward(self) -> Tensor:
        """Return the parameter; offloaded weights are available only while their module is
        called.
        """
        return self.weight


class EncodedPosition(nn.Module):
    """The encoding's parameters in one layer."""

    def __init__(self, declared: dict):
        super().__init__()
        for name, parameter in declared.items():
            self.add_module(name, EncodedParameter(parameter))

    def forward(self) -> dict[str, Tensor]:
        """Return the parameters by name. For `modules_to_save`, peft redirects this call to a copy
        of the module.
        """
        return {name: module() for name, module in self.named_children()}


class EncodedAttention(TapeAttention):
    """Attention with the rotation, scales and changes of scores that an encoding provides."""

    def __init__(self, config: EncodedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.attention_output_gate:
            self.gate_proj = nn.Linear(
                config.hidden_size, config.num_attention_heads * config.head_dim, bias=False
            )

    def forward(
        self, hidden_states, positions, attention_mask, cache, cache_position=None, **kwargs
    ):
        """Return the output (B, S, C), the averaged state (S, B, H, D) or None, and the attention
        weights or None.

        hidden_states (B, S, C); `positions` are the encoding's inputs to attention in this layer.
        """
        state = positions.z_TBGD
        if state is not None:
            state = state.transpose(0, 1)
        query, key, value = self.project(hidden_states, state, positions.average_state)
        if positions.factor_TB1D is not None:
            factor = positions.factor_TB1D.transpose(0, 1)
            query = query * factor
            key = key / factor
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            key, value = cache.update(
                key, value, self.layer_idx, {"cache_position": cache_position}
            )

        dropout = self.config.attention_dropout if self.training else 0.0
        if positions.bias is None and positions.log_gate_TBH is None and positions.rescore is None:
            kwargs |= {"dropout": dropout, "scaling": self.scaling}
            averages, weights = attend(self, query, key, value, attention_mask, **kwargs)
        else:
            is_eager = self.config._attn_implementation == "eager"
            with without_autocast(query):
                whole, weights = attend_with_scores(
                    query, key, value, attention_mask, positions, dropout, with_weights=is_eager
                )
            averages = whole.split(self.head_dim, dim=-1)

        output = averages[0].flatten(2)
        if self.config.attention_output_gate:
            output = output * self.gate_proj(hidden_states).sigmoid()
        averaged_state = None
        if positions.average_state:
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

    def forward(self, hidden_states, state, attention_mask=None, last=False, **kwargs):
        """Return the next layer's hidden states (B, S, C) and state, and the attention weights or
        None.

        The state is (S, B or 1, ...) or None.
        """
        layer = self.layer_idx
        encoding = self.encoding
        cache = kwargs.pop(CACHE, None)
        token_cache = TokenCache()
        if cache is not None:
            token_cache = EncodingCache(cache.layers[layer], len(hidden_states))
        parameters = self.position()
        normed = self.input_layernorm(hidden_states)
        # Encodings get the dtype of the weights even under autocast.
        dtype = hidden_states.dtype
        if under_autocast(hidden_states):
            dtype = self.input_layernorm.weight.dtype

        def for_encoding(x: Tensor) -> Tensor:
            """Return x (B, S, ...) as (S, B, ...) in the encoding's dtype."""
            return x.to(dtype).transpose(0, 1)

        with without_autocast(hidden_states):
            x = for_encoding(normed)
            state = encoding.enter(layer, parameters, state, x, token_cache)
            positions = encoding.position_inputs(layer, parameters, state, x, token_cache)
        attention_output, averaged, weights = self.self_attn(
            normed, positions, attention_mask, cache, **kwargs
        )
        hidden_states = hidden_states + attention_output
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        if encoding.updates(layer) and not last:
            if averaged is not None:
                averaged = averaged.to(dtype)
            with without_autocast(hidden_states):
                state = encoding.next_state(
                    layer,
                    parameters,
                    state,
                    positions,
                    averaged,
                    for_encoding(attention_output),
                    for_encoding(mlp_output),
                )
        return hidden_states + mlp_output, state, weights


class EncodedPreTrainedModel(TapePreTrainedModel):
    """The base class of models with any positional encoding."""

    config_class = EncodedConfig
    _no_split_modules = ["EncodedDecoderLayer"]
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, EncodedParameter):
            return super()._init_weights(module)
        if getattr(module.weight, "_is_hf_initialized", False):
            return
        if module.declared.std:
            module.weight.normal_(std=module.declared.std)
        else:
            module.weight.copy_(torch.tensor(module.declared.value).expand(module.declared.shape))


class EncodedModel(EncodedPreTrainedModel, TapeModel):
    """The decoder without its language-model head."""

    def _add_layers(self, config: EncodedConfig) -> None:
        self.encoding = make_encoding(config)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([EncodedDecoderLayer(config, i, self.encoding) for i in layers])

    def check_cached(self, length: int) -> None:
        self.encoding.check_cached(length)

    def _check(self, cache) -> None:
        implementation = self.config._attn_implementation
        if implementation not in _IMPLEMENTATIONS:
            raise NotImplementedError(
                f"models with the positional encoding {Encoding.name} do not support"
                f" {implementation} attention; call model.set_attn_implementation('sdpa'), or"
                " 'eager' to return attention weights"
            )
        check_cache(cache)

    def _prepare_cache(self, cache, hidden_states: Tensor) -> None:
        prepare_cache(cache, self.config.num_hidden_layers)
        if cache is not None and (before := cache.get_seq_length()) > 0:
            self.check_cached(before + hidden_states.shape[1])

    def _count(self, cache_position: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the positions of the new tokens, (B or 1, S), without counting padding."""
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            counted = attention_mask.long().cumsum(-1)[:, -len(cache_position) :] - 1
            if counted.shape[1] == len(cache_position):
                return counted.clamp(min=0)
        return cache_position.unsqueeze(0)

    def _start(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the first layer's hidden states (B, S, C) and the encoding's initial state."""
        if self.encoding.token_positions(1, None) is not None:
            # The positions of a sequence depend on its own length, not on that of others in the
            # batch.
            rows = []
            for row in position_ids:
                table = torch.as_tensor(self.encoding.token_positions(int(row.max()) + 1, None))
                rows.append(table.to(row.device)[row])
            position_ids = torch.stack(rows)
        positions_SB = position_ids.T
        added = self.encoding.embedding(positions_SB, hidden_states.dtype)
        if added is not None:
            hidden_states = hidden_states + added.transpose(0, 1)
        return hidden_states, self.encoding.initial_state(positions_SB, hidden_states.dtype)


class EncodedForCausalLM(EncodedPreTrainedModel, TapeForCausalLM):
    """The decoder with its language-model head."""

    model_class = EncodedModel


class EncodedForSequenceClassification(EncodedPreTrainedModel, TapeForSequenceClassification):
    """The decoder with a classification head on the last token that is not padding."""

    model_class = EncodedModel


__all__ = [
    "EncodedForCausalLM",
    "EncodedForSequenceClassification",
    "EncodedModel",
    "EncodedPreTrainedModel",
]
