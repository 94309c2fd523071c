"""Configuration of language models with any positional encoding, for transformers."""

from .configuration_tape import DecoderConfig

# transformers' names of the types of layers.
SLIDING = "sliding_attention"
FULL = "full_attention"


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
        sliding_window: number of tokens to which a token attends in layers with a window: itself
            and those before it.
        layer_types: for each layer, `sliding_attention` (with the window) or `full_attention`.
            Default: all layers have the window, if there is one.
        temperature_scale: in layers without positions, queries at position p are multiplied by
            1 + temperature_scale * log(floor((p + 1) / temperature_floor_scale) + 1).
        temperature_floor_scale: tokens after which this factor changes for the first time.

    Raises ValueError for unsupported settings.
    """

    model_type = "encoded_tape"

    def __init__(
        self,
        position_encoding: str | None = None,
        position_settings: dict | None = None,
        layers_without_positions: int | None = None,
        attention_output_gate: bool = False,
        sliding_window: int | None = None,
        layer_types: list[str] | None = None,
        temperature_scale: float = 0.0,
        temperature_floor_scale: int = 8192,
        **kwargs,
    ):
        self.position_encoding = position_encoding
        self.position_settings = position_settings or {}
        self.layers_without_positions = layers_without_positions
        self.attention_output_gate = attention_output_gate
        self.sliding_window = sliding_window
        self.temperature_scale = temperature_scale
        self.temperature_floor_scale = temperature_floor_scale
        super().__init__(**kwargs)

        # Without a list, a user can change the number of layers and save the configuration.
        self.layer_types = layer_types
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window is {sliding_window}; give at least 1, or None")
        if layer_types is None:
            return
        if len(layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(layer_types)} entries, but there are"
                f" {self.num_hidden_layers} layers"
            )
        if unknown := set(layer_types) - {SLIDING, FULL}:
            raise ValueError(f"layer_types has {min(unknown)!r}; choose {SLIDING} or {FULL}")
        if SLIDING in layer_types and sliding_window is None:
            raise ValueError(f"layer_types has {SLIDING}, but sliding_window is None")

    def window_of(self, layer: int) -> int | None:
        """Return the size of the window of layer `layer` (from 0), or None if it attends to all
        earlier tokens.
        """
        if self.layer_types is None or self.layer_types[layer] == SLIDING:
            return self.sliding_window
        return None

    def has_positions(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) uses the positional encoding."""
        interval = self.layers_without_positions
        return interval is None or (layer + 1) % interval > 0


__all__ = ["EncodedConfig"]
