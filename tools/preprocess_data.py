"""Tokenize documents into Megatron-core's indexed dataset, P.bin and P.idx.

    python tools/preprocess_data.py --input 'data/c4/*.jsonl.zst' --tokenizer tokenizer.model \\
        --output-prefix data/c4 --workers 16 --append-eod

The result does not depend on --workers. It appears under its name only when it is complete: an interrupted run leaves
at most P.bin.partial and P.idx.partial, which the next run replaces.

Several machines can share the work: `--shard I/N` makes one of N parts, P.shard-0000I-of-0000N, and
`tools/merge_datasets.py --shards P` joins them into the very bytes that one process would have written;
`slurm/preprocess.sh` does both in a Slurm job array. P.origin records with which tokenizer a dataset was made, which
training and evaluation compare with the model's, and of shards also from which inputs and settings. A complete
dataset that was made from the same inputs and settings is kept, so a part may be run again at any time; one that was
made from other inputs or settings is replaced only with --overwrite.
"""

import argparse
import os

from megatron_tape import command_line
from megatron_tape.data import shards
from megatron_tape.data.documents import FORMATS, Problems, document_bytes_option, find_inputs
from megatron_tape.data.indexed_dataset import IndexedDatasetWriter, check_output_prefix
from megatron_tape.data.inputs import check_writable
from megatron_tape.data.preprocessing import Encoding, encode_files
from megatron_tape.data.raw_chunks import FilePart
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import ConfigError, FileError


def main() -> None:
    """Parse the command line, check it, and write the dataset."""
    arguments = parser().parse_args()
    check_output_prefix("--output-prefix", arguments.output_prefix)
    check_writable("--output-prefix", os.path.dirname(os.path.abspath(arguments.output_prefix)))
    paths = find_inputs(arguments.input)
    tokenizer = load_tokenizer(arguments.tokenizer)
    if arguments.append_eod and tokenizer.eod is None:
        raise FileError(arguments.tokenizer, "has no end-of-document token", "leave out --append-eod")
    encoding = Encoding(tokenizer, arguments.text_key, arguments.append_eod, arguments.max_document_bytes)
    if arguments.shard is not None:
        write_shard(shards.Shard.parse(arguments.shard), paths, encoding, arguments)
        return
    with IndexedDatasetWriter(arguments.output_prefix, encoding.dtype, overwrite=arguments.overwrite) as writer:
        speed = write(writer, [FilePart(path) for path in paths], encoding, arguments)
        if not writer.documents:
            raise ConfigError("--input", "holds no document", "check it and --text-key")
        writer.finish(encoding.origin)
    command_line.say(f"{arguments.output_prefix}: {speed}")


def write_shard(shard: shards.Shard, paths: list[str], encoding: Encoding, arguments: argparse.Namespace) -> None:
    """Write a shard, unless it or the whole dataset already exists; raises FileError if an input changes."""
    prefix = shard.prefix(arguments.output_prefix)
    origin = shards.describe_origin(paths, encoding, arguments.on_error)
    for existing in (arguments.output_prefix, prefix):
        if shards.is_made(existing, origin, arguments.overwrite):
            command_line.say(f"{existing} is complete already; nothing to do")
            return
    with IndexedDatasetWriter(prefix, encoding.dtype, overwrite=True) as writer:
        speed = write(writer, shard.cut(paths), encoding, arguments)
        now = shards.describe_origin(paths, encoding, arguments.on_error)
        if not shards.same_origin(now, origin):
            reason = shards.difference(now, origin)
            raise FileError(prefix, f"was made while its inputs changed ({reason})", "make it again")
        writer.finish(origin)
    command_line.say(f"{prefix}: {speed}")


def write(
    writer: IndexedDatasetWriter, parts: list[FilePart], encoding: Encoding, arguments: argparse.Namespace
) -> str:
    """Tokenize into the writer, showing progress, and return a summary.

    Raises FileError at a bad document unless bad documents are skipped.
    """
    size = sum(part.size for part in parts)
    command_line.say(f"{len(parts):,} files, {size / 1e6:,.1f} MB, {arguments.workers} workers")
    progress = command_line.Progress(size)
    problems, text_bytes = Problems(), 0

    def speed(seconds: float) -> str:
        return (
            f"{writer.documents:,} documents, {writer.tokens:,} tokens, {text_bytes / 1e6:,.1f} MB of text, "
            f"{text_bytes / 1e6 / seconds:.1f} MB/s, {writer.tokens / seconds:,.0f} tokens/s"
        )

    try:
        for chunk in encode_files(parts, encoding, arguments.workers, arguments.chunk_bytes):
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
        command_line.say(line)
    return f"{speed(progress.seconds)}, {progress.seconds:.1f} s"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = command_line.Parser(description=__doc__, epilog=f"{FORMATS}\n\n{shards.CUT}")
    add = result.add_argument
    add("--input", nargs="+", required=True, metavar="GLOB", help="files or quoted patterns (** for any depth)")
    add("--tokenizer", required=True, help="SentencePiece .model, tokenizer.json, or a directory with one of them")
    add("--output-prefix", required=True, metavar="P", help="write P.bin and P.idx")
    add(
        "--workers",
        type=command_line.whole_number,
        default=os.cpu_count(),
        help="processes that tokenize (default: %(default)s, the number of cores)",
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
    add("--shard", metavar="I/N", help="make only part I (from 0) of N; see below")
    size = "bytes given to a worker at a time (default: %(default)s)"
    add("--chunk-bytes", type=command_line.whole_number, default=1 << 18, help=size)
    document_bytes_option(result)
    return result


if __name__ == "__main__":
    command_line.run(main)
