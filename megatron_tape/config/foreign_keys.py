"""Names that other programs give to settings of sliding windows and of layers without positions,
and the settings that mean the same here. Imports nothing.
"""

_SAME = "set {} to the same number"
_EVERY = "model.full_attention_every"
_NO_POSITIONS = "model.layers_without_positions"

FIXES = {
    # Megatron-core.
    "window_size": (
        "set model.sliding_window to its first number + 1: it counts the token itself, and"
        " (127, 0) does not"
    ),
    "window_attn_skip_freq": (
        f"set {_EVERY} to the same number; instead of 1, remove model.sliding_window"
    ),
    "no_rope_freq": f"set {_NO_POSITIONS} to the same number; instead of 1, use nope",
    # transformers.
    "layer_types": (
        f"set model.sliding_window, and {_EVERY} to N if layers N, 2 N, ... (counted from 1) are"
        " full_attention and all others sliding_attention"
    ),
    "use_sliding_window": (
        "set model.sliding_window to the number of tokens; without it, no layer has a window"
    ),
    "sliding_window_pattern": _SAME.format(_EVERY),
    "max_window_layers": (
        f"remove it, and set {_EVERY} to N if layers N, 2 N, ... (counted from 1) have no window"
    ),
    "no_rope_layers": f"set {_NO_POSITIONS} to N if every N-th number is 0 and all others are 1",
    "no_rope_layer_interval": _SAME.format(_NO_POSITIONS),
    "rope_local_base_freq": _SAME.format("model.position.rope_local_theta"),
    "local_rope_theta": _SAME.format("model.position.rope_local_theta"),
    "global_rope_theta": _SAME.format("model.position.rope_theta"),
    "attn_temperature_tuning": (
        "set model.temperature_scale, to 0.1 as in Llama 4, and model.temperature_floor_scale"
    ),
    "attn_scale": _SAME.format("model.temperature_scale"),
    "floor_scale": _SAME.format("model.temperature_floor_scale"),
    "attention_chunk_size": (
        "remove it: there are no chunks; model.sliding_window limits attention to the last tokens"
    ),
    # litgpt.
    "sliding_window_size": _SAME.format("model.sliding_window"),
    "sliding_window_indices": f"set {_EVERY} to N if every N-th number is 0 and all others are 1",
    "sliding_window_layer_stride": (
        f"instead of 1, set only model.sliding_window; instead of 2, also set {_EVERY} to 2; larger"
        " strides have no equivalent"
    ),
}
"""What to do instead of such a setting, by its name: the last part of a key."""
