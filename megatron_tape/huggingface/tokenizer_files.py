"""Write the files from which `AutoTokenizer` makes the tokenizer that a model was trained with, with the same ids.

A Hugging Face tokenizer is copied. A SentencePiece model becomes a `tokenizer.json` of the same pieces; before it is
written, it is checked on real text that both give the same ids. The `transformers` package is not needed.
"""

import json
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.data.special_tokens import CONFIG
from megatron_tape.data.tokenizer import (
    CHAT_TEMPLATES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    Tokenizer,
    library_errors,
    load_tokenizer,
    write_files,
)
from megatron_tape.data.trial_texts import encodes_as, trial_texts
from megatron_tape.errors import FileError
from megatron_tape.huggingface.from_sentencepiece import USER_DEFINED, WITHOUT, convert
from megatron_tape.io.records import parse_record, read_record

GENERATION = "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FROM_THE_FILE = "PreTrainedTokenizerFast"
"""The class of transformers that reads a tokenizer.json as it is."""
_NAMED = (
    *(f"{role}_token" for role in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")),
    "additional_special_tokens",
    "extra_special_tokens",
)
_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_MAP = "special_tokens_map.json"
_SHOWN = 10
_GIVE = f"give an exact tokenizer.json with --tokenizer, or {WITHOUT}"
_QWENS_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWENS_STEPS = [
    {"type": "Split", "pattern": {"Regex": _QWENS_SPLIT}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
]


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
    exported, warnings = _write(tokenizer, output, context, source)
    for warning in warnings:
        command_line.say(f"warning: {warning}")
    return exported


def export_problem(tokenizer: Tokenizer, context: int) -> str | None:
    """Return why `write_tokenizer` would refuse a tokenizer, as a clause that follows its name, or None."""
    source = "the tokenizer"
    try:
        with tempfile.TemporaryDirectory() as directory:
            _write(tokenizer, Path(directory), context, source)
    except FileError as error:
        return error.problem if error.subject == source else f"has a file {error.subject}, which {error.problem}"
    return None


def _write(tokenizer: Tokenizer, output: Path, context: int, source: str) -> tuple[ExportedTokenizer, list[str]]:
    """Write the files; return also what the user must know."""
    warnings: list[str] = []
    files = {name: content for name, content in tokenizer.files.items() if _is_exported(name)}
    own = _settings(tokenizer.files, CONFIG, source)
    with library_errors(source, "cannot be converted", _GIVE):
        if TOKENIZER_JSON in files:
            library, special, settings = _of_hugging_face(tokenizer, own, context)
        else:
            library, special, settings = _of_sentencepiece(tokenizer, own, source, context, warnings)
            files[TOKENIZER_JSON] = library.to_str(pretty=True).encode()
        named, missing = _named_tokens(own | _unless_in(own, _settings(tokenizer.files, _MAP, source)), library)
    if missing:
        tokens = _some(missing)
        warnings.append(f"{source} names special tokens that it does not have, which the export leaves out: {tokens}")
    settings |= _unless_in({"eos_token", "bos_token"}, named)
    special["pad"] = library.token_to_id(_content(named["pad_token"])) if "pad_token" in named else special.get("pad")
    added = sorted(library.get_added_tokens_decoder().items())
    settings["added_tokens_decoder"] = {str(i): {key: getattr(token, key) for key in _FLAGS} for i, token in added}
    templates = "chat_template.jinja" in files or any(name.startswith(CHAT_TEMPLATES) for name in files)
    if not (templates or settings.get("chat_template")):
        # No text that the model learned from encoded to a special token. A chat template consists of such text.
        settings["split_special_tokens"] = True
    files[CONFIG] = _json(settings)
    write_files(files, output)
    if TOKENIZER_JSON not in tokenizer.files:
        write_files(load_tokenizer(output).files, output)  # which keep text from encoding to special tokens
    ids = {f"{role}_token_id": special.get(role) for role in ("bos", "eos", "pad")}
    generation = _generation(tokenizer, source, warnings)
    ids |= {key: generation[key] for key in ids if generation.get(key) is not None}
    generation |= {key: value for key, value in ids.items() if value is not None}
    return ExportedTokenizer(tokenizer.vocab_size, ids, generation), warnings


def _is_exported(name: str) -> bool:
    """Return whether an export has this file. transformers would read further tokens from others."""
    return name in (TOKENIZER_JSON, TOKENIZER_MODEL, "chat_template.jinja") or name.startswith(CHAT_TEMPLATES)


def _content(token: Any) -> Any:
    """Return the text of a token, which files give as text or with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _unless_in(excluded: Collection[str], settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in excluded}


def _named_tokens(settings: dict[str, Any], library: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the special tokens that settings name and that exist, and those that do not exist."""
    missing: list[str] = []

    def exists(token: Any) -> bool:
        text = _content(token)
        known = isinstance(text, str) and library.token_to_id(text) is not None
        if not known:
            missing.append(f"{text!r:.100}")
        return known

    named: dict[str, Any] = {}
    for key in _NAMED:
        value = settings.get(key)
        if isinstance(value, dict) and key == "extra_special_tokens":
            named[key] = {name: _content(token) for name, token in value.items() if exists(token)}
        elif isinstance(value, list):
            named[key] = [_content(token) for token in value if exists(token)]
        elif value is not None and exists(value):
            named[key] = _content(value)
    return named, list(dict.fromkeys(missing))


def _generation(tokenizer: Tokenizer, source: str, warnings: list[str]) -> dict[str, Any]:
    """Return `generation_config.json` without ids that the tokenizer does not have."""
    settings, dropped, end = _settings(tokenizer.files, GENERATION, source), [], tokenizer.vocab_size
    for key, value in list(settings.items()):
        if not key.endswith("_token_id") or value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        good = [index for index in ids if type(index) is int and index in range(end)]
        dropped += [f"{key} {index!r:.40}" for index in ids if type(index) is not int or index not in range(end)]
        if not good:
            del settings[key]
        elif isinstance(value, list):
            settings[key] = good
    if dropped:
        ids = _some(dropped)
        warnings.append(f"{GENERATION} of {source} names ids that do not exist, which the export leaves out: {ids}")
    return settings


def _settings(files: dict[str, bytes], name: str, source: str) -> dict[str, Any]:
    try:
        return parse_record(files.get(name, b"{}"), dict[str, Any])
    except ValueError as error:
        raise FileError(f"{name} of {source}", f"cannot be used: {error}", "save it again, or remove it") from None


def _some(texts: Sequence[str]) -> str:
    """Return texts joined for a message; of many, only the first ones."""
    rest = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")


def _json(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def read_tokenizer(directory: str | Path, **options: Any) -> Any:
    """Return the tokenizer of an export, or of another model, as transformers loads it with these `options`.

    AutoTokenizer would replace that of every Qwen2 model by Qwen's.
    """
    import transformers

    kind, file = transformers.AutoTokenizer, Path(directory) / CONFIG
    if (Path(directory) / TOKENIZER_JSON).is_file():
        settings = read_record(file, dict[str, Any]) if file.is_file() else {}
        kind = kind if "auto_map" in settings else transformers.PreTrainedTokenizerFast
    return kind.from_pretrained(directory, **options)


def is_qwens(directory: Path) -> bool:
    """Return whether a tokenizer.json is like that which transformers puts in place of every Qwen2 model's."""
    settings = read_record(directory / TOKENIZER_JSON, dict[str, Any])
    found = settings.get("pre_tokenizer") or {}
    steps = [_unless_in(("trim_offsets",), step) for step in found.get("pretokenizers") or ()]
    normal = (settings.get("normalizer") or {}).get("type") == "NFC"
    has_end = any(token.get("content") == "<|endoftext|>" for token in settings.get("added_tokens") or ())
    return normal and has_end and steps == _QWENS_STEPS


def _of_hugging_face(
    tokenizer: Tokenizer, own: dict[str, Any], context: int
) -> tuple[Any, dict[str, int | None], dict[str, Any]]:
    """Return the library's tokenizer, the ids of special tokens, and `tokenizer_config.json`."""
    import tokenizers

    library = tokenizers.Tokenizer.from_buffer(tokenizer.files[TOKENIZER_JSON])
    special = {"bos": tokenizer.bos, "eos": tokenizer.eod}
    named = {f"{role}_token": library.id_to_token(index) for role, index in special.items() if index is not None}
    if not own:
        unknown = getattr(library.model, "unk_token", None)
        return library, special, _new_settings(context, named | ({"unk_token": unknown} if unknown else {}))
    # Classes such as GPT2Tokenizer make another tokenizer from the vocabulary, without the file's own steps.
    padding = {"padding_side": "left"} if str(own.get("tokenizer_class")).startswith("Llama") else {}
    settings = padding | _unless_in(_NAMED, own) | named | {"tokenizer_class": FROM_THE_FILE}
    settings.pop("auto_map", None)  # of code that is not copied
    return library, special, settings


def _of_sentencepiece(
    tokenizer: Any, own: dict[str, Any], source: str, context: int, warnings: list[str]
) -> tuple[Any, dict[str, int | None], dict[str, Any]]:
    """Return the library's tokenizer, the ids of special tokens, and `tokenizer_config.json`."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, processors

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(tokenizer.files[TOKENIZER_MODEL])
    converted, special, wrong = convert(model, source)
    special |= {"bos": tokenizer.bos, "eos": tokenizer.eod}
    for token, index in sorted(tokenizer.added.items(), key=lambda item: item[1]):
        if converted.get_vocab_size() != index:
            problem = f"cannot be converted: it adds {token!r:.100} with the id {index}, and the one before is missing"
            raise FileError(source, problem, _GIVE)
        converted.add_special_tokens([AddedToken(token, normalized=False, special=True)])
    warnings += _try_out(converted, tokenizer, model, wrong, source)
    names = {role: converted.id_to_token(index) for role, index in special.items() if index is not None and index >= 0}
    if tokenizer.prefix:
        begin = names["bos"]
        converted.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.bos)]
        )
    settings = _new_settings(context, {f"{role}_token": token for role, token in names.items()})
    kept = ("chat_template", "model_max_length", "padding_side")
    return converted, dict(special), settings | {key: own[key] for key in kept if key in own}


def _new_settings(context: int, named: dict[str, str]) -> dict[str, Any]:
    return {
        "tokenizer_class": FROM_THE_FILE,
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def _try_out(converted: Any, ours: Any, model: Any, wrong: list[str], source: str) -> list[str]:
    """Raise FileError if the converted tokenizer gives other ids than ours; return warnings of rare differences."""
    symbols = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    texts = [*trial_texts(), "a <0x41> b", *(f"a {token}b" for token in ours.added)]
    texts += [text for symbol in symbols for text in (symbol, f"a{symbol}b", f" {symbol}  {symbol} b", f"a {symbol}")]
    unigram = model.trainer_spec.model_type == model.trainer_spec.UNIGRAM
    scores = [piece.score for piece in model.pieces] if unigram else None
    converted.encode_special_tokens = True

    def theirs(text: str) -> list[int]:
        return converted.encode(text, add_special_tokens=False).ids

    if not encodes_as(ours.encode, theirs, texts, scores):
        raise FileError(source, "cannot be converted: its tokenizer.json would give other ids for some text", _GIVE)
    warnings = []
    if wrong:
        known = f"({len(wrong):,} are known, such as {ascii(min(wrong)):.100})"
        warnings.append(f"transformers will read rare sequences of characters {known} in another way than {source}")
    if not encodes_as(ours.encode, theirs, texts):
        likely = "into other pieces that are equally likely"
        warnings.append(f"transformers will divide some texts, such as lines of dashes, {likely} for {source}")
    converted.encode_special_tokens = False
    return warnings
