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
_TOKEN_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_SHOWN_CHARACTERS = 500
"""Maximum characters of a list of tokens in a message."""
_EXPORT_WITHOUT = "export the model without a tokenizer: --tokenizer none"
_GIVE_EXACT = f"give an exact tokenizer.json with --tokenizer, or {_EXPORT_WITHOUT}"
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
"""Types of SentencePiece pieces."""
_NO_MATCH_SCORE = -1e9
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
    # The files to write, by name. `hf_tokenizer` is the tokenizer in the format of the `tokenizers`
    # library.
    files = {name: content for name, content in tokenizer.files.items() if _is_exported(name)}
    with library_errors(source, "cannot be converted", _GIVE_EXACT):
        if TOKENIZER_JSON in files:
            hf_tokenizer, special_ids, settings = _from_tokenizer_json(tokenizer, context)
        else:
            hf_tokenizer, special_ids, settings = _from_sentencepiece(tokenizer, source, context)
            files[TOKENIZER_JSON] = hf_tokenizer.to_str(pretty=True).encode()
        # Of the special tokens that the settings name: those that exist, by key such as pad_token,
        # and a list of those that do not.
        token_by_key, missing_tokens = tokenizer.special_tokens.existing(hf_tokenizer.token_to_id)

    if missing_tokens:
        tokens = ", ".join(missing_tokens)[:_SHOWN_CHARACTERS]
        warn(f"warning: the export omits special tokens that {source} names but lacks: {tokens}")

    # In tokenizer_config.json, eos and bos are the tokens of the training. The tokenizer's own
    # settings name the others.
    for key, token in token_by_key.items():
        if key not in ("eos_token", "bos_token"):
            settings[key] = token
    if "pad_token" in token_by_key:
        special_ids["pad"] = hf_tokenizer.token_to_id(token_by_key["pad_token"])

    # From `added_tokens_decoder`, transformers reads the flags of added tokens.
    added = sorted(hf_tokenizer.get_added_tokens_decoder().items())
    settings["added_tokens_decoder"] = {
        str(i): {key: getattr(token, key) for key in _TOKEN_FLAGS} for i, token in added
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

    # The tokenizer is a SentencePiece model that has been converted.
    if TOKENIZER_JSON not in tokenizer.files:
        converted = load_tokenizer(output)
        # `load_tokenizer` adds settings that keep text from becoming special tokens.
        write_files(converted.files, output)
        _check_same_ids(converted, tokenizer, source)

    # For generation, the ids in generation_config.json take precedence.
    generation = _generation_config(tokenizer, source, warn)
    ids = {}
    for key, role in zip(SPECIAL_IDS, ("bos", "eos", "pad"), strict=True):
        ids[key] = generation.get(key)
        if ids[key] is None:
            ids[key] = special_ids.get(role)
    generation |= {key: value for key, value in ids.items() if value is not None}
    return ExportedTokenizer(tokenizer.vocab_size, ids, generation)


def export_problem(tokenizer: Tokenizer, context: int) -> str | None:
    """Return why `write_tokenizer` would refuse a tokenizer for a model with a context of `context`
    tokens, such as "cannot be converted: ...", or None.
    """
    source = "the tokenizer"
    try:
        with tempfile.TemporaryDirectory() as directory:
            write_tokenizer(tokenizer, Path(directory), context, source, lambda warning: None)
    except FileError as error:
        # The subject is the tokenizer, or one of its files.
        if error.subject == source:
            return error.problem
        return f"has a file {error.subject} that {error.problem}"
    return None


def _is_exported(name: str) -> bool:
    """Return whether an export includes the tokenizer file `name`. Other files could add tokens in
    transformers.
    """
    return name.startswith((TOKENIZER_JSON, TOKENIZER_MODEL, "chat_template.jinja", CHAT_TEMPLATES))


def _generation_config(tokenizer: Tokenizer, source: str, warn: Callable[[str], None]) -> dict:
    """Return the contents of `generation_config.json` without ids that the tokenizer lacks.

    Call `warn` about these. `source` names the tokenizer in messages. Raises FileError if the file
    is not a JSON object.
    """
    try:
        settings = parse_record(tokenizer.files.get(GENERATION, b"{}"), dict[str, Any])
    except ValueError as error:
        raise FileError(
            f"{GENERATION} of {source}", f"cannot be used: {error}", "save it again, or remove it"
        ) from None

    dropped = []
    # A copy of the keys, since the loop deletes some.
    for key in [key for key in settings if key.endswith("_token_id")]:
        value = settings[key]
        ids = value if isinstance(value, list) else [value]
        valid = [i for i in ids if i is None or i in range(tokenizer.vocab_size)]
        dropped += [f"{key} {i!r:.40}" for i in ids if i not in valid]
        if not valid:
            del settings[key]
        elif isinstance(value, list):
            settings[key] = valid

    if dropped:
        warn(
            f"warning: the export omits ids in {GENERATION} of {source} that do not exist:"
            f" {', '.join(dropped)[:_SHOWN_CHARACTERS]}"
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
    # Only AutoTokenizer can run a tokenizer's own code, or convert other files.
    if "auto_map" in settings or not (Path(directory) / TOKENIZER_JSON).is_file():
        return transformers.AutoTokenizer.from_pretrained(directory, **options)
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory, **options)


def _from_tokenizer_json(
    tokenizer: Tokenizer, context: int
) -> tuple[Any, dict[str, int | None], dict]:
    """Return a tokenizer of the `tokenizers` library, the ids of special tokens and the contents of
    a new tokenizer_config.json.

    `tokenizer` has a tokenizer.json. The ids have the keys `bos` and `eos`; an id is None if the
    tokenizer has no such token.
    """
    import tokenizers

    hf_tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer.files[TOKENIZER_JSON])
    special_ids = {"bos": tokenizer.bos, "eos": tokenizer.eod}
    token_by_key = {
        f"{role}_token": hf_tokenizer.id_to_token(index)
        for role, index in special_ids.items()
        if index is not None
    }
    original_settings = tokenizer.special_tokens.config
    if not original_settings:
        if unknown := getattr(hf_tokenizer.model, "unk_token", None):
            token_by_key["unk_token"] = unknown
        return hf_tokenizer, special_ids, _new_settings(context, token_by_key)

    settings = {
        key: value for key, value in original_settings.items() if not names_tokens(key, value)
    }
    settings.pop("auto_map", None)  # the code is not copied
    # Padding on the left is LlamaTokenizer's default, but not that of FROM_THE_FILE.
    if str(original_settings.get("tokenizer_class")).startswith("Llama"):
        settings.setdefault("padding_side", "left")
    # Other classes, such as GPT2Tokenizer, build a tokenizer from the vocabulary alone and ignore
    # the file's other steps.
    return hf_tokenizer, special_ids, settings | token_by_key | {"tokenizer_class": FROM_THE_FILE}


