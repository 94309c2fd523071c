"""Tokenize documents into Megatron-core's indexed dataset, P.bin and P.idx.

    python tools/preprocess_data.py --input 'data/c4/*.jsonl.zst' --tokenizer tokenizer.model \\
        --output-prefix data/c4 --workers 16
    python tools/preprocess_data.py --input hub:HuggingFaceFW/fineweb-edu \\
        --config-name sample-10BT --streaming \\
        --tokenizer tokenizer.model --output-prefix data/fineweb-edu

The result does not depend on --workers, and appears under its name only when it is complete. The
same command continues an interrupted run after the last complete input file, from the unfinished
files P.bin.partial, P.idx.partial and P.progress.

Several machines can share the work: `--part I/N` reads every N-th file, starting with number I
(from 0), and writes the dataset P-I-of-N. `slurm/preprocess.sh` does so in every task of a Slurm
job array. Training reads all parts with `--data.prefix 'P-*'`; `tools/merge_datasets.py` merges
them into one. A complete part is kept if it was made from the same files with the same options;
otherwise it is an error. --overwrite replaces it. P.origin records the tokenizer, which training
and evaluation compare with the model's, and the names of the input files. The names of files of the
Hub contain the commit, so that no dataset mixes two revisions.
"""

import argparse
import contextlib
import glob
import os
import re
from typing import Any

import numpy as np

from megatron_tape import command_line
from megatron_tape.data import hub
from megatron_tape.data.documents import (
    FORMATS,
    Problems,
    add_text_options,
    check_text_keys,
    find_inputs,
)
from megatron_tape.data.indexed_dataset import (
    IndexedDatasetWriter,
    check_output_prefix,
    dataset_paths,
)
from megatron_tape.data.inputs import check_writable
from megatron_tape.data.origins import DatasetSource, read_origin
from megatron_tape.data.preprocessing import Encoding, encode_files
from megatron_tape.data.raw_chunks import too_large_reason
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.io.files import refuse_existing
from megatron_tape.text import counted


def main() -> None:
    """Parse the command line, check it, and write the dataset."""
    arguments = parser().parse_args()
    check_output_prefix(arguments.output_prefix)
    check_writable("--output-prefix", os.path.dirname(os.path.abspath(arguments.output_prefix)))
    paths = find_inputs(arguments.input, arguments)
    encoding = make_encoding(arguments)

    prefix = arguments.output_prefix
    overwrite = arguments.overwrite
    # From here on, `prefix` and `paths` are those of this part.
    if arguments.part is not None:
        prefix = prefix_of_part(prefix, *arguments.part)
        paths = files_of_part(paths, *arguments.part)
    source = DatasetSource(
        inputs=paths,
        text_key=arguments.text_key,
        max_document_bytes=arguments.max_document_bytes,
        max_documents=arguments.max_documents,
    )
    origin = {**encoding.origin, "source": source}
    if not overwrite:
        check_revisions(arguments.output_prefix, paths)

    if arguments.part is not None and not overwrite:
        if is_complete(prefix, origin):
            command_line.log(f"{prefix} is complete already; nothing to do")
            return
        overwrite = True  # a killed process may have left P.bin without its index
    if not overwrite:
        refuse_existing(*dataset_paths(prefix))  # here, before anything is downloaded
    if not arguments.streaming and not arguments.check:
        hub.download(paths)
    # Not with --on-error skip, which skips the documents without the key like other bad ones.
    if arguments.on_error == "stop":
        check_text_keys(paths, arguments.text_key)
    if arguments.check:
        return

    with IndexedDatasetWriter(
        prefix,
        encoding.dtype,
        overwrite=overwrite,
        # A run with --on-error stop must not continue one that has left documents out.
        source={**origin, "on_error": arguments.on_error},
        inputs=[size_and_time(path) for path in paths],
    ) as writer:
        summary = write(writer, paths, encoding, arguments)
        if not writer.documents:
            raise ConfigError("--input", "has no documents", "check it and --text-key")
        # Checked again: parts of another revision may have been written at the same time.
        if not arguments.overwrite:
            check_revisions(arguments.output_prefix, paths)
        writer.finish(origin)
    command_line.log(f"{prefix}: {summary}")


