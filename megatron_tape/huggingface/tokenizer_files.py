"""Write the files from which `AutoTokenizer` makes the tokenizer that a model was trained with, with the same ids.

A Hugging Face tokenizer is copied. A SentencePiece model becomes a `tokenizer.json` of the same pieces; before it is
written, it is checked on real text that both give the same ids. The `transformers` package is not needed.
"""

import json
import math
import shutil
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.data.tokenizer import Tokenizer, load_tokenizer
from megatron_tape.errors import FileError
from megatron_tape.io.records import read_record

_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
TOKENIZER = "tokenizer"
"""The directory in a checkpoint that holds the original tokenizer of an imported model."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", *_BESIDE)
FROM_THE_FILE = "PreTrainedTokenizerFast"
"""The class of transformers that reads a tokenizer.json as it is."""
_ROLES = ("bos", "eos", "unk", "pad")
_SPACE = "▁"
_TRIED_MODULES = ("argparse", "json/decoder", "encodings/idna", "textwrap", "this")
_TRIED_TEXT = (
    "  two spaces,\ttab\r\n\n\n    def f(x): return x**2  # ▁ ﬁ Ⅳ Å\n"
    "Grüße, привет, 你好, नमस्ते, \u200b🙂👩\u200d👩\u200d👧 <s>[INST]</s><unk> 3.14159  "
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # SentencePiece's types of pieces
_FROM_TEXT = (_NORMAL, _USER_DEFINED)
_QWENS_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NEVER = -1e9
"""Score of a piece that is never used for text, even if the text contains its name."""


@dataclass(frozen=True)
class ExportedTokenizer:
    """What the rest of an export needs to know about the tokenizer."""

    vocab_size: int
    special_ids: dict[str, int | None]
    """`bos_token_id`, `eos_token_id` and `pad_token_id`."""


def write_tokenizer(source: str | Path, output: Path, context: int) -> ExportedTokenizer:
    """Write the files of the tokenizer `source` (see `load_tokenizer`) of a model of `context` tokens into `output`.

    Raises FileError if there is none, or if the file is not a tokenizer or cannot be converted exactly.
    """
    ours, source = load_tokenizer(source), Path(source)
    if source.is_dir():
        source = next(source / name for name in ("tokenizer.json", "tokenizer.model") if (source / name).is_file())
    if source.suffix == ".json":
        special = _copy_hugging_face(source, ours, output, context)
    else:
        special = _convert_sentencepiece(source, ours, output, context)
    ids = {f"{role}_token_id": special.get(role) for role in ("bos", "eos", "pad")}
    return ExportedTokenizer(ours.vocab_size, ids)


def read_tokenizer(directory: str | Path, **options: Any) -> Any:
    """Return the tokenizer of an export, or of another model, as transformers loads it with these `options`.

    AutoTokenizer would replace that of every Qwen2 model by Qwen's.
    """
    import transformers

    kind, file = transformers.AutoTokenizer, Path(directory) / "tokenizer_config.json"
    if file.is_file() and (Path(directory) / "tokenizer.json").is_file():
        settings = read_record(file, dict[str, Any])
        if settings.get("tokenizer_class") in (FROM_THE_FILE, "TokenizersBackend") and "auto_map" not in settings:
            kind = transformers.PreTrainedTokenizerFast
    return kind.from_pretrained(directory, **options)


def is_qwens(directory: Path) -> bool:
    """Return whether a tokenizer.json is like that which transformers puts in place of every Qwen2 model's."""
    settings = read_record(directory / "tokenizer.json", dict[str, Any])
    steps = (settings.get("pre_tokenizer") or {}).get("pretokenizers") or ()
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    normal = (settings.get("normalizer") or {}).get("type") == "NFC"
    has_end = any(token.get("content") == "<|endoftext|>" for token in settings.get("added_tokens") or ())
    return normal and has_end and steps[0].get("pattern") == {"Regex": _QWENS_SPLIT}


