"""Write the files from which `AutoTokenizer` makes the tokenizer that a model was trained with, with the same ids.

A Hugging Face tokenizer is copied. A SentencePiece model becomes a `tokenizer.json` of the same pieces; before it is
written, it is checked on real text that both give the same ids. The `transformers` package is not needed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.data.special_tokens import CONFIG
from megatron_tape.data.tokenizer import (
    CHAT_TEMPLATES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    Tokenizer,
    load_tokenizer,
    write_files,
)
from megatron_tape.data.trial_texts import encodes_as, trial_texts
from megatron_tape.errors import FileError
from megatron_tape.io.records import parse_record, read_record

GENERATION = "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FROM_THE_FILE = "PreTrainedTokenizerFast"
"""The class of transformers that reads a tokenizer.json as it is."""
_ROLES = ("bos", "eos", "unk", "pad")
_SPACE = "▁"
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
    special_ids: dict[str, int | list[int] | None]
    """`bos_token_id`, `eos_token_id` and `pad_token_id`; a model may stop at several tokens."""
    generation: dict[str, Any]
    """What belongs in `generation_config.json`."""


def write_tokenizer(tokenizer: Tokenizer, output: Path, context: int, source: str) -> ExportedTokenizer:
    """Write the files of a tokenizer, of a model of `context` tokens, into the directory `output`.

    `source` names it in messages. Raises FileError if it cannot be converted exactly.
    """
    files = {name: content for name, content in tokenizer.files.items() if name != GENERATION}
    own = _settings(tokenizer.files, CONFIG, source)
    if TOKENIZER_JSON in files:
        special, settings = _of_hugging_face(tokenizer, own, context)
    else:
        converted, special, settings = _of_sentencepiece(tokenizer, own, source, context)
        files[TOKENIZER_JSON] = converted
    templates = "chat_template.jinja" in files or any(name.startswith(CHAT_TEMPLATES) for name in files)
    if not (templates or settings.get("chat_template")):
        # No text that the model learned from encoded to a special token. A chat template consists of such text.
        settings["split_special_tokens"] = True
    files[CONFIG] = _json(settings)
    write_files(files, output)
    if TOKENIZER_JSON not in tokenizer.files:
        write_files(load_tokenizer(output).files, output)  # which keep text from encoding to special tokens
    ids = {f"{role}_token_id": special.get(role) for role in ("bos", "eos", "pad")}
    generation = _settings(tokenizer.files, GENERATION, source)
    ids |= {key: generation[key] for key in ids if _is_ids(generation.get(key), tokenizer.vocab_size)}
    return ExportedTokenizer(
        tokenizer.vocab_size, ids, generation | {key: value for key, value in ids.items() if value is not None}
    )


def _settings(files: dict[str, bytes], name: str, source: str) -> dict[str, Any]:
    try:
        return parse_record(files.get(name, b"{}"), dict[str, Any])
    except ValueError as error:
        raise FileError(f"{name} of {source}", f"cannot be used: {error}", "save it again, or remove it") from None


def _json(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def _is_ids(value: Any, vocab_size: int) -> bool:
    ids = value if isinstance(value, list) else [value]
    return bool(ids) and all(type(index) is int and 0 <= index < vocab_size for index in ids)


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


def _of_hugging_face(
    tokenizer: Tokenizer, own: dict[str, Any], context: int
) -> tuple[dict[str, int | None], dict[str, Any]]:
    """Return the ids of special tokens, and `tokenizer_config.json`."""
    import tokenizers

    library = tokenizers.Tokenizer.from_buffer(tokenizer.files[TOKENIZER_JSON])
    special = {"bos": tokenizer.bos, "eos": tokenizer.eod}
    pad = own.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    special["pad"] = library.token_to_id(pad) if isinstance(pad, str) else None
    named = {
        f"{role}_token": library.id_to_token(special[role]) for role in ("bos", "eos") if special[role] is not None
    }
    if not own:
        unknown = getattr(library.model, "unk_token", None)
        return special, _new_settings(context, named | ({"unk_token": unknown} if unknown else {}))
    # Classes such as GPT2Tokenizer make another tokenizer from the vocabulary, without the file's own steps.
    padding = {"padding_side": "left"} if str(own.get("tokenizer_class")).startswith("Llama") else {}
    settings = padding | named | own | {"tokenizer_class": FROM_THE_FILE}
    settings.pop("auto_map", None)  # of code that is not copied
    return special, settings


def _of_sentencepiece(
    tokenizer: Tokenizer, own: dict[str, Any], source: str, context: int
) -> tuple[bytes, dict[str, int | None], dict[str, Any]]:
    """Return `tokenizer.json`, the ids of special tokens, and `tokenizer_config.json`."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, processors

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(tokenizer.files[TOKENIZER_MODEL])
    converted, special = _converted(model, source)
    special |= {"bos": tokenizer.bos, "eos": tokenizer.eod}
    for token, index in sorted(tokenizer.added.items(), key=lambda item: item[1]):
        if converted.get_vocab_size() != index:
            problem = f"cannot be converted: it adds {token!r} with the id {index}, and the one before is missing"
            raise FileError(source, problem, "give an exact tokenizer.json with --tokenizer")
        converted.add_special_tokens([AddedToken(token, normalized=False, special=True)])
    texts = [*trial_texts(), *(f"a{piece.piece}b" for piece in model.pieces if piece.type == _USER_DEFINED)]
    texts += [f"a {token}b" for token in tokenizer.added]
    scores = (
        [piece.score for piece in model.pieces] if model.trainer_spec.model_type == model.trainer_spec.UNIGRAM else None
    )
    _try_out(converted, tokenizer, source, texts, scores)
    names = {role: converted.id_to_token(index) for role, index in special.items() if index is not None and index >= 0}
    if tokenizer.prefix:
        begin = names["bos"]
        converted.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.bos)]
        )
    settings = _new_settings(context, {f"{role}_token": token for role, token in names.items()})
    kept = ("chat_template", "model_max_length", "padding_side")
    settings |= {key: own[key] for key in kept if key in own}
    pad = own.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    if isinstance(pad, str) and converted.token_to_id(pad) is not None:
        settings["pad_token"], special["pad"] = pad, converted.token_to_id(pad)
    return converted.to_str(pretty=True).encode(), dict(special), settings


def _new_settings(context: int, named: dict[str, str]) -> dict[str, Any]:
    return {
        "tokenizer_class": FROM_THE_FILE,
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def _converted(model, source: str):
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
        raise FileError(source, problem, "only BPE and unigram are exported")
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


def _try_out(converted, ours: Tokenizer, source: str, texts: list[str], scores: list[float] | None) -> None:
    """Raise FileError if the converted tokenizer gives other ids than ours."""
    converted.encode_special_tokens = True
    if not encodes_as(ours.encode, lambda text: converted.encode(text, add_special_tokens=False).ids, texts, scores):
        problem = "cannot be converted: its tokenizer.json would give other ids for some text"
        raise FileError(source, problem, "give an exact tokenizer.json with --tokenizer")
    converted.encode_special_tokens = False
