"""Configuration of language models with any positional encoding, for transformers."""

import transformers
from packaging.version import Version

OLDEST_TRANSFORMERS = "5.0.0"
if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
    raise ImportError(
        f"this model needs transformers {OLDEST_TRANSFORMERS} or newer, but this is {transformers.__version__}: "
        "pip install -U transformers"
    )


class EncodedConfig(transformers.PreTrainedConfig):
    """Settings of a Llama-like decoder whose positional encoding lies beside it in files of its own.

    Llama's keys have the same meaning as there. In addition:

    position_encoding: the name of the encoding.
    position_settings: the encoding's settings by name.
    attention_bias: q, k and v projections have biases, the output projection has none (as in Qwen2).
    qk_norm: RMSNorm on each head's query and key before the encoding changes them (as in Qwen3).
    attention_output_gate: the heads' outputs are multiplied by sigmoid(W x), x being attention's input.
    classifier_dropout: dropout before the linear layer of a token classifier, 0.1 unless given.

    Raises ValueError for settings that the model does not support.
    """

    model_type = "encoded_tape"
    keys_to_ignore_at_inference = ["past_key_values"]

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
        position_encoding: str | None = None,
        position_settings: dict | None = None,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        qk_norm: bool = False,
        attention_output_gate: bool = False,
        classifier_dropout: float | None = None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.position_encoding = position_encoding
        self.position_settings = {} if position_settings is None else position_settings
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.qk_norm = qk_norm
        self.attention_output_gate = attention_output_gate
        self.classifier_dropout = classifier_dropout
        if num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )


__all__ = ["EncodedConfig"]