def _write_config(output: Path, context: int, tokens: dict[str, str], **more: object) -> None:
    settings = {
        "tokenizer_class": FROM_THE_FILE,
        **{f"{role}_token": token for role, token in tokens.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **more,
    }
    _write_settings(output, settings)


def _write_settings(output: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (output / "tokenizer_config.json").write_text(text, encoding="utf-8")


def files_beside(directory: Path, names: Iterable[str] = TOKENIZER_FILES) -> list[str]:
    """Return which of these files are in a directory, to be copied.

    Raises FileError for a link out of it, but for those of the Hub's cache, as it could lead to a file that is secret.
    """
    found = [name for name in names if (directory / name).is_file()]
    cached = next((each for each in directory.resolve().parents if each.name.startswith("models--")), directory)
    for name in found:
        if not (directory / name).resolve().is_relative_to(cached.resolve()):
            raise FileError(str(directory / name), "is a link to a file elsewhere", "put a copy in its place")
    return found


def _copy_hugging_face(source: Path, ours: Tokenizer, output: Path, context: int) -> dict[str, int | None]:
    import tokenizers

    shutil.copyfile(source, output / "tokenizer.json")
    for name in files_beside(source.parent, _BESIDE):
        shutil.copyfile(source.parent / name, output / name)
    library = tokenizers.Tokenizer.from_file(str(source))
    special = {"bos": ours.bos, "eos": ours.eod}
    tokens = {role: library.id_to_token(index) for role, index in special.items() if index is not None}
    if (output / "tokenizer_config.json").is_file():
        settings = read_record(output / "tokenizer_config.json", dict[str, Any])
        pad = settings.get("pad_token")
        pad = pad.get("content") if isinstance(pad, dict) else pad
        special["pad"] = library.token_to_id(pad) if isinstance(pad, str) else None
        # Classes such as GPT2Tokenizer make another tokenizer from the vocabulary, without the file's own steps.
        padding = {"padding_side": "left"} if str(settings.get("tokenizer_class")).startswith("Llama") else {}
        named = {f"{role}_token": token for role, token in tokens.items()}
        settings = padding | named | settings | {"tokenizer_class": FROM_THE_FILE}
        settings.pop("auto_map", None)  # of code that is not copied
        _write_settings(output, settings)
    else:
        unknown = getattr(library.model, "unk_token", None)
        _write_config(output, context, tokens | ({"unk": unknown} if unknown else {}))
    return special


def _convert_sentencepiece(source: Path, ours: Tokenizer, output: Path, context: int) -> dict[str, int | None]:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(source.read_bytes())
    converted, special = _converted(model, source)
    texts = [*_texts(), *(f"a{piece.piece}b" for piece in model.pieces if piece.type == _USER_DEFINED)]
    scores = (
        [piece.score for piece in model.pieces] if model.trainer_spec.model_type == model.trainer_spec.UNIGRAM else None
    )
    _try_out(converted, ours, source, texts, scores)
    # The library's own `save` raises a plain Exception when the disk is full.
    (output / "tokenizer.json").write_text(converted.to_str(pretty=True), encoding="utf-8")
    shutil.copyfile(source, output / "tokenizer.model")
    names = {role: model.pieces[index].piece for role, index in special.items()}
    # SentencePiece never finds a special token in text, so the model never saw one there.
    _write_config(output, context, names, split_special_tokens=True)
    return dict(special)


def _converted(model, source: Path):
    """Return a `tokenizers.Tokenizer` of the pieces of a SentencePiece model, and the ids of its special pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    trainer, rules = model.trainer_spec, model.normalizer_spec
    pieces = [piece.piece for piece in model.pieces]
    if trainer.model_type == trainer.BPE:
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        core = models.BPE(
            vocabulary,
            _merges(model.pieces),
            unk_token=pieces[trainer.unk_id],
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    elif trainer.model_type == trainer.UNIGRAM:
        scores = [(p.piece, p.score if p.type in _FROM_TEXT else _NEVER) for p in model.pieces]
        core = models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    else:
        problem = "is a SentencePiece model of words or characters"
        raise FileError(str(source), problem, "only BPE and unigram are exported")
    steps = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        from tokenizers import Regex

        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    result = Tokenizer(core)
    result.normalizer = normalizers.Sequence(steps)
    result.decoder = decoders.Sequence(decoding)
    kinds = {piece.piece: piece.type for piece in model.pieces}
    result.add_special_tokens(
        [AddedToken(p, normalized=False, special=True) for p in pieces if kinds[p] in (_CONTROL, _UNKNOWN)]
    )
    result.add_tokens([AddedToken(p, normalized=False, special=False) for p in pieces if kinds[p] == _USER_DEFINED])
    ids = {role: getattr(trainer, f"{role}_id") for role in _ROLES}
    return result, {role: index for role, index in ids.items() if 0 <= index < len(pieces)}


def _merges(pieces) -> list[tuple[str, str]]:
    """Return all ways to join two pieces into a third, best score of the third first, as SentencePiece joins them."""
    normal = {piece.piece: (-piece.score, index) for index, piece in enumerate(pieces) if piece.type == _NORMAL}
    found = []
    for piece, rank in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                found.append((rank, normal[left][1], normal[right][1], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _texts() -> list[str]:
    """Return text that every machine has, and text that is difficult for tokenizers."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / f"{module}.py" for module in _TRIED_MODULES]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()] + [_TRIED_TEXT]


def _try_out(converted, ours: Tokenizer, source: Path, texts: list[str], scores: list[float] | None) -> None:
    """Raise FileError if the converted tokenizer gives other ids than ours.

    A unigram model, for which `scores` are given, may divide a text such as a line of dashes in another way that is
    equally likely. SentencePiece's choice between the two is arbitrary and not reproduced, so both are accepted.
    """
    converted.encode_special_tokens = True
    for text in texts:
        theirs, expected = converted.encode(text, add_special_tokens=False).ids, ours.encode(text)
        if theirs == expected:
            continue
        if scores and math.isclose(sum(scores[i] for i in theirs), sum(scores[i] for i in expected), rel_tol=1e-6):
            continue
        problem = "cannot be converted: its tokenizer.json would give other ids for some text"
        raise FileError(str(source), problem, "give an exact tokenizer.json with --tokenizer")
    converted.encode_special_tokens = False
