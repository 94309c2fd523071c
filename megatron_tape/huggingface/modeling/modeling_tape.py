"""TAPE language models for transformers: a Llama-like decoder whose layers update rotary positions
from the content.

"Rethinking Addressing in Language Models via Contextualized Equivariant Positional Encoding" (ICML
2025). The files `*_tape.py` are part of an exported checkpoint and need only torch and
transformers.

In addition to its hidden state, every token has a position state z (B, S, G, D): D/2 complex
numbers for each key/value head, stored as [real | imaginary]. At position s, it starts as RoPE's
phases exp(i s theta_f), times the attention factor with yarn. Queries and keys are multiplied by
the position states of their tokens. The attention weights that average the values also average the
position states; u is this average. Each layer except the last updates the state:
    z' = z + A u,   z'' = z' + W_down diag(silu(W_x m)) W_up z'.
A is `token_mixing`, W_x, W_up and W_down are `x_proj`, `up_proj` and `down_proj`, and m is the
gate's input (B, S, C). No state depends on later tokens, so a cache of the rotated keys and of
[value | z] makes generation exact.

Axes: B batch, S new tokens, T all tokens, C hidden size, V vocabulary, H query heads, G key/value
heads, D head dimension.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from .attention_tape import TapeAttention, refuse_servers
from .cache_tape import CACHE, check_cache, refuse_paged, use_growing_layers
from .configuration_tape import TapeConfig
from .position_tape import TapePhases, TapePosition, warn_if_frozen

logger = logging.get_logger(__name__)
# Before transformers 5.4, caches and masks need the positions of the new tokens.
_MASK_NEEDS_CACHE_POSITION = "cache_position" in inspect.signature(create_causal_mask).parameters


class TapeMLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: TapeConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S, C) to (B, S, C)."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class TapeDecoderLayer(GradientCheckpointingLayer):
    """One decoder layer, which computes the hidden states and the position state for the next
    layer.
    """

    def __init__(self, config: TapeConfig, layer_idx: int):
        super().__init__()
        # "mlp" or "attention": the output that gates the position MLP.
        self.gate_input = config.gate_input
        self.self_attn = TapeAttention(config, layer_idx)
        self.mlp = TapeMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # Nothing reads the state after the last layer.
        is_last = layer_idx == config.num_hidden_layers - 1
        self.position = None if is_last else TapePosition(config)

    def forward(self, hidden_states, state, attention_mask=None, is_last=False, **kwargs):
        """Return the next layer's hidden states (B, S, C) and state (B, S, G, D), and the attention
        weights (B, H, S, T) or None.

        With `is_last`, the state is returned unchanged, since no layer reads it.
        """
        # Gradient checkpointing looks for the cache among the keyword arguments.
        cache = kwargs.pop(CACHE, None)
        updates_state = self.position is not None and not is_last
        normed = self.input_layernorm(hidden_states)
        attention_output, averaged_state, attention_weights = self.self_attn(
            normed, state, attention_mask, cache, updates_state, **kwargs
        )
        hidden_states = hidden_states + attention_output
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        if updates_state:
            # The gate reads this layer's output before the residual is added.
            gate_input = mlp_output if self.gate_input == "mlp" else attention_output
            state = self.position(state, averaged_state, gate_input)
        return hidden_states + mlp_output, state, attention_weights


class TapePreTrainedModel(PreTrainedModel):
    """The base class of TAPE models."""

    config_class = TapeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TapeDecoderLayer"]
    _skip_keys_device_placement = [CACHE]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Return True, which allows `set_attn_implementation`.

        transformers' own method guesses this from the text of this file, which need not exist.
        """
        return True

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a model. Raises NotImplementedError for transformers' own model parallelism."""
        for name in ("tp_plan", "tp_size", "distributed_config", "device_mesh"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"{cls.__name__} does not support transformers' tensor and pipeline"
                    " parallelism; use device_map to distribute layers over devices"
                )
        return super().from_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize one module. transformers calls this for modules that no checkpoint has fully
        loaded.
        """
        # TapePosition sets `initial_std` on its matrices. It is 0 for token_mixing and down_proj,
        # so that the position state does not change and the model starts as RoPE.
        if hasattr(module, "initial_std"):
            nn.init.normal_(module.weight, std=module.initial_std)
        elif isinstance(module, TapePhases):
            # Checkpoints do not contain this buffer, so loading leaves it uninitialized.
            frequencies, _ = module.frequencies()
            module.inv_freq.copy_(frequencies)
        else:
            super()._init_weights(module)


class TapeModel(TapePreTrainedModel):
    """The decoder without its language-model head."""

    def __init__(self, config: TapeConfig):
        # A server such as vLLM sets an attention function of its own, which stores no position
        # state. `attend` refuses it too, but only after the server has loaded the weights.
        refuse_servers(config._attn_implementation)
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self._add_layers(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # transformers sets it to True in `gradient_checkpointing_enable`.
        self.gradient_checkpointing = False
        self._warned_if_frozen = False
        self.post_init()

    # Models with other positional encodings override these methods.

    def _add_layers(self, config: TapeConfig) -> None:
        """Create the decoder layers, and the module that computes the initial position state."""
        self.layers = nn.ModuleList(
            [TapeDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        )
        self.phases = TapePhases(config)

    def _check_supported(self, cache: Cache | None) -> None:
        """Raise NotImplementedError for an unsupported cache; in the first training step, call
        `warn_if_frozen`.
        """
        check_cache(cache)
        # A compiled graph cannot depend on the values of weights.
        if self.training and not self._warned_if_frozen and not torch.compiler.is_compiling():
            self._warned_if_frozen = True
            warn_if_frozen(self)

    def _prepare_cache(self, cache: Cache | None, hidden_states: Tensor) -> None:
        """Change the layers of `cache` in place for this model, before its first update."""
        use_growing_layers(cache, hidden_states)

    def _default_positions(self, cache_position: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the default positions of the new tokens, (1, S), given their indices in the cache,
        (S,).
        """
        # Padding need not be subtracted: TAPE depends only on differences of positions.
        return cache_position.unsqueeze(0)

    def _first_inputs(
        self, hidden_states: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the first layer's hidden states (B, S, C) and position state (B, S, G, D), and
        further inputs that all layers share.

        hidden_states (B, S, C) are the embedded tokens, position_ids (B or 1, S).
        """
        config = self.config
        B, S, _ = hidden_states.shape
        phases = self.phases(position_ids)
        # A float64 model would lose precision with a float32 state.
        if config.position_state_precision != "fp32" or hidden_states.dtype == torch.float64:
            phases = phases.to(hidden_states.dtype)
        state = phases.unsqueeze(2).expand(B, S, config.num_key_value_heads, -1)
        return hidden_states, state, {}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Run the decoder on token ids (B, S) or embeddings (B, S, C).

        The cache is called `past_key_values` before transformers 5.24, and `cache` since; either
        name is accepted. attention_mask (B, T) is 0 at padding. Adding a constant to all
        position_ids (B or 1, S) changes no output. Without a mask and with use_cache=False, a
        restart of position_ids begins a new document, which does not attend to earlier ones.

        Raises ValueError unless exactly one of input_ids and inputs_embeds is given, and for
        output_attentions without eager attention; NotImplementedError for an unsupported cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")

        # None stands for the setting in the configuration.
        config = self.config
        if use_cache is None:
            use_cache = config.use_cache
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states

        if output_attentions and config._attn_implementation != "eager":
            raise ValueError(
                f"{config._attn_implementation} attention does not return attention weights for"
                ' output_attentions; load the model with attn_implementation="eager", or call'
                ' model.set_attn_implementation("eager")'
            )
        if use_cache and self.training and self.gradient_checkpointing:
            logger.warning_once(
                "gradient checkpointing cannot be combined with a cache: setting use_cache=False"
            )
            use_cache = False

        hidden_states = inputs_embeds
        if hidden_states is None:
            hidden_states = self.embed_tokens(input_ids)
        if cache is None:
            cache = past_key_values
        self._check_supported(cache)
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        self._prepare_cache(cache, hidden_states)

        # Indices of the new tokens in the cache, (S,). If the caller does not give them, they begin
        # after the tokens that the cache already has.
        cache_position = kwargs.pop("cache_position", None)
        if cache_position is None:
            past_length = cache.get_seq_length() if cache is not None else 0
            new_indices = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            cache_position = new_indices + past_length
        if position_ids is None:
            position_ids = self._default_positions(cache_position, attention_mask)

        # CACHE is the name of the cache in this version of transformers, `cache` or
        # `past_key_values`. The mask and the layers get the cache under this name.
        mask_inputs = {CACHE: cache, "position_ids": position_ids}
        if _MASK_NEEDS_CACHE_POSITION:
            mask_inputs["cache_position"] = cache_position
        mask = create_causal_mask(config, hidden_states, attention_mask, **mask_inputs)
        layer_inputs = kwargs | {
            CACHE: cache,
            "attention_mask": mask,
            "position_ids": position_ids,
            "cache_position": cache_position,
        }

        hidden_states, state, shared_inputs = self._first_inputs(hidden_states, position_ids)
        layer_inputs |= shared_inputs
        all_hidden_states = []
        all_attentions = []
        # Assisted generation with early exit temporarily lowers config.num_hidden_layers, so that
        # only the first `depth` layers run.
        depth = min(config.num_hidden_layers, len(self.layers))
        for layer, i in zip(self.layers, range(depth)):
            if output_hidden_states:
                all_hidden_states.append(hidden_states)
            hidden_states, state, attention_weights = layer(
                hidden_states, state, is_last=i == depth - 1, **layer_inputs
            )
            all_attentions.append(attention_weights)

        hidden_states = self.norm(hidden_states)
        # As in transformers' models, the last entry is the normed output.
        all_hidden_states.append(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            **{CACHE: cache},
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
        )


class TapeForCausalLM(TapePreTrainedModel, GenerationMixin):
    """The decoder with its language-model head."""

    model_class = TapeModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TapeConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _get_static_cache_init_shape(self) -> None:
        """Return None instead of the shape of a static cache, which transformers would derive from
        the configuration.

        The cache then takes its shape from the first keys and values. Values may be wider than
        keys, because they contain the position state.
        """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, S, V) and, with `labels`, the mean cross-entropy loss.

        A `logits_to_keep` above 0 restricts the logits to that many last tokens; a tensor selects
        tokens by index. labels (B, S) are the input ids, with -100 at tokens to ignore; the loss
        shifts them by one token. The tokens (B, S), their mask and positions, and the cache are
        passed to `TapeModel.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            **kwargs,
        )
        if isinstance(logits_to_keep, int):
            # With 0, this is slice(0, None), which keeps all tokens.
            logits_to_keep = slice(-logits_to_keep, None)
        logits = self.lm_head(outputs.last_hidden_state[:, logits_to_keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def init_continuous_batching(self, *args, **kwargs):
        """Raise NotImplementedError; see `refuse_paged`."""
        refuse_paged()


class TapeForSequenceClassification(GenericForSequenceClassification, TapePreTrainedModel):
    """The decoder with a classification head on the last token that is not padding."""

    model_class = TapeModel

    def __init__(self, config: TapeConfig):
        # Not `super()`: transformers' mixin would create the model with AutoModel, which does not
        # know classes from an export's own files.
        TapePreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = [
    "TapeForCausalLM",
    "TapeForSequenceClassification",
    "TapeModel",
    "TapePreTrainedModel",
]
