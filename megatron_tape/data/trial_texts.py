"""Difficult texts for tokenizers, and a comparison of two tokenizers on them."""

import math
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

_MODULES = ("argparse", "json/decoder", "encodings/idna", "textwrap", "this")
_MOST_CHARACTERS = 40_000
"""Maximum length of a text. Normalization may expand a character to 128 characters, which take 256 bytes each."""
_DIFFICULT = (
    "  two spaces,\ttab\r\n\n\n    def f(x): return x**2  # ▁ ﬁ Ⅳ Å\n"
    "Grüße, привет, 你好, नमस्ते, \u200b🙂👩\u200d👩\u200d👧 <s>[INST]</s><unk> 3.14159  "
    # Half-width katakana; letters with marks that compose and that do not; jamo.
    "ｶﾞｷﾞ ﾊﾟ Vie\u0323\u0302t \u1112\u1161\u11ab\u1100\u116e\u11a8 \u30ab\u3099 x²\u0302 🇩🇪"
)


def trial_texts() -> list[str]:
    """Return texts from Python's standard library, and a text that is difficult for tokenizers."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / f"{module}.py" for module in _MODULES]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    return [text[:_MOST_CHARACTERS] for text in texts] + [_DIFFICULT]


def find_difference(
    expected: Callable[[str], Sequence[int]],
    found: Callable[[str], Sequence[int]],
    texts: Sequence[str],
    scores: Sequence[float] | None = None,
) -> str | None:
    """Return a text, or one of its lines, that two tokenizers encode differently, or None.

    `expected` and `found` return the ids of a text. A unigram model (with `scores` by id) may have several equally
    likely segmentations, for example of a line of dashes. SentencePiece chooses arbitrarily among them, so any of them
    is accepted.
    """

    def differs(text: str) -> bool:
        ours, theirs = list(expected(text)), list(found(text))
        if ours == theirs:
            return False
        if not scores or max([*ours, *theirs], default=0) >= len(scores):
            return True
        return not math.isclose(*(sum(scores[i] for i in ids) for ids in (ours, theirs)), rel_tol=1e-6)

    text = next(filter(differs, texts), None)
    return text and next(filter(differs, text.splitlines()), text)
