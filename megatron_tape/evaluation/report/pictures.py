"""Figures as SVG inside the page: their texts are texts, and their colours follow the page's."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from markupsafe import Markup, escape

from megatron_tape.evaluation.figures import COLORS, without_glyph_warnings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_ELEMENTS = {"svg", "defs", "g", "path", "text", "tspan", "use", "image", "clipPath", "rect"}
_ATTRIBUTES = {"id", "class", "d", "x", "y", "width", "height", "transform", "style", "clip-path", "viewBox"}
_ROLES = {"#000000": "ink", "#ffffff": "paper", "#b0b0b0": "rule", "#cccccc": "rule"}
"""Matplotlib's own colours of text, background, grid lines and frames, and the names of the page's."""
_VARIABLES = {**{color: f"series-{index}" for index, color in enumerate(COLORS)}, **_ROLES}
_COLOR = re.compile("|".join(_VARIABLES))
_FONT = re.compile(r"'DejaVu Sans'[^;]*")
_NO_TURN = re.compile(r"rotate\(-?0 [^)]*\)")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_POINT = 96 / 72
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Drawing:
    """A figure as an SVG element, and its natural width in pixels of the page."""

    svg: Markup
    width: int


def drawn(figure: Figure, prefix: str, alternative_text: str) -> Drawing:
    """Return a figure as an SVG element whose ids begin with `prefix`, which no other figure of the page may have.

    Only shapes, texts and embedded pixels are taken over: no scripts, styles or addresses.
    """
    import matplotlib

    content = io.StringIO()
    # Texts as texts take the page's font, and can be searched; ids depend on the picture only.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}), without_glyph_warnings():
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(_ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", content.getvalue()))
    _tidy(root, prefix, _referenced(root))
    width = float(root.get("width", "0").removesuffix("pt")) * _POINT
    ElementTree.register_namespace("", SVG[1:-1])
    body = "".join(ElementTree.tostring(child, encoding="unicode") for child in root)
    body = body.replace(f' xmlns="{SVG[1:-1]}"', "")
    body = re.sub(r"\s*\n\s*", "", body)
    svg = Markup(
        f'<svg viewBox="{escape(root.get("viewBox"))}" role="img" aria-label="{escape(alternative_text)}" '
        f'fill="var(--ink)">{body}</svg>'
    )
    return Drawing(svg, round(width))


def _referenced(root: ElementTree.Element) -> set[str]:
    found = set()
    for element in root.iter():
        found.add(element.get(f"{XLINK}href", "").removeprefix("#"))
        found.add(element.get("clip-path", "").removeprefix("url(#").removesuffix(")"))
    return found


def _tidy(element: ElementTree.Element, prefix: str, referenced: set[str]) -> None:
    for child in list(element):
        if not isinstance(child.tag, str) or child.tag.removeprefix(SVG) not in _ELEMENTS:
            element.remove(child)
            continue
        _tidy(child, prefix, referenced)
    target = element.attrib.pop(f"{XLINK}href", None) or element.attrib.pop("href", None)
    for name in [name for name in element.attrib if name not in _ATTRIBUTES]:
        del element.attrib[name]
    if target is not None and target.startswith("#"):
        element.set("href", f"#{prefix}{target[1:]}")
    elif target is not None and target.startswith("data:image/png;base64,"):
        element.set("href", target)
    if (name := element.attrib.pop("id", None)) in referenced:
        element.set("id", prefix + name)
    if "clip-path" in element.attrib:
        element.set("clip-path", element.get("clip-path").replace("url(#", f"url(#{prefix}"))
    if "style" in element.attrib:
        style = _COLOR.sub(lambda match: f"var(--{_VARIABLES[match[0]]})", element.get("style"))
        element.set("style", _FONT.sub("var(--font)", style))
    if _NO_TURN.fullmatch(element.get("transform", "")):
        del element.attrib["transform"]
    if "d" in element.attrib:
        short = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", element.get("d"))
        element.set("d", " ".join(short.split()))
