"""Convert a SentencePiece model into a tokenizer of the `tokenizers` library, which `tokenizer.json` holds.

The library's reader of SentencePiece's rules, `Precompiled`, replaces whole graphemes, and takes the shortest rule that
matches: "Việt" with a combining accent loses it. SentencePiece replaces the longest sequence that has a rule. The
conversion cuts the text where SentencePiece does, shows `Precompiled` single characters, and lets NFC compose what lies
between two cuts.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megatron_tape.errors import FileError

SPACE = "▁"
WITHOUT = "export the model without a tokenizer: --tokenizer none"
ROLES = ("bos", "eos", "unk", "pad")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # SentencePiece's types of pieces
_FROM_TEXT = (NORMAL, USER_DEFINED)
_NEVER = -1e9
"""Score of a piece that is never used for text, even if the text contains its name."""
# Code points that stand for no character, and before and after which a grapheme ends.
_RULE_END, _CHARACTER_END, _END, _PLACEHOLDERS = "\U000e0ffe", "\U000e0fff", "\U000e0ffd", range(0xE0200, 0xE0FF0)
_RULE_BYTES, _RULE_LENGTH = 4 << 20, 100
"""The most bytes that all rules, and the sequence of one, may have; those of SentencePiece have 250,000 and 12."""
_MOST_REPLACED = 50
"""Sequences that are replaced one by one: those of writing systems that are too new for the library's NFC."""
_ANY = r"[\s\S]"
_ALONE = " -~¡-¬®-ʯͰ-҂Ҋ-֏ぁ-ゖ゠-ヿ㐀-鿿가-힣"
"""Characters that form no grapheme with each other."""
# Jamo have 205,000 rules: every sequence of these three classes.
_LEADING = "ᄀ-ᄒㄱㄲㄴㄷ-ㄹㅁ-ㅃㅅ-ㅎ㉠-㉭ﾡﾢﾤﾧ-ﾩﾱ-ﾳﾵ-ﾾ"
_HANGUL = f"[{_LEADING}][ᅡ-ᅵㅏ-ㅣￂ-ￇￊ-ￏￒ-ￗￚ-ￜ][ᆨ-ᇂㄳㄵㄶㄺ-ㄿﾣﾥﾦﾪ-ﾯ]?"


