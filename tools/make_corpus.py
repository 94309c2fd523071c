"""Write a text corpus as JSON lines, one document per line: {"text": ...}.

    python tools/make_corpus.py stdlib --output data/stdlib.jsonl
    python tools/make_corpus.py folders ~/project --suffixes .py .md --output data/project.jsonl

stdlib:  the source code of this Python's standard library, 31 MB of real text that every machine
         has.
folders: one long document for each folder of a directory, such as a repository, made of the
         folder's files.

Documents that are too large or not valid UTF-8 are skipped, because preprocess_data.py would refuse
them. The output appears only when it is complete. Datasets of the Hugging Face Hub need no corpus:
preprocess_data.py and train_tokenizer.py read them as --input hub:NAME.
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
from megatron_tape.data.documents import LONE_SURROGATE, Problems, document_bytes_option
from megatron_tape.data.raw_chunks import too_large_reason
from megatron_tape.errors import FileError
from megatron_tape.io.files import atomic_output
from megatron_tape.text import counted

_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}
"""Folders that are skipped: installed packages, and compiled files."""


def main() -> None:
    """Parse the command line and write the corpus."""
    arguments = parser().parse_args()
    # Opened first, so that an existing output is refused before anything is read.
    with atomic_output(arguments.output, overwrite=arguments.overwrite) as file:
        limit = arguments.max_document_bytes
        problems = Problems()
        seed = arguments.shuffle
        if arguments.source == "stdlib":
            records = standard_library(seed)
        else:
            records = folders(arguments.directory, arguments.suffixes, seed)

        # The number of documents is not known before the last one, so no percentage is shown.
        progress = command_line.Progress(total=None)
        count = size = 0  # documents and bytes written
        for record in records:
            try:
                line = json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                problems.add(LONE_SURROGATE, record["path"])
                continue
            if len(line) > limit:
                problems.add(too_large_reason(limit), record["path"])
                continue
            size += file.write(line + b"\n")
            count += 1
            # The argument of the message, the seconds so far, is unused.
            progress.update(count, lambda _: f"{counted(count, 'document')}, {size / 1e6:,.1f} MB")  # noqa: B023
        progress.end()
        for sentence in problems.report():
            command_line.log(sentence)
    command_line.log(f"{arguments.output}: {counted(count, 'document')}, {size / 1e6:,.1f} MB")


def standard_library(seed: int | None) -> Iterator[dict[str, str]]:
    """Yield {"text", "path"} of the standard library's non-empty modules and tests.

    They are sorted by path, or shuffled with the seed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # By relative path, so that the order does not depend on where Python is installed.
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in _in_order(files, seed):
        if _EXCLUDED.isdisjoint(name.split("/")) and (text := _read_text(files[name])):
            yield {"text": text, "path": name}


def folders(root: Path, suffixes: Sequence[str], seed: int | None) -> Iterator[dict[str, str]]:
    """Yield {"text", "path"} of `root` and each folder below it; the text joins its files.

    The files are sorted by name, and each follows a line with its path. Hidden folders, installed
    packages, and files that are not text are skipped. The folders are sorted by path, or shuffled
    with the seed. Raises OSError if a folder or file cannot be read.
    """
    if not root.is_dir():
        raise FileError(root, "is not a directory", "give the folder with the files")

    files = {}
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        # os.walk enters only the folders that are left in its list.
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and name not in _EXCLUDED
        ]
        paths = [Path(folder, name) for name in sorted(names) if name.endswith(tuple(suffixes))]
        paths = [path for path in paths if path.is_file()]  # not pipes, or broken links
        if paths:
            files[Path(folder).relative_to(root).as_posix()] = paths

    if not files:
        raise FileError(
            root,
            f"has no files that end in {' or '.join(suffixes)}",
            "choose others with --suffixes",
        )

    for folder in _in_order(files, seed):
        texts = []
        for path in files[folder]:
            name = path.relative_to(root).as_posix()
            text = _read_text(path)
            if text is None:
                command_line.log(f"{name} is not text and is skipped")
            elif text:
                texts.append(f"# {name}\n{text}")
        if texts:
            yield {"text": "\n".join(texts), "path": folder}


def _raise(error: OSError) -> None:
    """Raise an error that `os.walk` would ignore."""
    raise error


def _in_order(names: Iterable[str], seed: int | None) -> list[str]:
    """Return the names sorted, or shuffled with the seed."""
    ordered = sorted(names)
    if seed is not None:
        random.Random(seed).shuffle(ordered)
    return ordered


def _read_text(path: Path) -> str | None:
    """Return a file's text, or None if it cannot be decoded, like some tests of the library."""
    raw = path.read_bytes()
    encoding = "utf-8-sig"
    try:
        # A Python file may declare another encoding in its first lines.
        if path.suffix == ".py":
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (LookupError, SyntaxError, UnicodeError):
        return None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__)
    sources = result.add_subparsers(dest="source", required=True)
    stdlib = sources.add_parser("stdlib", help="the Python standard library's source code")
    directory = sources.add_parser("folders", help="one document for each folder of a directory")
    directory.add_argument("directory", type=Path, help="the directory, such as a repository")
    directory.add_argument(
        "--suffixes",
        nargs="+",
        type=str,
        metavar="SUFFIX",
        default=[".py", ".md"],
        help="use files whose names end in one of these (default: .py .md)",
    )
    for source in (stdlib, directory):
        source.add_argument(
            "--shuffle",
            type=int,
            metavar="SEED",
            help="shuffle the documents, so that all splits are alike (default: sort by path)",
        )
        source.add_argument("--output", required=True, metavar="F.jsonl", help="the file to write")
        source.add_argument("--overwrite", action="store_true", help="replace an existing output")
        document_bytes_option(source)
    return result


if __name__ == "__main__":
    command_line.run(main)
