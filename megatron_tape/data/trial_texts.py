"""Difficult texts for tokenizers, and a comparison of two tokenizers on them."""

import math
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

_MODULES = ("argparse", "json/decoder", "encodings/idna", "textwrap", "this")
_MOST_CHARACTERS = 40_000
"""Maximum length of a text. Normalization may expand a character to 128 characters, which take 256
bytes each.
"""
_DIFFICULT = (
    "  two spaces,\ttab\r\n\n\n    def f(x): return x**2  # ▁ ﬁ Ⅳ Å\n"
    "Grüße, привет, 你好, नमस्ते, \u200b🙂👩\u200d👩\u200d👧 <s>[INST]</s><unk> 3.14159  "
    # Half-width katakana; letters with marks that compose and that do not; jamo.
    "ｶﾞｷﾞ ﾊﾟ Vie\u0323\u0302t \u1112\u1161\u11ab\u1100\u116e\u11a8 \u30ab\u3099 x²\u0302 🇩🇪"
)


FIXED_TEXTS = (
    _DIFFICULT,
    (
        "The quick brown fox jumps over the lazy dog. Don't stop; it's 10:45 -- \"almost\" noon"
        " (UTC+2).\n\n\tEnd."
    ),
    (
        "def encode(self, text: str) -> list[int]:\n    if not text.strip():\n        return []\n  "
        "  x_1 += 0xFF // 3\r\n"
    ),
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 2026-01-31 v1.2.3-rc4 1e-05 +49 (0)30 50%",
    (
        " leading,  double,   triple and trailing spaces \n \n\n  \n\t\t"
        " tabs\u00a0no-break\u3000wide\u200bzero-width "
    ),
    (
        "<|endoftext|><s></s>[INST] [/INST]<unk><pad> <|im_start|>user\n<0x0A> <0x41> {{ x }} &amp;"
        " </html> C:\\a\\b $x^2$"
    ),
    (
        "Größe naïve façade İstanbul ΑΒΓ αβγ Привет мир שלום مرحبا नमस्ते สวัสดี 你好，世界。"
        "こんにちは ガ 한국어"
    ),
    "ﬁ ½ ² ™ Å e\u0301 🙂🏽 🇩🇪 👩\u200d👧 \ufeff\u202e\x07\x1b \U0010fffd",
    (
        "camelCase snake_case SCREAMING_CASE kebab-case https://example.org/a?b=c&d=%20#e"
        " user@example.com README.md ...!?"
    ),
)
"""Texts of which every version of this project compares the ids; a changed text would make all
tokenizers differ.
"""


def trial_texts() -> list[str]:
    """Return texts from Python's standard library, and a text that is difficult for tokenizers.

    Installations without the sources give fewer texts.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / f"{module}.py" for module in _MODULES]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    return [text[:_MOST_CHARACTERS] for text in texts] + [_DIFFICULT]


def find_difference(
    encode: Callable[[str], Sequence[int]],
    other_encode: Callable[[str], Sequence[int]],
    texts: Sequence[str],
    scores: Sequence[float] | None,
) -> str | None:
    """Return a text, or one of its lines, that two tokenizers encode differently, or None.

    `encode` and `other_encode` return the ids of a text. A unigram model (with `scores` by id) may
    have several equally likely segmentations, for example of a line of dashes. SentencePiece
    chooses arbitrarily among them, so segmentations with equal sums of scores do not differ.
    """

    def differs(text: str) -> bool:
        ids = list(encode(text))
        other_ids = list(other_encode(text))
        if ids == other_ids:
            return False
        # Added tokens have no score.
        if not scores or max([*ids, *other_ids], default=0) >= len(scores):
            return True
        score = sum(scores[i] for i in ids)
        other_score = sum(scores[i] for i in other_ids)
        return not math.isclose(score, other_score, rel_tol=1e-6)

    for text in filter(differs, texts):
        # A short line is a better example, unless only the whole text differs.
        return next(filter(differs, text.splitlines()), text)
    return None
