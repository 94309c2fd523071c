"""Configuration of language models with any positional encoding, for transformers."""

from .configuration_tape import DecoderConfig


class EncodedConfig(DecoderConfig):
    """Settings of a decoder whose positional encoding lies beside it in files of its own.

    In addition to those of every decoder:

    position_encoding: the name of the encoding.
    position_settings: the encoding's settings by name.
    layers_without_positions: every so many layers, one gets no positions; None means none.
    attention_output_gate: the heads' outputs are multiplied by sigmoid(W x), x being attention's input.
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
        self.position_settings = {} if position_settings is None else position_settings
        self.layers_without_positions = layers_without_positions
        self.attention_output_gate = attention_output_gate
        super().__init__(**kwargs)


__all__ = ["EncodedConfig"]
