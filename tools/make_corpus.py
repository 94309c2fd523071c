"""Write a text corpus as JSON lines, one document per line: {"text": ...}.

    python tools/make_corpus.py stdlib --output data/stdlib.jsonl
    python tools/make_corpus.py folders ~/project --suffixes .py .md --output data/project.jsonl
    python tools/make_corpus.py hub allenai/c4 --config-name en --streaming --max-documents 9999 --output data/c4.jsonl
    python tools/make_corpus.py hub json --data-files 'raw/*.jsonl.gz' --text-key content --output data/raw.jsonl

stdlib: the source code of this Python's standard library, 31 MB of real text that every machine has.
folders: one long document for each folder of a directory, such as a repository, made of the folder's files.
hub: a dataset of the Hugging Face Hub, its local directory, or a format (json, parquet, text) with --data-files. Each
text file is one document.

Documents that are too large or not valid UTF-8 are skipped, because preprocess_data.py would refuse them. The output
appears only when it is complete.
"""

import argparse
import contextlib
import io
import json
import os
import random
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.data.documents import LONE_SURROGATE, Problems, document_bytes_option
from megatron_tape.data.raw_chunks import TooLarge
from megatron_tape.errors import ConfigError, FileError, UserError
from megatron_tape.io.files import atomic_output

_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


def main() -> None:
    """Parse the command line and write the corpus."""
    arguments = parser().parse_args()
    # Open the output first, so that an existing one is rejected before anything is downloaded.
    with atomic_output(arguments.output, overwrite=arguments.overwrite) as file:
        total, limit = None, arguments.max_document_bytes
        if arguments.source == "stdlib":
            records = standard_library(arguments.shuffle)
        elif arguments.source == "folders":
            records = folders(arguments.directory, arguments.suffixes, arguments.shuffle)
        else:
            records, total = hub_texts(arguments), arguments.max_documents
        progress, problems = command_line.Progress(total), Problems()
        count = size = 0
        for number, record in enumerate(records, start=1):
            try:
                line = json.dumps(record, ensure_ascii=False).encode()
                problem = str(TooLarge(limit)) if len(line) > limit else None
            except UnicodeEncodeError:
                problem = LONE_SURROGATE
            if problem is not None:
                problems.add(problem, record.get("path", f"text {number:,}"))
                continue
            size += file.write(line + b"\n")
            count += 1
            progress.update(count, lambda _: f"{count:,} documents, {size / 1e6:,.1f} MB")  # noqa: B023
            if count == total:
                break
        progress.end()
        for sentence in problems.report():
            command_line.log(sentence)
        if not count:
            raise FileError(arguments.source, "gives no document that can be written", "give another source")
    command_line.log(f"{arguments.output}: {count:,} documents, {size / 1e6:,.1f} MB")


def standard_library(seed: int | None = None) -> Iterator[dict[str, str]]:
    """Yield {"text", "path"} of the standard library's non-empty modules and tests.

    They are sorted by path, or shuffled with the seed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in _in_order(files, seed):
        if _EXCLUDED.isdisjoint(name.split("/")) and (text := _source(files[name])):
            yield {"text": text, "path": name}


def folders(root: Path, suffixes: Sequence[str], seed: int | None = None) -> Iterator[dict[str, str]]:
    """Yield {"text", "path"} of `root` and each folder below it; the text joins its files with one of the suffixes.

    The files are sorted by name, and each follows a line with its path. Hidden folders, installed packages, and files
    that are not text are skipped. The folders are sorted by path, or shuffled with the seed. Raises OSError if a folder
    or file cannot be read.
    """
    if not root.is_dir():
        raise FileError(str(root), "is not a directory", "give the folder with the files")
    files: dict[str, list[Path]] = {}
    for place, below, names in os.walk(root, onerror=_raise):
        below[:] = [name for name in below if not name.startswith(".") and name not in _EXCLUDED]
        found = [Path(place, name) for name in sorted(names) if name.endswith(tuple(suffixes))]
        if found := [path for path in found if path.is_file()]:
            files[Path(place).relative_to(root).as_posix()] = found
    if not files:
        raise FileError(str(root), f"has no files that end in {' or '.join(suffixes)}", "choose others with --suffixes")
    for folder in _in_order(files, seed):
        texts = []
        for path in files[folder]:
            name, text = path.relative_to(root).as_posix(), _source(path)
            if text is None:
                command_line.log(f"{name} is not text and is skipped")
            elif text:
                texts.append(f"# {name}\n{text}")
        if texts:
            yield {"text": "\n".join(texts), "path": folder}


def _raise(error: OSError) -> None:
    raise error


def _in_order(names: Iterable[str], seed: int | None) -> list[str]:
    ordered = sorted(names)
    if seed is not None:
        random.Random(seed).shuffle(ordered)
    return ordered


def _source(path: Path) -> str | None:
    """Return a file's text, or None if it cannot be decoded, like some tests of the standard library."""
    raw = path.read_bytes()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0] if path.suffix == ".py" else "utf-8-sig"
        return raw.decode(encoding)
    except (LookupError, SyntaxError, UnicodeError):
        return None


