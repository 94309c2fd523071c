"""How far each layer of a TAPE model moves the position state, for its model card: in words and as a picture."""

import io
import re

from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.model.names import POSITION
from megatron_tape.position import encoding_of

PICTURE = "positions.png"
"""The picture's file beside README.md."""
_LOGGED = re.compile(r"position/update_norm/layer_(\d{1,9})")
_COLORS = ("#1670fa", "#df6e08")


def position_section(saved: SavedWeights, logged: dict[str, tuple[int, float]]) -> tuple[str, bytes | None]:
    """Return the text of the section about positions, and its picture as PNG; None if nothing has moved.

    The picture shows what the run `logged` of its updates, or else how large TAPE's matrices are.
    """
    matrices = _sizes_of_matrices(saved)
    if not any(map(any, matrices.values())):
        text = "TAPE's matrices are zero, as at their start, so positions are those of RoPE until the model is trained."
        return text, None
    layers = range(saved.model.num_layers)
    updates = {int(found[1]): value for name, value in logged.items() if (found := _LOGGED.fullmatch(name))}
    updates = {layer: value for layer, value in updates.items() if layer in layers}
    if updates:
        step = max(step for step, _ in updates.values())
        bars = {"update": [updates[layer][1] if layer in updates else 0.0 for layer in range(max(updates) + 1)]}
        text = (
            f"How much each layer changes the position state, as training measured it at step {step:,}: the root mean "
            "square of the update, where the numbers of RoPE's phases have the modulus 1. It would be 0 with RoPE. The "
            "last layer has no update."
        )
        label = f"RMS of the update (step {step:,})"
    else:
        bars, label = matrices, "size beside the identity"
        text = (
            "How large the matrices are with which each layer changes the position state, beside the identity, which "
            "keeps it (Frobenius norms; of the gated map with all gates at 1). This is read from the weights alone, "
            "not measured on text. With RoPE they would be 0. The last layer has none."
        )
    in_words = (f"{name} {', '.join(f'{value:.3g}' for value in values)}" for name, values in bars.items())
    picture = f"![Bars by layer: {'; '.join(in_words)}]({PICTURE})"
    return f"{text}\n\n{picture}", _draw(bars, label)


def _sizes_of_matrices(saved: SavedWeights) -> dict[str, list[float]]:
    """Return, by layer, the norms of the mixing over tokens and of the gated map, as multiples of the identity's."""
    sizes: dict[str, list[float]] = {"mixing over tokens": [], "gated map": []}
    encoding = encoding_of(saved.model)
    for layer in range(saved.model.num_layers):
        names = encoding.parameters(layer)
        if not names:
            continue
        full = (f"decoder.layers.{layer}.{POSITION}{name}" for name in ("token_mixing", "up_proj", "down_proj"))
        mixing, up, down = (part for name in full for part in saved.parts(name, with_lora=False).values())
        identity = len(mixing) ** 0.5
        sizes["mixing over tokens"].append(mixing.norm().item() / identity)
        sizes["gated map"].append((down @ up).norm().item() / identity)
    return sizes


def _draw(bars: dict[str, list[float]], label: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = len(next(iter(bars.values())))
    figure = Figure(figsize=(min(9.0, 3.5 + 0.18 * layers), 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes, width = figure.subplots(), 0.8 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        places = [layer + width * (index - (len(bars) - 1) / 2) for layer in range(layers)]
        axes.bar(places, values, width, color=_COLORS[index], label=name)
    ticks = range(0, layers, -(-layers // 12))
    axes.set(xlabel="layer", ylabel=label, xlim=(-1, layers), xticks=ticks)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    if len(bars) > 1:
        figure.legend(loc="outside upper right", ncols=len(bars), frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
