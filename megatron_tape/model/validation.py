"""Check that a model's settings, and those of its positional encoding, are consistent. Imports no
torch.
"""

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import lacks, unsupported_heads
from megatron_tape.position import attention_needs, encoding_of


def validate_model(model: ModelConfig) -> None:
    """Raise ConfigError if head counts, sizes, attention backend and positional encoding do not fit
    together.
    """
    encoding = encoding_of(model)
    heads = model.num_attention_heads
    groups = model.query_groups
    if model.kv_channels is None and model.hidden_size % heads != 0:
        raise ConfigError(
            ("model.hidden_size", "model.num_attention_heads"),
            f"{model.hidden_size} is not divisible by model.num_attention_heads {heads}",
            "change one of them, or set model.kv_channels",
        )
    if model.kv_channels is not None and model.head_dim % 2 != 0:
        raise ConfigError(
            "model.kv_channels",
            f"is {model.kv_channels}, but must be even, since RoPE rotates pairs of elements",
            "choose an even number",
        )
    if model.head_dim % 2 != 0:
        raise ConfigError(
            ("model.hidden_size", "model.num_attention_heads"),
            f"{model.hidden_size} divided by model.num_attention_heads {heads} gives the head"
            f" dimension {model.head_dim}, which must be even, since RoPE rotates pairs of"
            " elements",
            "change one of them, or set model.kv_channels",
        )

    if heads % groups != 0:
        raise ConfigError(
            ("model.num_attention_heads", "model.num_query_groups"),
            f"{heads} is not divisible by model.num_query_groups {groups}",
            "change one of them",
        )
    if (model.unpadded_vocab_size or 0) > model.vocab_size:
        raise ConfigError(
            ("model.unpadded_vocab_size", "model.vocab_size"),
            f"{model.unpadded_vocab_size} exceeds model.vocab_size {model.vocab_size}, which"
            " includes padding",
            "raise model.vocab_size",
        )

    # `auto` is resolved on the device, where only supported backends are candidates.
    if model.attention_backend != "auto":
        why = lacks(model.attention_backend, attention_needs(model))
        if why is not None:
            requiring = f"model.position_encoding {model.position_encoding}"
            if model.needs_window:
                requiring += " with model.sliding_window"
            raise ConfigError(
                ("model.attention_backend", "model.position_encoding"),
                f"is {model.attention_backend}, which {why}, as {requiring} requires",
                "choose another backend, or auto",
            )
        why = unsupported_heads(model.attention_backend, model.head_dim)
        if why is not None:
            raise ConfigError(
                "model.attention_backend",
                f"is {model.attention_backend}, which {why}",
                "choose another backend, or auto",
            )

    # With a number n, every n-th layer has no positions.
    every = model.layers_without_positions
    if every is not None and not encoding.needs:
        raise ConfigError(
            "model.layers_without_positions",
            f"does not apply to {encoding.name}, which has no positions in any layer",
            "remove it",
        )
    if (every or 0) > model.num_layers:
        raise ConfigError(
            "model.layers_without_positions",
            f"is {every}, more than model.num_layers {model.num_layers}, so no layer would be"
            " without positions",
            "lower it, or remove it",
        )

    if model.temperature_scale and every is None:
        raise ConfigError(
            ("model.temperature_scale", "model.layers_without_positions"),
            "applies only to layers without positions, and there are none",
            "set model.layers_without_positions, or set model.temperature_scale to 0",
        )
    floor_scale = model.temperature_floor_scale
    if not model.temperature_scale and floor_scale != ModelConfig.temperature_floor_scale:
        raise ConfigError(
            ("model.temperature_floor_scale", "model.temperature_scale"),
            f"is {floor_scale}, but has no effect, since model.temperature_scale is 0",
            "set model.temperature_scale, or remove model.temperature_floor_scale",
        )

    _check_full_layers(model)
    encoding.check()


def _check_full_layers(model: ModelConfig) -> None:
    """Raise ConfigError if `model.full_attention_every` has no effect."""
    every = model.full_attention_every
    if every is None:
        return
    if model.sliding_window is None:
        raise ConfigError(
            ("model.full_attention_every", "model.sliding_window"),
            "has no effect, since all layers attend to all tokens",
            "set model.sliding_window, or set model.full_attention_every to null",
        )
    if every > model.num_layers:
        raise ConfigError(
            "model.full_attention_every",
            f"is {every}, more than model.num_layers {model.num_layers}, so no layer would attend"
            " to all tokens",
            "lower it, or set it to null",
        )
