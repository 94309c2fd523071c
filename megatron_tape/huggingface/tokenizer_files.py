"""Write tokenizer files that `AutoTokenizer` loads, with the same ids as in training.

A Hugging Face tokenizer is copied. A SentencePiece model is converted to a `tokenizer.json` with
transformers, and both must give the same ids for sample texts.
"""

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.data.special_tokens import CONFIG, names_tokens
from megatron_tape.data.tokenizer import (
    CHAT_TEMPLATES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    Tokenizer,
    library_errors,
    load_tokenizer,
    write_files,
)
from megatron_tape.data.trial_texts import find_difference, trial_texts
from megatron_tape.errors import FileError
from megatron_tape.io.records import parse_record, read_record

GENERATION = "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FROM_THE_FILE = "PreTrainedTokenizerFast"
"""The class of transformers that uses a tokenizer.json unchanged."""
_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_SHOWN = 500
"""Maximum characters of a list of tokens in a message."""
_WITHOUT = "export the model without a tokenizer: --tokenizer none"
_GIVE = f"give an exact tokenizer.json with --tokenizer, or {_WITHOUT}"
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
"""Types of SentencePiece pieces."""
_NEVER = -1e9
"""Score of a SentencePiece piece that must not match text."""


@dataclass(frozen=True)
class ExportedTokenizer:
    """Properties of an exported tokenizer that the export's other files contain."""

    vocab_size: int
    special_ids: dict[str, int | list[int] | None]
    """`bos_token_id`, `eos_token_id` (there may be several) and `pad_token_id`."""
    generation: dict[str, Any]
    """Contents of `generation_config.json`."""


def write_tokenizer(
    tokenizer: Tokenizer,
    output: Path,
    context: int,
    source: str,
    warn: Callable[[str], None] = command_line.log,
) -> ExportedTokenizer:
    """Write the files of a tokenizer to the directory `output`, for a model with a context of
    `context` tokens.

    `source` names the tokenizer in messages, and `warn` prints warnings. Raises FileError if it
    cannot be converted exactly.
    """
    files = {name: content for name, content in tokenizer.files.items() if _is_exported(name)}
    with library_errors(source, "cannot be converted", _GIVE):
        if TOKENIZER_JSON in files:
            library, special, settings = _of_hugging_face(tokenizer, context)
        else:
            library, special, settings = _of_sentencepiece(tokenizer, source, context)
            files[TOKENIZER_JSON] = library.to_str(pretty=True).encode()
        named, missing = tokenizer.names.existing(library.token_to_id)

    if missing:
        tokens = ", ".join(missing)[:_SHOWN]
        warn(f"warning: the export omits special tokens that {source} names but lacks: {tokens}")

    for key, token in named.items():
        if key not in ("eos_token", "bos_token"):
            settings[key] = token
    if "pad_token" in named:
        special["pad"] = library.token_to_id(named["pad_token"])

    added = sorted(library.get_added_tokens_decoder().items())
    settings["added_tokens_decoder"] = {
        str(i): {key: getattr(token, key) for key in _FLAGS} for i, token in added
    }
    has_template = bool(settings.get("chat_template")) or any(
        name.startswith(("chat_template.jinja", CHAT_TEMPLATES)) for name in files
    )
    if not has_template:
        # In training, no text was encoded as a special token. Only chat templates contain special
        # tokens as text.
        settings["split_special_tokens"] = True
    files[CONFIG] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    write_files(files, output)

    if TOKENIZER_JSON not in tokenizer.files:
        converted = load_tokenizer(output)
        # With the settings that keep text from becoming special tokens.
        write_files(converted.files, output)
        _check_same_ids(converted, tokenizer, source)

    generation = _generation(tokenizer, source, warn)
    ids = {}
    for key, role in zip(SPECIAL_IDS, ("bos", "eos", "pad"), strict=True):
        ids[key] = generation.get(key)
        if ids[key] is None:
            ids[key] = special.get(role)
    generation |= {key: value for key, value in ids.items() if value is not None}
    return ExportedTokenizer(tokenizer.vocab_size, ids, generation)


