"""Configuration of language models with any positional encoding, for transformers."""

from .configuration_tape import DecoderConfig


class EncodedConfig(DecoderConfig):
    """Configuration of a decoder with a positional encoding in its own files.

    In addition to the arguments of `DecoderConfig`:

    Args:
        position_encoding: name of the encoding.
        position_settings: settings of the encoding by name.
        layers_without_positions: n, if every n-th layer has no positions; None if all layers have
            positions.
        attention_output_gate: multiply the heads' outputs by sigmoid(W x), where x is the input of
            attention.
    """

    model_type = "encoded_tape"

    def __init__(
        self,
        position_encoding: str | None = None,
        position_settings: dict | None = None,
        layers_without_positions: int | None = None,
        attention_output_gate: bool = False,
        **kwargs,
    ):
        self.position_encoding = position_encoding
        self.position_settings = position_settings or {}
        self.layers_without_positions = layers_without_positions
        self.attention_output_gate = attention_output_gate
        super().__init__(**kwargs)


__all__ = ["EncodedConfig"]