def make_encoding(arguments: argparse.Namespace) -> Encoding:
    """Return how to tokenize. Raises FileError if the tokenizer lacks a required token."""
    tokenizer = load_tokenizer(arguments.tokenizer)
    if arguments.append_eod and tokenizer.eod is None:
        fix = "choose another tokenizer, or pass --no-append-eod"
        raise FileError(arguments.tokenizer, "has no end-of-document token", fix)
    return Encoding(
        tokenizer, arguments.text_key, arguments.append_eod, arguments.max_document_bytes
    )


def is_complete(prefix: str, origin: dict) -> bool:
    """Return whether the dataset of a part exists, which must have the origin `origin`.

    Raises FileError if it was made from other files or with other options.
    """
    _, index_path = dataset_paths(prefix)
    # The writer creates the index last.
    if not index_path.exists():
        return False
    existing: Any = read_origin(prefix) or {}
    # `files`, the fingerprints of the dataset itself, are not known before it is written.
    if {**existing, "files": None} != {**origin, "files": None}:
        problem = "was made from other files, or with another tokenizer or other options"
        raise FileError(prefix, problem, "remove it, or pass --overwrite for all parts")
    return True


def size_and_time(path: str) -> list[int] | None:
    """Return the size in bytes and the time in ns of a file's last change, or None on the Hub."""
    # The name of a file of the Hub contains the commit, so its content never changes.
    if hub.is_remote(path):
        return None
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def prefix_of_part(prefix: str, index: int, count: int) -> str:
    """Return the prefix of part `index` of `count`.

    Raises FileError if parts with another count exist, since their files overlap.
    """
    for path in parts_of(prefix):
        if not path.endswith(f"-of-{count:05}.idx"):
            fix = "remove the parts of the other count, or choose another --output-prefix"
            raise FileError(path, f"is not one of {count} parts", fix)
    return f"{prefix}-{index:05}-of-{count:05}"


def parts_of(prefix: str) -> list[str]:
    """Return the index files of the parts that exist."""
    # Not those of P-other, whose names also begin with P.
    return sorted(glob.glob(f"{glob.escape(prefix)}-[0-9]*-of-[0-9]*.idx"))


def files_of_part(paths: list[str], index: int, count: int) -> list[str]:
    """Return every `count`-th file, from number `index` on.

    Raises ConfigError if there are more parts than files.
    """
    if count > len(paths):
        problem = f"is {index}/{count}, but --input names only {len(paths):,} files"
        raise ConfigError("--part", problem, "use fewer parts: a file is never split")
    return paths[index::count]


def check_revisions(prefix: str, paths: list[str]) -> None:
    """Raise FileError if a part has read another revision of a dataset of the Hub."""
    commits = hub.revisions(paths)
    if not commits:
        return
    for path in parts_of(prefix):
        origin = read_origin(path.removesuffix(".idx"))
        if origin is None or "source" not in origin:
            continue
        for name, commit in hub.revisions(origin["source"]["inputs"]).items():
            # A dataset that only the other part reads may have any revision.
            if commits.get(name, commit) != commit:
                raise FileError(
                    path,
                    f"was made from revision {commit} of {name}, and --input is revision"
                    f" {commits[name]}",
                    f"pass --revision {commit}, or --overwrite to begin again",
                )


