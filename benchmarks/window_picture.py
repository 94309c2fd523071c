"""Draw which token attends to which: in layers with a window, in full layers, and in documents.

    python -m benchmarks.window_picture

writes `docs/windows.svg` from the masks that the models use.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.io.files import atomic_output
from megatron_tape.ops.visibility import Visibility, causal_mask

TOKENS = 12
WINDOW = 4
DOCUMENT_START = 7
"""First token of the second document."""
CELL = 20
"""Width of a pair of query and key, in pixels."""
GAP = 70
TOP = 64
LEFT = 60
SEEN = "#d9822b"
HIDDEN = "#eef0f2"


def main(argv: list[str] | None = None) -> None:
    """Draw the three masks side by side, and save them as an SVG."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/windows.svg"), help="the SVG to write"
    )
    output = parser.parse_args(argv).output
    with atomic_output(output, overwrite=True) as file:
        file.write(picture().encode())


def picture() -> str:
    """Return the SVG."""
    whole = Visibility.of_whole(torch.zeros(1, TOKENS))
    documents = Visibility.of((torch.arange(TOKENS) >= DOCUMENT_START)[None].long())
    panels = {
        f"layers with a window, W = {WINDOW}": whole.with_window(WINDOW),
        "full layers (every Nth)": whole,
        "two packed documents, with a window": documents.with_window(WINDOW),
    }
    side = TOKENS * CELL
    width = LEFT + len(panels) * (side + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + side + 30}"'
        ' role="img" font-family="system-ui, sans-serif" font-size="15">',
        "  <title>Which token attends to which</title>",
        "  <style>text { fill: #808890; text-anchor: middle }</style>",
    ]
    for index, (title, visibility) in enumerate(panels.items()):
        x = LEFT + index * (side + GAP)
        mask = causal_mask(TOKENS, TOKENS, visibility.bounds_2BT, torch.device("cpu"))
        lines.append(_text(x + side / 2, TOP - 38, title))
        lines.append(_text(x + side / 2, TOP - 10, "keys"))
        lines += _cells(mask[0, 0], x)
    middle = TOP + side / 2
    lines.append(
        f'  <text x="{LEFT - 20}" y="{middle}" transform="rotate(-90 {LEFT - 20} {middle})">'
        "queries</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, text: str) -> str:
    """Return a line of the SVG with centered text."""
    return f'  <text x="{x:g}" y="{y:g}">{text}</text>'


def _cells(mask_ST: Tensor, left: int) -> Iterator[str]:
    """Yield a square for each pair of query and key, colored where `mask_ST` is True."""
    for query, row in enumerate(mask_ST.tolist()):
        for key, seen in enumerate(row):
            yield (
                f'  <rect x="{left + key * CELL}" y="{TOP + query * CELL}" width="{CELL - 2}"'
                f' height="{CELL - 2}" rx="3" fill="{SEEN if seen else HIDDEN}"/>'
            )


if __name__ == "__main__":
    main()