def _from_sentencepiece(
    tokenizer: Tokenizer, source: str, context: int
) -> tuple[Any, dict[str, int | None], dict]:
    """Convert a SentencePiece model. Return a tokenizer of the `tokenizers` library, the ids of
    special tokens and the contents of a new tokenizer_config.json.

    The ids have the keys `bos` and `eos`, and `unk` and `pad` if the model has these tokens. An id
    is None if the tokenizer has no such token. `source` names the tokenizer in messages. Raises
    FileError if transformers is not installed.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import processors

    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files[TOKENIZER_MODEL])
    try:
        converted = _convert_sentencepiece(model)
    except ImportError:
        raise FileError(
            source,
            "is a SentencePiece model, and converting it requires the package transformers",
            f"run: pip install transformers; or {_EXPORT_WITHOUT}",
        ) from None

    special_ids = {"bos": tokenizer.bos, "eos": tokenizer.eod}
    # SentencePiece gives the id -1 to a token that the model does not have.
    optional = {"unk": model.trainer_spec.unk_id, "pad": model.trainer_spec.pad_id}
    for role, index in optional.items():
        if index in range(tokenizer.vocab_size):
            special_ids[role] = index
    token_by_key = {
        f"{role}_token": converted.id_to_token(index)
        for role, index in special_ids.items()
        if index is not None
    }

    # In training, every text began with the token bos.
    if tokenizer.prefix_ids:
        bos_token = token_by_key["bos_token"]
        converted.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A",
            pair=f"{bos_token} $A {bos_token} $B",
            special_tokens=[(bos_token, tokenizer.bos)],
        )

    # Settings that do not concern the vocabulary.
    settings = _new_settings(context, token_by_key)
    original_settings = tokenizer.special_tokens.config
    for key in ("chat_template", "model_max_length", "padding_side", "split_special_tokens"):
        if key in original_settings:
            settings[key] = original_settings[key]
    return converted, special_ids, settings


def _convert_sentencepiece(model: Any) -> Any:
    """Return the tokenizer of the `tokenizers` library for a SentencePiece model (a `ModelProto`).

    Uses transformers' converter for the vocabulary and the merges only. Unlike in transformers' own
    conversion, text such as `<0x41>` does not become the token of that name, and a space is
    prepended to every text or to none, as in SentencePiece.
    """
    from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import SpmConverter, generate_merges

    # The names of special and byte tokens, such as <s> and <0x41>, must not match text. The list
    # also has user-defined tokens, which match text in SentencePiece; if this changes ids,
    # `_check_same_ids` refuses the tokenizer. A name of a single character cannot be cut below.
    pieces = model.pieces
    unmatched_names = [
        piece.piece for piece in pieces if piece.type != _NORMAL and len(piece.piece) > 1
    ]
    if model.trainer_spec.model_type == model.trainer_spec.UNIGRAM:
        scores = [
            (piece.piece, piece.score if piece.type == _NORMAL else _NO_MATCH_SCORE)
            for piece in pieces
        ]
        result = SpmConverter.build_tokenizer_from_spm_proto(model, scores)
        # A low score does not suffice: next to characters that no piece contains, such a piece
        # would still match. So the text is cut after the first character of each such name, for
        # example where `<(?=s>)` matches, for <s>.
        cuts = "|".join(
            f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in unmatched_names
        )
        result.pre_tokenizer = pre_tokenizers.Split(Regex(cuts), "merged_with_previous")
    else:
        ids = {piece.piece: index for index, piece in enumerate(pieces)}
        scores = [(piece.piece, piece.score) for piece in pieces]
        merges = generate_merges(ids, scores, skip_tokens=unmatched_names)
        result = SpmConverter.build_tokenizer_from_spm_proto(model, ids, merges)
        result.pre_tokenizer = None

    # "▁" stands for a space in pieces.
    spec = model.normalizer_spec
    normalizer_steps = []
    if spec.precompiled_charsmap:
        # NFKC comes first. In SentencePiece's maps, all rules for sequences of characters are those
        # of NFKC.
        normalizer_steps += [normalizers.NFKC(), normalizers.Precompiled(spec.precompiled_charsmap)]
    if spec.remove_extra_whitespaces:
        # SentencePiece removes spaces at both ends of a text, but its space symbol only at the end.
        normalizer_steps.append(normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""))
        normalizer_steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    decoder_steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        # With a space before it, the first word of a text has the same tokens as in a sentence.
        # In decoding, at most one space is removed at the beginning of a text, and none at its end.
        normalizer_steps.append(normalizers.Prepend("▁"))
        decoder_steps.append(decoders.Strip(" ", 1, 0))
    result.normalizer = normalizers.Sequence([*normalizer_steps, normalizers.Replace(" ", "▁")])
    result.decoder = decoders.Sequence(decoder_steps)

    special_names = [piece.piece for piece in pieces if piece.type in (_UNKNOWN, _CONTROL)]
    result.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in special_names]
    )
    return result


def _check_same_ids(converted: Tokenizer, tokenizer: Any, source: str) -> None:
    """Raise FileError if `converted` encodes a sample text to other ids than the SentencePiece
    model `tokenizer`. `source` names the tokenizer in messages.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files[TOKENIZER_MODEL])
    symbols = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    # After the samples come texts that could show differences: one with the name of a byte token,
    # and one for each user-defined symbol, within a word.
    texts = [*trial_texts(), "a <0x41> b", *(f"a{symbol}b" for symbol in symbols)]
    text = find_difference(tokenizer.encode, converted.encode, texts, tokenizer.scores)
    if text is not None:
        raise FileError(
            source,
            "cannot be converted: its tokenizer.json would give different ids for the text"
            f" {ascii(text):.100}",
            _GIVE_EXACT,
        )


def _new_settings(context: int, token_by_key: dict[str, str]) -> dict:
    """Return a tokenizer_config.json with these special tokens, such as `bos_token`, for a context
    of `context` tokens.
    """
    return {
        "tokenizer_class": FROM_THE_FILE,
        **token_by_key,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