def write(
    writer: IndexedDatasetWriter,
    paths: list[str],
    encoding: Encoding,
    arguments: argparse.Namespace,
) -> str:
    """Tokenize the files, append their documents to the writer, and return a summary.

    Logs the progress. Continues after the files that an interrupted run has completed. Raises
    FileError at a bad document, unless `--on-error skip` is given.
    """
    completed_before = writer.completed_files
    if completed_before:
        command_line.log(
            f"continuing after {completed_before:,} of {len(paths):,} files, which an interrupted"
            " run has completed"
        )
    remaining = paths[completed_before:]
    size = sum(map(hub.file_size, remaining))
    ends = "no token marks the ends of documents"
    if encoding.append_eod:
        ends = f"every document ends in the end-of-document token {encoding.tokenizer.eod}"
    command_line.log(
        f"{counted(len(remaining), 'file')}, {size / 1e6:,.1f} MB,"
        f" {counted(arguments.workers, 'worker')}; {ends}"
    )
    problems = Problems()
    text_bytes = 0

    def summary(seconds: float) -> str:
        return (
            f"{counted(writer.documents, 'document')}, {writer.tokens:,} tokens,"
            f" {text_bytes / 1e6:,.1f} MB of text, {text_bytes / 1e6 / seconds:.1f} MB/s"
        )

    progress = command_line.Progress(size)  # in bytes of the input
    chunks = encode_files(remaining, encoding, arguments.workers, arguments.chunk_bytes)
    try:
        with contextlib.closing(chunks):
            for chunk in chunks:
                # Chunks are in the order of the files. So all files before that of this chunk are
                # complete.
                files_before = paths.index(chunk.path, writer.completed_files)
                if files_before > writer.completed_files:
                    writer.mark_completed(files_before)
                if arguments.on_error == "stop":
                    refuse_problem(chunk.problems, arguments.max_document_bytes)
                problems.merge(chunk.problems)

                # The tokens of the chunk are cut after the last document that is still wanted.
                lengths = chunk.lengths
                if arguments.max_documents is not None:
                    lengths = lengths[: arguments.max_documents - writer.documents]
                token_bytes = int(lengths.sum(dtype=np.int64)) * encoding.dtype.itemsize
                writer.add(chunk.tokens[:token_bytes], lengths)
                text_bytes += chunk.text_bytes
                if writer.documents == arguments.max_documents:
                    break
                progress.update(chunk.bytes_read, summary)
    finally:
        progress.end()
        # The run that continues an interrupted one reports only the bad documents of its own files.
        for line in problems.report():
            command_line.log(line)
    return f"{summary(progress.seconds)}, {progress.seconds:.1f} s"


def refuse_problem(problems: Problems, max_document_bytes: int) -> None:
    """Raise FileError about the first bad document in `problems`, if there is one."""
    bad = problems.first()
    if bad is None:
        return
    place, reason = bad
    fix = "repair it, or pass --on-error skip to leave it out"
    if reason == too_large_reason(max_document_bytes):
        fix = "split it, raise --max-document-bytes, or pass --on-error skip to leave it out"
    raise FileError(place, f"cannot be used: {reason}", fix)


def parse_part(text: str) -> tuple[int, int]:
    """Parse the option --part, I/N, into (I, N). Raises ArgumentTypeError unless 0 <= I < N."""
    match = re.fullmatch("([0-9]{1,5})/([0-9]{1,5})", text)
    if not match or int(match[1]) >= int(match[2]):
        problem = f"{text[:40]!r} is not I/N with I from 0 to N - 1, such as 0/8"
        raise argparse.ArgumentTypeError(problem)
    return int(match[1]), int(match[2])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__, epilog=FORMATS)
    add_text_options(result)
    add = result.add_argument
    add(
        "--tokenizer",
        required=True,
        help="SentencePiece .model, tokenizer.json, or a directory with one of them",
    )
    add("--output-prefix", required=True, metavar="P", help="write P.bin and P.idx")
    add(
        "--workers",
        type=command_line.whole_number,
        default=os.cpu_count(),
        help="number of processes (default: %(default)s, the number of cores)",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the tokenizer's end-of-document token (the default)",
    )
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a bad document or unreadable file: write no dataset (the default), or report it",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace an existing P; the old one stays until the new is complete",
    )
    add(
        "--part",
        type=parse_part,
        metavar="I/N",
        help="write part I (from 0) of N: the dataset P-I-of-N of every N-th file",
    )
    add(
        "--chunk-bytes",
        type=command_line.whole_number,
        default=1 << 18,
        help="input bytes that a worker tokenizes at a time (default: %(default)s)",
    )
    add(
        "--check",
        action="store_true",
        help="validate the command, its input and the tokenizer, and exit",
    )
    return result


if __name__ == "__main__":
    command_line.run(
        main, interrupted="the same command continues after the last complete input file"
    )
