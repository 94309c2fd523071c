"""Tokenize documents into Megatron-core's indexed dataset, P.bin and P.idx.

    python tools/preprocess_data.py --input 'data/c4/*.jsonl.zst' --tokenizer tokenizer.model \\
        --output-prefix data/c4 --workers 16 --append-eod

The result does not depend on --workers. It appears under its name only when it is complete: an interrupted run leaves
at most P.bin.partial and P.idx.partial, which the next run replaces.

Several machines can share the work: `--part I/N` reads every N-th file, starting with number I (from 0), and writes
the dataset P-I-of-N. `slurm/preprocess.sh` does so in every task of a Slurm job array. Training reads all parts with
`--data.prefix 'P-*'`; `tools/merge_datasets.py` merges them into one. A complete part is kept if it was made from the
same files with the same options; otherwise it is an error. --overwrite replaces it. P.origin records the tokenizer,
which training and evaluation compare with the model's.
"""

import argparse
import glob
import os
import re
from typing import Any

from megatron_tape import command_line
from megatron_tape.data.documents import FORMATS, Problems, check_text_key, document_bytes_option, find_inputs
from megatron_tape.data.indexed_dataset import IndexedDatasetWriter, check_output_prefix, dataset_paths
from megatron_tape.data.inputs import check_writable
from megatron_tape.data.origins import read_origin
from megatron_tape.data.preprocessing import Encoding, encode_files
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import ConfigError, FileError, refuse


def main() -> None:
    """Parse the command line, check it, and write the dataset."""
    arguments = parser().parse_args()
    check_output_prefix("--output-prefix", arguments.output_prefix)
    check_writable("--output-prefix", os.path.dirname(os.path.abspath(arguments.output_prefix)))
    paths = find_inputs(arguments.input)
    tokenizer = load_tokenizer(arguments.tokenizer)
    if arguments.append_eod and tokenizer.eod is None:
        raise FileError(
            arguments.tokenizer, "has no end-of-document token", "choose another tokenizer, or remove --append-eod"
        )
    encoding = Encoding(tokenizer, arguments.text_key, arguments.append_eod, arguments.max_document_bytes)
    prefix, origin, overwrite = arguments.output_prefix, encoding.origin, arguments.overwrite
    if arguments.part is not None:
        prefix, paths = prefix_of_part(prefix, *arguments.part), files_of_part(paths, *arguments.part)
        origin |= {"inputs": paths}
        if dataset_paths(prefix)[1].exists() and not overwrite:
            existing: Any = read_origin(prefix) or {}
            if {key: value for key, value in existing.items() if key != "files"} != origin:
                fix = "remove it, or pass --overwrite for all parts"
                raise FileError(prefix, "was made from other files, or with another tokenizer or --append-eod", fix)
            command_line.log(f"{prefix} is complete already; nothing to do")
            return
        overwrite = True  # replaces the files of a killed process
    for path in paths if arguments.on_error == "stop" else ():
        check_text_key(path, arguments.text_key)
    with IndexedDatasetWriter(prefix, encoding.dtype, overwrite=overwrite) as writer:
        summary = write(writer, paths, encoding, arguments)
        if not writer.documents:
            raise ConfigError("--input", "has no documents", "check it and --text-key")
        writer.finish(origin)
    command_line.log(f"{prefix}: {summary}")


def prefix_of_part(prefix: str, index: int, count: int) -> str:
    """Return the prefix of part `index` of `count`. Raises FileError if parts with another count exist."""
    for path in glob.glob(f"{glob.escape(prefix)}-*-of-*.idx"):
        other = re.fullmatch(r"-[0-9]+-of-([0-9]+)\.idx", path[len(prefix) :])
        if other and int(other[1]) != count:
            fix = "remove the parts of the other count, or choose another --output-prefix"
            raise FileError(path, f"is one of {int(other[1])} parts, but --part writes one of {count}", fix)
    return f"{prefix}-{index:05}-of-{count:05}"


def files_of_part(paths: list[str], index: int, count: int) -> list[str]:
    """Return every `count`-th file, from number `index` on."""
    problem = f"is {index}/{count}, but --input names only {len(paths):,} files"
    refuse(count > len(paths), "--part", problem, "use fewer parts: a file is never split")
    return paths[index::count]


def write(writer: IndexedDatasetWriter, paths: list[str], encoding: Encoding, arguments: argparse.Namespace) -> str:
    """Tokenize the files, append their documents to the writer, and return a summary. Log the progress.

    Raises FileError at a bad document, unless `--on-error skip` is given.
    """
    size = sum(map(os.path.getsize, paths))
    command_line.log(f"{len(paths):,} files, {size / 1e6:,.1f} MB, {arguments.workers} workers")
    progress = command_line.Progress(size)
    problems, text_bytes = Problems(), 0

    def speed(seconds: float) -> str:
        return (
            f"{writer.documents:,} documents, {writer.tokens:,} tokens, {text_bytes / 1e6:,.1f} MB of text, "
            f"{text_bytes / 1e6 / seconds:.1f} MB/s, {writer.tokens / seconds:,.0f} tokens/s"
        )

    try:
        for chunk in encode_files(paths, encoding, arguments.workers, arguments.chunk_bytes):
            if arguments.on_error == "stop" and (bad := chunk.problems.first()):
                fix = "repair or split it, raise --max-document-bytes, or pass --on-error skip to leave it out"
                raise FileError(bad[0], f"cannot be used: {bad[1]}", fix)
            problems.merge(chunk.problems)
            writer.add(chunk.tokens, chunk.lengths)
            text_bytes += chunk.text_bytes
            progress.update(chunk.position, speed)
    finally:
        progress.end()
    for line in problems.report():
        command_line.log(line)
    return f"{speed(progress.seconds)}, {progress.seconds:.1f} s"


def part(text: str) -> tuple[int, int]:
    """Parse the option I/N, such as 3/8, into (I, N)."""
    match = re.fullmatch("([0-9]{1,5})/([0-9]{1,5})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not I/N with I from 0 to N - 1, such as 0/8")
    return int(match[1]), int(match[2])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = command_line.Parser(description=__doc__, epilog=FORMATS)
    add = result.add_argument
    add("--input", nargs="+", required=True, metavar="GLOB", help="files, or quoted patterns (** matches any depth)")
    add("--tokenizer", required=True, help="SentencePiece .model, tokenizer.json, or a directory with one of them")
    add("--output-prefix", required=True, metavar="P", help="write P.bin and P.idx")
    add(
        "--workers",
        type=command_line.whole_number,
        default=os.cpu_count(),
        help="number of processes (default: %(default)s, the number of cores)",
    )
    add("--text-key", type=str, default="text", help="key or column of a document's text (default: %(default)s)")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's end-of-document token")
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a bad document or unreadable file: stop, writing nothing, or skip and report (default: %(default)s)",
    )
    add("--overwrite", action="store_true", help="replace an existing P; the old one stays until the new is complete")
    add("--part", type=part, metavar="I/N", help="write part I (from 0) of N: the dataset P-I-of-N of every N-th file")
    size = "input bytes that a worker tokenizes at a time (default: %(default)s)"
    add("--chunk-bytes", type=command_line.whole_number, default=1 << 18, help=size)
    document_bytes_option(result)
    return result


if __name__ == "__main__":
    command_line.run(main)