def export_problem(tokenizer: Tokenizer, context: int) -> str | None:
    """Return why `write_tokenizer` would refuse a tokenizer, such as "cannot be converted: ...", or
    None.
    """
    source = "the tokenizer"
    try:
        with tempfile.TemporaryDirectory() as directory:
            write_tokenizer(tokenizer, Path(directory), context, source, lambda warning: None)
    except FileError as error:
        if error.subject == source:
            return error.problem
        return f"has a file {error.subject} that {error.problem}"
    return None


def _is_exported(name: str) -> bool:
    """Return whether an export includes the file `name`. Other files could add tokens in
    transformers.
    """
    return name.startswith((TOKENIZER_JSON, TOKENIZER_MODEL, "chat_template.jinja", CHAT_TEMPLATES))


def _generation(tokenizer: Tokenizer, source: str, warn: Callable[[str], None]) -> dict:
    """Return the contents of `generation_config.json` without ids that the tokenizer lacks."""
    try:
        settings = parse_record(tokenizer.files.get(GENERATION, b"{}"), dict[str, Any])
    except ValueError as error:
        raise FileError(
            f"{GENERATION} of {source}", f"cannot be used: {error}", "save it again, or remove it"
        ) from None

    dropped = []
    for key in [key for key in settings if key.endswith("_token_id")]:
        value = settings[key]
        several = value if isinstance(value, list) else [value]
        valid = [i for i in several if i is None or i in range(tokenizer.vocab_size)]
        dropped += [f"{key} {i!r:.40}" for i in several if i not in valid]
        if not valid:
            del settings[key]
        elif isinstance(value, list):
            settings[key] = valid

    if dropped:
        warn(
            f"warning: the export omits ids in {GENERATION} of {source} that do not exist:"
            f" {', '.join(dropped)[:_SHOWN]}"
        )
    return settings


def read_tokenizer(directory: str | Path, **options: Any) -> Any:
    """Load the tokenizer of an export, or of another model, with transformers; `options` are for
    `from_pretrained`.

    Uses a tokenizer.json unchanged: AutoTokenizer would replace the tokenizer of every Qwen2 model
    by Qwen's.
    """
    import transformers

    file = Path(directory) / CONFIG
    settings = read_record(file, dict[str, Any]) if file.is_file() else {}
    if "auto_map" in settings or not (Path(directory) / TOKENIZER_JSON).is_file():
        return transformers.AutoTokenizer.from_pretrained(directory, **options)
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory, **options)


def _of_hugging_face(tokenizer: Tokenizer, context: int) -> tuple[Any, dict[str, int | None], dict]:
    """Return a tokenizer of the `tokenizers` library, the ids of special tokens and a new
    tokenizer_config.json.

    `tokenizer` has a tokenizer.json.
    """
    import tokenizers

    library = tokenizers.Tokenizer.from_buffer(tokenizer.files[TOKENIZER_JSON])
    special = {"bos": tokenizer.bos, "eos": tokenizer.eod}
    named = {
        f"{role}_token": library.id_to_token(index)
        for role, index in special.items()
        if index is not None
    }
    own = tokenizer.names.config
    if not own:
        if unknown := getattr(library.model, "unk_token", None):
            named["unk_token"] = unknown
        return library, special, _new_settings(context, named)

    settings = {key: value for key, value in own.items() if not names_tokens(key, value)}
    settings.pop("auto_map", None)  # the code is not copied
    # Classes such as GPT2Tokenizer build another tokenizer from the vocabulary and ignore the
    # file's other steps.
    if str(own.get("tokenizer_class")).startswith("Llama"):
        settings.setdefault("padding_side", "left")
    return library, special, settings | named | {"tokenizer_class": FROM_THE_FILE}