def hub_texts(arguments: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield {"text"} of a dataset's rows, except for empty texts. Raises UserError if the dataset cannot be read."""
    import datasets

    command_line.log(f"opening {arguments.name} ...")
    # A text file is one document, as in preprocess_data.py; datasets of the Hub define their own documents.
    options = {"sample_by": "document"} if arguments.name == "text" else {}
    with _library_errors(arguments.name, "opened", "check name, --config-name and --split"):
        rows = datasets.load_dataset(
            arguments.name,
            arguments.config_name,
            split=arguments.split,
            streaming=arguments.streaming,
            data_files=arguments.data_files,
            **options,
        )
    if rows.column_names is not None and arguments.text_key not in rows.column_names:
        problem = f"is {arguments.text_key!r}, but {arguments.name} has only the columns {rows.column_names}"
        raise ConfigError("--text-key", problem, "choose one of them")
    with _library_errors(arguments.name, "read", "repair or download it again"):
        for number, row in enumerate(rows, start=1):
            text = row.get(arguments.text_key)
            if not isinstance(text, str):
                problem = f"is {arguments.text_key!r}, but row {number} has no text there ({type(text).__name__})"
                raise ConfigError("--text-key", problem, "choose another column")
            if text:
                yield {"text": text}


@contextlib.contextmanager
def _library_errors(name: str, action: str, fix: str) -> Iterator[None]:
    """Within the context, convert errors of `datasets` into FileError: `name` cannot be `action`, such as "opened"."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise FileError(name, f"cannot be {action} ({reason})", fix) from error


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    sources = result.add_subparsers(dest="source", required=True)
    stdlib = sources.add_parser("stdlib", help="the Python standard library's source code")
    directory = sources.add_parser("folders", help="the files of a directory, one document for each folder")
    directory.add_argument("directory", type=Path, help="the directory with the folders, such as a repository")
    suffixes = {"nargs": "+", "type": str, "metavar": "SUFFIX", "default": [".py", ".md"]}
    directory.add_argument(
        "--suffixes", **suffixes, help="use files whose names end in one of these (default: .py .md)"
    )
    shuffle = "shuffle the documents with this seed, so that all splits are alike (default: sort by path)"
    for source in (stdlib, directory):
        source.add_argument("--shuffle", type=int, metavar="SEED", help=shuffle)
    hub = sources.add_parser("hub", help="a dataset of the Hugging Face Hub, or local files in its formats")
    hub.add_argument("name", help="dataset, local directory, or format (json, parquet, text)")
    hub.add_argument("--config-name", type=str, help="the dataset's configuration")
    hub.add_argument("--data-files", nargs="+", metavar="GLOB", help="the files, for a format or a directory")
    hub.add_argument("--split", type=str, default="train", help="the dataset's split (default: %(default)s)")
    hub.add_argument("--streaming", action="store_true", help="do not download the whole dataset first")
    hub.add_argument("--max-documents", type=command_line.whole_number, metavar="N", help="stop after N documents")
    hub.add_argument("--text-key", type=str, default="text", help="the column with the text (default: %(default)s)")
    for source in (stdlib, directory, hub):
        source.add_argument("--output", required=True, metavar="F.jsonl", help="the file to write")
        source.add_argument("--overwrite", action="store_true", help="replace an existing output")
        document_bytes_option(source)
    return result


if __name__ == "__main__":
    command_line.run(main)
