"""The origin of an indexed dataset: its tokenizer, input files and how documents end.

Datasets from other tools have no such file. The file is ignored if the dataset's files have changed
since, for example because another tool has replaced them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from megatron_tape.data.indexed_dataset import dataset_paths, origin_path
from megatron_tape.data.tokenizer import TokenizerRecord, difference
from megatron_tape.errors import FileError
from megatron_tape.io.files import fingerprint
from megatron_tape.io.records import read_record


class DatasetSource(TypedDict):
    """The input files of a dataset, and the options that choose its documents.

    The name of a file of the Hugging Face Hub includes the commit of the Hub's dataset.
    """

    inputs: list[str]
    text_key: str
    max_document_bytes: int
    max_documents: int | None


class Origin(TypedDict):
    """The contents of `P.origin`."""

    tokenizer: TokenizerRecord
    append_eod: bool
    """Whether every document ends in the tokenizer's end-of-document token."""
    files: dict[str, str]
    """Fingerprints of the dataset's files by suffix."""
    source: NotRequired[DatasetSource]
    """What `tools/preprocess_data.py` made the dataset from; a merge of datasets has none."""


def read_origin(prefix: str | Path) -> Origin | None:
    """Return the origin of a dataset, or None if it has none or its files have changed.

    Raises FileError if the record is malformed.
    """
    try:
        origin = read_record(origin_path(prefix), Origin)
    except FileNotFoundError:
        return None
    except FileError as error:
        raise FileError(
            error.subject,
            error.problem,
            f"remove that file, or preprocess the dataset {prefix} again",
        ) from None
    if origin["files"] == fingerprints_of(prefix):
        return origin
    return None


def fingerprints_of(prefix: str | Path) -> dict[str, str]:
    """Return the fingerprints of a dataset's existing files by suffix."""
    return {path.suffix: fingerprint(path) for path in dataset_paths(prefix) if path.is_file()}


def checked_origins(
    prefixes: Iterable[str], tokenizer: TokenizerRecord | None, name: str = ""
) -> dict[str, Origin | None]:
    """Return the datasets' origins by prefix, None for a dataset without one.

    Raises FileError if a dataset was made with a tokenizer other than `tokenizer`, which `name`
    describes in messages. If `tokenizer` is None, the datasets are compared with the first one that
    has an origin, and `name` is not used. The end-of-document token is compared only for datasets
    whose documents end in it.
    """
    origins = {prefix: read_origin(prefix) for prefix in prefixes}
    known = {prefix: origin for prefix, origin in origins.items() if origin is not None}
    ended = {prefix: origin for prefix, origin in known.items() if origin["append_eod"]}
    # First the ids of text in all datasets, then the end-of-document tokens.
    for compared, with_eod in ((known, False), (ended, True)):
        expected = tokenizer
        for prefix, origin in compared.items():
            if expected is None:
                expected = origin["tokenizer"]
                name = f"that of {prefix}"
            different = difference(origin["tokenizer"], expected, name, with_eod)
            if different is not None:
                raise FileError(
                    prefix,
                    f"was made with a tokenizer that {different}",
                    "preprocess the dataset again, or use the tokenizer that it was made with",
                )
    return origins


def unknown_tokenizers(origins: Mapping[str, Origin | None], name: str) -> str | None:
    """Return a warning about the datasets without an origin, or None.

    `name` describes the expected tokenizer.
    """
    unknown = [prefix for prefix, origin in origins.items() if origin is None]
    if not unknown:
        return None
    return (
        f"warning: {unknown[0]} does not record which tokenizer made it ({len(unknown)} of"
        f" {len(origins)} datasets do not); make sure that it was {name}"
    )


def common_origin(origins: Iterable[Origin | None]) -> dict | None:
    """Return the origin of the merge of datasets with the same tokenizer.

    Returns None if there are no datasets, or if one has no origin.
    """
    origins = list(origins)
    if not origins or None in origins:
        return None
    # If possible, the tokenizer of a dataset whose documents end in its end-of-document token. That
    # token was not compared for the other datasets, so it may differ.
    chosen = next((origin for origin in origins if origin["append_eod"]), origins[0])
    append_eod = all(origin["append_eod"] for origin in origins)
    return {"tokenizer": chosen["tokenizer"], "append_eod": append_eod}