def convert(model: Any, source: str) -> tuple[Any, dict[str, int], list[str]]:
    """Return the `tokenizers.Tokenizer` of a ModelProto, the ids of its special pieces, and sequences it reads wrong.

    Raises FileError, which names `source`, for a model that the library cannot express.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

    trainer, rules = model.trainer_spec, model.normalizer_spec
    symbols = sorted((piece.piece for piece in model.pieces if piece.type == USER_DEFINED), key=len, reverse=True)
    if trainer.model_type == trainer.UNIGRAM:
        result = Tokenizer(_unigram(model))
        # Where text has characters that no piece has, even the worst piece is better.
        names = [piece.piece for piece in model.pieces if piece.type not in _FROM_TEXT and len(piece.piece) > 1]
        if names:
            cuts = "|".join(f"{_literal(name[0])}(?={_literal(name[1:])})" for name in names)
            result.pre_tokenizer = pre_tokenizers.Split(Regex(cuts), "merged_with_previous")
    else:
        core = _bpe(model, source)
        result = Tokenizer(core)
        if symbols:
            _keep_whole(result, symbols, model.pieces, source)
    result.normalizer, wrong = _normalizer(trainer, rules, symbols)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix and not trainer.treat_whitespace_as_suffix:
        decoding.append(decoders.Strip(" ", 1, 0))
    result.decoder = decoders.Sequence(decoding)
    special = [piece.piece for piece in model.pieces if piece.type in (CONTROL, UNKNOWN)]
    result.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    ids = {role: getattr(trainer, f"{role}_id") for role in ROLES}
    return result, {role: index for role, index in ids.items() if 0 <= index < len(model.pieces)}, wrong


def _unigram(model: Any):
    from tokenizers import models

    best = max((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0)

    def score(piece) -> float:
        if piece.type == USER_DEFINED:
            return len(piece.piece.encode()) * best - 0.1  # as SentencePiece computes it
        return piece.score if piece.type == NORMAL else _NEVER

    scores = [(piece.piece, score(piece)) for piece in model.pieces]
    return models.Unigram(scores, unk_id=model.trainer_spec.unk_id, byte_fallback=model.trainer_spec.byte_fallback)


def _bpe(model: Any, source: str):
    """Return a BPE model; one of characters has no merges."""
    from tokenizers import models

    trainer = model.trainer_spec
    if trainer.model_type not in (trainer.BPE, trainer.CHAR):
        raise FileError(source, "is a SentencePiece model of words, which transformers does not have", WITHOUT)
    return models.BPE(
        {piece.piece: index for index, piece in enumerate(model.pieces)},
        _merges(model.pieces) if trainer.model_type == trainer.BPE else [],
        unk_token=model.pieces[trainer.unk_id].piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _merges(pieces) -> list[tuple[str, str]]:
    """Return all ways to join two pieces into a third, best score of the third first, as SentencePiece joins them."""
    normal = {piece.piece: (-piece.score, index) for index, piece in enumerate(pieces) if piece.type == NORMAL}
    found = []
    for piece, rank in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                found.append((rank, normal[left][1], normal[right][1], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _keep_whole(tokenizer: Any, symbols: Sequence[str], pieces: Any, source: str) -> None:
    """Have a BPE tokenizer split text around user-defined symbols, and take those as they are.

    It then also takes other text between symbols as it is if that is a piece. Merges lead to the same, but not to the
    names of bytes and control tokens, which are therefore cut.
    """
    from tokenizers import Regex, pre_tokenizers

    for piece in pieces:
        if piece.type == NORMAL and len(tokenizer.model.tokenize(piece.piece)) != 1:
            problem = f"has user-defined symbols, and a piece that no merges lead to: {piece.piece!r:.100}"
            raise FileError(source, problem, WITHOUT)
    names = [piece.piece for piece in pieces if piece.type not in _FROM_TEXT and len(piece.piece) > 1]
    cuts = "|".join(rf"\A{_literal(name[0])}(?={_literal(name[1:])}\z)" for name in names)
    steps = [pre_tokenizers.Split(Regex("|".join(map(_literal, symbols))), "isolated")]
    steps += [pre_tokenizers.Split(Regex(cuts), "isolated")] if names else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.model.ignore_merges = True


def _normalizer(trainer: Any, rules: Any, symbols: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the normalizer, and the sequences of characters that it replaces by something else than the rules say."""
    from tokenizers import Regex, normalizers

    mapped, wrong = _mapped(rules.precompiled_charsmap) if rules.precompiled_charsmap else ([], [])
    # Rules do not change symbols. Placeholders stand for those that they would change.
    plain = normalizers.Sequence(mapped)
    changed = [symbol for symbol in symbols if plain.normalize_str(symbol) != symbol]
    places = [(symbol, chr(place)) for symbol, place in zip(changed, _PLACEHOLDERS)]
    steps = [normalizers.Replace(symbol, place) for symbol, place in places]
    steps += mapped
    steps += [normalizers.Replace(place, symbol) for symbol, place in places]
    end = ""
    prefix = [normalizers.Prepend(SPACE)] if rules.add_dummy_prefix else []
    if trainer.treat_whitespace_as_suffix and prefix:
        steps.insert(0, normalizers.Replace(Regex(rf"(?<={_ANY})\z"), _END))  # not at the end of an empty text
        prefix, end = [], _END
        blank = " \x01"
        if rules.remove_extra_whitespaces and not plain.normalize_str(blank).strip():
            wrong = [*wrong, blank]  # SentencePiece ends with a space what is not white space alone at first
    if rules.remove_extra_whitespaces:
        # SentencePiece removes its own sign for a space at the end, but not at the beginning.
        steps.append(normalizers.Replace(Regex(rf"\A +{end}\z|\A +|[ {SPACE}]+(?={end}\z)"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps += prefix
    else:
        steps = prefix + steps  # also before a text that rules leave nothing of
    steps.append(normalizers.Replace(Regex(f"[ {end}]"), SPACE))
    return normalizers.Sequence(steps), wrong


def _mapped(rules: bytes) -> tuple[list[Any], list[str]]:
    """Return the steps that apply compiled rules, and the sequences to which they give another value."""
    from tokenizers import Regex, normalizers

    values, hangul = _sequences(rules)
    alone, other = f"[{_ALONE}]", f"[^{_ALONE}]"
    parts = [f"{alone}+(?!{other})", *_alternatives(values), *([_HANGUL] if hangul else []), _ANY]
    steps = [
        normalizers.Replace(Regex(rf"(?:{'|'.join(parts)})\K"), _RULE_END),
        normalizers.Replace(Regex(f"(?<={other})(?={_ANY})|(?<={_ANY})(?={other})"), _CHARACTER_END),
        normalizers.Precompiled(rules),
        normalizers.Replace(_CHARACTER_END, ""),
        normalizers.NFC(),
        normalizers.Replace(_RULE_END, ""),
    ]
    whole = normalizers.Sequence(steps)
    wrong = [sequence for sequence in sorted(values, key=_rank) if whole.normalize_str(sequence) != values[sequence]]
    if len(wrong) <= _MOST_REPLACED:
        steps = [*(normalizers.Replace(sequence, values[sequence]) for sequence in wrong), *steps]
        whole = normalizers.Sequence(steps)
        wrong = [sequence for sequence in wrong if whole.normalize_str(sequence) != values[sequence]]
    return steps, wrong


def _rank(sequence: str) -> tuple[int, str]:
    return -len(sequence), sequence


def _alternatives(sequences: Collection[str]) -> list[str]:
    """Return a regular expression for these sequences, longest first."""
    first = defaultdict(set)
    for sequence in sequences:
        first[sequence[1:]].add(sequence[0])
    if not first:
        return []
    endings = sorted(first, key=_rank)
    seconds = _class(ending[0] for ending in endings)
    every = "|".join(f"{_class(first[ending])}{_literal(ending)}" for ending in endings)
    return [f"(?={_ANY}{seconds})(?:{every})"]


def _sequences(rules: bytes) -> tuple[dict[str, str], bool]:
    """Return the rules for several characters but those for jamo, and whether there are such.

    The bytes are a trie as the library Darts-clone stores it, and the values, each with a zero at its end. Raises
    ValueError, struct.error or IndexError for others.
    """
    if len(rules) > _RULE_BYTES:
        raise ValueError(f"its rules have {len(rules):,} bytes, and at most {_RULE_BYTES:,} are read")
    size = struct.unpack("<I", rules[:4])[0]
    units, texts = struct.unpack(f"<{size // 4}I", rules[4 : 4 + size]), rules[4 + size :]
    leading = {chr(code).encode() for code in range(0x1100, 0xFFDD) if _in_class(chr(code), _LEADING)}
    found, hangul, open_nodes, visits = {}, False, [(_offset(units[0]), b"")], 0
    while open_nodes:
        base, key = open_nodes.pop()
        visits += 1
        if visits > 4 * len(units) or len(key) > _RULE_LENGTH:
            raise ValueError("its rules do not end")
        if key in leading:
            hangul = True
            continue
        for byte in range(1, 256):
            node = base ^ byte
            if node >= len(units) or units[node] & 0x800000FF != byte:
                continue
            child = node ^ _offset(units[node]), key + bytes((byte,))
            open_nodes.append(child)
            if units[node] >> 8 & 1:
                start = units[child[0]] & 0x7FFFFFFF
                found[child[1].decode()] = texts[start : texts.index(b"\0", start)].decode()
    return {sequence: value for sequence, value in found.items() if len(sequence) > 1}, hangul


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


def _in_class(character: str, members: str) -> bool:
    return re.fullmatch(f"[{members}]", character) is not None


def _class(characters: Iterable[str]) -> str:
    """Return a class of a regular expression."""
    ranges = []
    for code in sorted(set(map(ord, characters))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return f"[{''.join('-'.join(_literal(chr(code)) for code in sorted(set(ends))) for ends in ranges)}]"


def _literal(text: str) -> str:
    r"""Return a regular expression for a text, for an engine that knows no \ before a space."""
    return "".join(f"\\{character}" if character in r"\.^$|?*+()[]{}-&~#/" else character for character in text)