def _of_sentencepiece(
    tokenizer: Tokenizer, source: str, context: int
) -> tuple[Any, dict[str, int | None], dict]:
    """Convert a SentencePiece model; return the same as `_of_hugging_face`."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import processors

    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files[TOKENIZER_MODEL])
    try:
        converted = _converted(model)
    except ImportError:
        raise FileError(
            source,
            "is a SentencePiece model, and converting it requires the package transformers",
            f"run: pip install transformers; or {_WITHOUT}",
        ) from None

    special = {"bos": tokenizer.bos, "eos": tokenizer.eod}
    optional = {"unk": model.trainer_spec.unk_id, "pad": model.trainer_spec.pad_id}
    for role, index in optional.items():
        if index in range(tokenizer.vocab_size):
            special[role] = index
    named = {
        f"{role}_token": converted.id_to_token(index)
        for role, index in special.items()
        if index is not None
    }

    if tokenizer.prefix:
        begin = named["bos_token"]
        converted.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B",
            special_tokens=[(begin, tokenizer.bos)],
        )

    settings = _new_settings(context, named)
    own = tokenizer.names.config
    for key in ("chat_template", "model_max_length", "padding_side", "split_special_tokens"):
        if key in own:
            settings[key] = own[key]
    return converted, special, settings


def _converted(model: Any) -> Any:
    """Convert a SentencePiece model to a tokenizer of the `tokenizers` library with transformers'
    converter.

    Unlike in transformers' own conversion, text such as `<0x41>` does not become the token of that
    name, and a space is prepended to every text or to none, as in SentencePiece.
    """
    from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import SpmConverter, generate_merges

    pieces = model.pieces
    never = [piece.piece for piece in pieces if piece.type != _NORMAL and len(piece.piece) > 1]
    if model.trainer_spec.model_type == model.trainer_spec.UNIGRAM:
        scores = [
            (piece.piece, piece.score if piece.type == _NORMAL else _NEVER) for piece in pieces
        ]
        result = SpmConverter.build_tokenizer_from_spm_proto(model, scores)
        # A low score does not suffice: next to characters that no piece contains, such a piece
        # would still match.
        cuts = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in never)
        result.pre_tokenizer = pre_tokenizers.Split(Regex(cuts), "merged_with_previous")
    else:
        ids = {piece.piece: index for index, piece in enumerate(pieces)}
        scores = [(piece.piece, piece.score) for piece in pieces]
        merges = generate_merges(ids, scores, skip_tokens=never)
        result = SpmConverter.build_tokenizer_from_spm_proto(model, ids, merges)
        result.pre_tokenizer = None

    rules = model.normalizer_spec
    steps = []
    if rules.precompiled_charsmap:  # SentencePiece's rules for character sequences are all NFKC
        steps += [normalizers.NFKC(), normalizers.Precompiled(rules.precompiled_charsmap)]
    if rules.remove_extra_whitespaces:
        # SentencePiece removes its space symbol at the end, but not at the beginning.
        steps.append(normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    result.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    result.decoder = decoders.Sequence(back)
    special = [piece.piece for piece in pieces if piece.type in (_UNKNOWN, _CONTROL)]
    result.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in special]
    )
    return result


def _check_same_ids(converted: Tokenizer, tokenizer: Any, source: str) -> None:
    """Raise FileError if `converted` encodes a sample text to other ids than the SentencePiece
    model `tokenizer`.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files[TOKENIZER_MODEL])
    symbols = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    texts = [*trial_texts(), "a <0x41> b", *(f"a{symbol}b" for symbol in symbols)]
    text = find_difference(tokenizer.encode, converted.encode, texts, tokenizer.scores)
    if text is not None:
        raise FileError(
            source,
            "cannot be converted: its tokenizer.json would give different ids for the text"
            f" {ascii(text):.100}",
            _GIVE,
        )


def _new_settings(context: int, named: dict[str, str]) -> dict:
    return {
        "tokenizer_class": FROM_THE_FILE,
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
