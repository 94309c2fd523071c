"""Write a text corpus as JSON lines, one document per line: {"text": ...}.

    python tools/make_corpus.py stdlib --output data/stdlib.jsonl
    python tools/make_corpus.py folders ~/project --suffixes .py .md --output data/project.jsonl
    python tools/make_corpus.py hub allenai/c4 --config-name en --streaming --max-documents 9999 \\
        --output data/c4.jsonl

- stdlib: the source code of this Python's standard library, 31 MB of real text that every machine
  has.
- folders: one long document for each folder of a directory, such as a repository, made of the
  folder's files.
- hub: documents of a dataset of the Hugging Face Hub, or of a local directory in its layout.
  preprocess_data.py and train_tokenizer.py read such a dataset without this step, as --input
  hub:NAME.

Documents that are too large or not valid UTF-8 are skipped, because preprocess_data.py would refuse
them. The output appears only when it is complete.
"""

import argparse
import io
import json
import os
import random
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.data import hub
from megatron_tape.data.documents import (
    LONE_SURROGATE,
    Problems,
    check_text_keys,
    document_bytes_option,
    parse_chunk,
)
from megatron_tape.data.raw_chunks import TooLarge, UnreadableFile, read_chunks
from megatron_tape.errors import FileError
from megatron_tape.io.files import atomic_output
from megatron_tape.text import counted

_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


def main() -> None:
    """Parse the command line and write the corpus."""
    arguments = parser().parse_args()
    # Open the output first, so that an existing one is rejected before anything is downloaded.
    with atomic_output(arguments.output, overwrite=arguments.overwrite) as file:
        total = None
        limit = arguments.max_document_bytes
        problems = Problems()
        if arguments.source == "stdlib":
            records = standard_library(arguments.shuffle)
        elif arguments.source == "folders":
            records = folders(arguments.directory, arguments.suffixes, arguments.shuffle)
        else:
            records = hub_texts(arguments, problems)
            total = arguments.max_documents
        progress = command_line.Progress(total)
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
            progress.update(count, lambda _: f"{counted(count, 'document')}, {size / 1e6:,.1f} MB")  # noqa: B023
            if count == total:
                break
        progress.end()
        for sentence in problems.report():
            command_line.log(sentence)
        if not count:
            raise FileError(
                arguments.source, "gives no document that can be written", "give another source"
            )
    command_line.log(f"{arguments.output}: {counted(count, 'document')}, {size / 1e6:,.1f} MB")


def standard_library(seed: int | None = None) -> Iterator[dict[str, str]]:
    """Yield {"text", "path"} of the standard library's non-empty modules and tests.

    They are sorted by path, or shuffled with the seed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in _in_order(files, seed):
        if _EXCLUDED.isdisjoint(name.split("/")) and (text := _source(files[name])):
            yield {"text": text, "path": name}


def folders(
    root: Path, suffixes: Sequence[str], seed: int | None = None
) -> Iterator[dict[str, str]]:
    """Yield {"text", "path"} of `root` and each folder below it; the text joins its files with one
    of the suffixes.

    The files are sorted by name, and each follows a line with its path. Hidden folders, installed
    packages, and files that are not text are skipped. The folders are sorted by path, or shuffled
    with the seed. Raises OSError if a folder or file cannot be read.
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
        raise FileError(
            str(root),
            f"has no files that end in {' or '.join(suffixes)}",
            "choose others with --suffixes",
        )
    for folder in _in_order(files, seed):
        texts = []
        for path in files[folder]:
            name = path.relative_to(root).as_posix()
            text = _source(path)
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
    """Return a file's text, or None if it cannot be decoded, like some tests of the standard
    library.
    """
    raw = path.read_bytes()
    try:
        if path.suffix == ".py":
            encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        else:
            encoding = "utf-8-sig"
        return raw.decode(encoding)
    except (LookupError, SyntaxError, UnicodeError):
        return None


def hub_texts(arguments: argparse.Namespace, problems: Problems) -> Iterator[dict[str, str]]:
    """Yield {"text"} of a dataset's documents, except for empty ones, and add the bad documents to
    `problems`.

    Raises UserError if the dataset or one of its files cannot be read, hub.NetworkError if the
    network fails.
    """
    paths = hub.find_files(arguments.name, arguments)
    if not arguments.streaming:
        hub.download(paths)
    check_text_keys(paths, arguments.text_key)
    for chunk in read_chunks(paths, arguments.text_key, 1 << 18, arguments.max_document_bytes):
        if isinstance(chunk, UnreadableFile):
            raise chunk
        texts, _, bad = parse_chunk(chunk, arguments.text_key, keep_empty=True)
        problems.merge(bad)
        yield from ({"text": text} for text in texts if text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    sources = result.add_subparsers(dest="source", required=True)
    stdlib = sources.add_parser("stdlib", help="the Python standard library's source code")
    directory = sources.add_parser(
        "folders", help="the files of a directory, one document for each folder"
    )
    directory.add_argument(
        "directory", type=Path, help="the directory with the folders, such as a repository"
    )
    suffixes = {"nargs": "+", "type": str, "metavar": "SUFFIX", "default": [".py", ".md"]}
    directory.add_argument(
        "--suffixes",
        **suffixes,
        help="use files whose names end in one of these (default: .py .md)",
    )
    shuffle = (
        "shuffle the documents with this seed, so that all splits are alike (default: sort by path)"
    )
    for source in (stdlib, directory):
        source.add_argument("--shuffle", type=int, metavar="SEED", help=shuffle)
    dataset = sources.add_parser(
        "hub", help="a dataset of the Hugging Face Hub, or a local directory in its layout"
    )
    dataset.add_argument("name", help="name of the dataset, or path of the directory")
    hub.add_options(dataset)
    dataset.add_argument(
        "--max-documents",
        type=command_line.whole_number,
        metavar="N",
        help="stop after N documents",
    )
    dataset.add_argument(
        "--text-key",
        type=str,
        default="text",
        help="the key or column with the text (default: text)",
    )
    for source in (stdlib, directory, dataset):
        source.add_argument("--output", required=True, metavar="F.jsonl", help="the file to write")
        source.add_argument("--overwrite", action="store_true", help="replace an existing output")
        document_bytes_option(source)
    return result


if __name__ == "__main__":
    command_line.run(main)
