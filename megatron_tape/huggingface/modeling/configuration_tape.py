"""Configuration of TAPE language models for transformers, and the base of those with other
positional encodings.
"""

import transformers
from packaging.version import Version

OLDEST_TRANSFORMERS = "5.0.0"
if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
    raise ImportError(
        f"this model requires transformers {OLDEST_TRANSFORMERS} or newer, but"
        f" {transformers.__version__} is installed: pip install -U transformers"
    )

GATE_INPUTS = ("mlp", "attention")
STATE_PRECISIONS = ("fp32", "bf16")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class DecoderConfig(transformers.PreTrainedConfig):
    """Configuration of a Llama-like decoder with any positional encoding.

    The arguments are those of LlamaConfig, except for these. Raises ValueError for unsupported
    settings.

    Args:
        attention_bias: add biases to the q, k and v projections, but not to the output projection,
            as in Qwen2.
        qk_norm: apply RMSNorm to each head's query and key before the positions, as in Qwen3.
    """

    # Trainer leaves the cache out of predictions. Its name depends on transformers' version.
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 1024,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-5,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        tie_word_embeddings: bool = False,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        qk_norm: bool = False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.qk_norm = qk_norm

        # TAPE's modules group query heads by key/value heads.
        if num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {num_attention_heads} is not a multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )


class TapeConfig(DecoderConfig):
    """Configuration of a decoder whose layers update rotary positions from the content (TAPE, ICML
    2025).

    In addition to the arguments of `DecoderConfig`:

    Args:
        rope_parameters: `rope_theta` and `rope_type` (default, linear, llama3 or yarn) with the
            keys of that type.
        position_mlp_size: hidden size of the position MLP; default 4 * num_attention_heads.
        gate_input: which output of the layer, before the residual is added, gates the position MLP:
            that of the `mlp` or of `attention`.
        position_state_precision: precision in which the position state accumulates over layers:
            `fp32`, or `bf16`, which stands for the model's dtype.
    """

    model_type = "tape"

    def __init__(
        self,
        num_attention_heads: int = 12,
        rope_parameters: dict | None = None,
        position_mlp_size: int | None = None,
        gate_input: str = "mlp",
        position_state_precision: str = "bf16",
        **kwargs,
    ):
        # transformers allows nested settings, one dictionary for each type of layer.
        for name, value in (rope_parameters or {}).items():
            if isinstance(value, dict):
                raise ValueError(
                    f"rope_parameters has settings for {name}; give one setting for all layers"
                )
        if kwargs.get("sliding_window") is not None:
            raise ValueError(
                f"sliding_window is {kwargs['sliding_window']}, but layers of this architecture"
                " attend to all tokens; remove it"
            )
        self.rope_parameters = rope_parameters
        self.position_mlp_size = position_mlp_size or 4 * num_attention_heads
        self.gate_input = gate_input
        self.position_state_precision = position_state_precision
        if position_state_precision not in STATE_PRECISIONS:
            raise ValueError(
                f"position_state_precision is {position_state_precision!r}; choose one of"
                f" {', '.join(STATE_PRECISIONS)}"
            )
        if gate_input not in GATE_INPUTS:
            raise ValueError(
                f"gate_input is {gate_input!r}; choose one of {', '.join(GATE_INPUTS)}"
            )
        super().__init__(num_attention_heads=num_attention_heads, **kwargs)
        # transformers' constructor has filled in missing rope_parameters.
        if (rope_type := self.rope_parameters["rope_type"]) not in ROPE_TYPES:
            raise ValueError(f"rope_type is {rope_type!r}; TAPE supports {', '.join(ROPE_TYPES)}")


__all__ = ["DecoderConfig", "TapeConfig"]
