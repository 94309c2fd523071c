"""Check that a model's settings, and those of its positional encoding, are consistent. Imports no torch."""

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import refuse
from megatron_tape.ops.backends import lacks, unsupported_heads
from megatron_tape.position import encoding_of


def validate_model(model: ModelConfig) -> None:
    """Raise `ConfigError` if the model's settings are inconsistent."""
    encoding = encoding_of(model)
    heads, groups = model.num_attention_heads, model.query_groups
    refuse(
        model.kv_channels is None and model.hidden_size % heads != 0,
        ("model.hidden_size", "model.num_attention_heads"),
        f"{model.hidden_size} is not divisible by model.num_attention_heads {heads}",
        "change either, or set model.kv_channels",
    )
    refuse(
        model.kv_channels is not None and model.head_dim % 2 != 0,
        "model.kv_channels",
        f"{model.kv_channels} is odd, but rotary pairs need an even head size",
        "make it even",
    )
    refuse(
        model.head_dim % 2 != 0,
        ("model.hidden_size", "model.num_attention_heads"),
        f"{model.hidden_size} over model.num_attention_heads {heads} gives the odd head size {model.head_dim}, but "
        "rotary pairs need an even one",
        "change either",
    )
    refuse(
        heads % groups != 0,
        ("model.num_attention_heads", "model.num_query_groups"),
        f"{heads} is not divisible by model.num_query_groups {groups}",
        "change either",
    )
    refuse(
        (model.unpadded_vocab_size or 0) > model.vocab_size,
        ("model.unpadded_vocab_size", "model.vocab_size"),
        f"{model.unpadded_vocab_size} exceeds model.vocab_size {model.vocab_size}, which includes padding",
        "raise vocab_size",
    )
    if model.attention_backend != "auto":
        why = lacks(model.attention_backend, encoding.needs)
        refuse(
            why is not None,
            ("model.attention_backend", "model.position_encoding"),
            f"is {model.attention_backend}, which {why}, as model.position_encoding {model.position_encoding} requires",
            "choose another, or auto",
        )
        why = unsupported_heads(model.attention_backend, model.head_dim)
        problem = f"is {model.attention_backend}, which {why}"
        refuse(why is not None, "model.attention_backend", problem, "choose another, or auto")
    every = model.layers_without_positions
    problem = f"does not apply to {encoding.name}, which has no positions in any layer"
    refuse(every is not None and not encoding.needs, "model.layers_without_positions", problem, "remove it")
    problem = f"is {every}, more than model.num_layers {model.num_layers}, so no layer would be without positions"
    refuse((every or 0) > model.num_layers, "model.layers_without_positions", problem, "lower it, or remove it")
    encoding.check()
