"""Compare the speed of `tools/preprocess_data.py` with Megatron-LM's method, on the source of
Python's library.

    python -m benchmarks.preprocess --workers 1 2 --repetitions 3

`as_megatron` implements Megatron-LM's method for this comparison. Each run is a new process, so its
time includes imports. Runs of the two methods alternate, `--repetitions` times each, and medians
are reported. If the methods write different bytes, no figure is reported.
"""

import argparse
import filecmp
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import Record, add_record_arguments
from megatron_tape import command_line
from megatron_tape.command_line import whole_number
from megatron_tape.io.versions import ROOT

MEGATRON = "import sys; from benchmarks.preprocess import as_megatron; as_megatron(*sys.argv[1:])"


def main() -> None:
    """Measure, print the speeds, and write the record to the file that --output names."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument(
        "--workers", type=whole_number, nargs="+", default=[1, 2], help="processes (default: 1 2)"
    )
    parser.add_argument(
        "--repetitions", type=whole_number, default=3, help="runs per method (default: %(default)s)"
    )
    parser.add_argument(
        "--model-type", choices=("bpe", "unigram"), default="bpe", help="default: %(default)s"
    )
    add_record_arguments(parser)
    arguments = parser.parse_args()
    record = Record(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="preprocess-") as directory:
        corpus, tokenizer = prepare(Path(directory), arguments)
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in corpus.open("rb")) / 1e6
        for workers in arguments.workers:
            seconds = measure(corpus, tokenizer, workers, arguments.repetitions)
            ours = statistics.median(seconds["ours"])
            theirs = statistics.median(seconds["megatron"])
            print(
                f"{workers} workers: {ours:.2f} s ({megabytes / ours:.1f} MB/s), Megatron-LM's"
                f" method {theirs:.2f} s ({megabytes / theirs:.1f} MB/s),"
                f" ratio {theirs / ours:.2f}",
                flush=True,
            )
            rows.append({"workers": workers, "ours": ours, "megatron": theirs, "seconds": seconds})
    record.write({"corpus_mb": megabytes, "rows": rows})


def prepare(directory: Path, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Write a corpus and train a tokenizer in a directory; return their paths."""
    corpus = directory / "corpus.jsonl"
    tokenizer = directory / "tokenizer.model"
    run("tools/make_corpus.py", "stdlib", "--output", corpus)
    options = ("--vocab-size", 4096, "--model-type", arguments.model_type)
    run("tools/train_tokenizer.py", "--input", corpus, "--output", tokenizer, *options)
    return corpus, tokenizer


def measure(
    corpus: Path, tokenizer: Path, workers: int, repetitions: int
) -> dict[str, list[float]]:
    """Return the seconds of every run of both methods. Raises ValueError if their datasets
    differ.
    """
    ours = corpus.with_name("ours")
    theirs = corpus.with_name("theirs")
    seconds: dict[str, list[float]] = {"ours": [], "megatron": []}
    for _ in range(repetitions):
        options = ("--workers", workers, "--overwrite")
        files = ("--input", corpus, "--tokenizer", tokenizer, "--output-prefix", ours)
        seconds["ours"].append(run("tools/preprocess_data.py", *files, *options))
        seconds["megatron"].append(run("-c", MEGATRON, corpus, tokenizer, theirs, workers))
        for ending in (".bin", ".idx"):
            if not filecmp.cmp(f"{ours}{ending}", f"{theirs}{ending}", shallow=False):
                raise ValueError(
                    f"the two methods wrote different {ending} files, so no speed is reported"
                )
    return seconds


def run(*arguments: object) -> float:
    """Run Python with these arguments; return the seconds. Raises ValueError with the end of stderr
    if it fails.
    """
    command = [sys.executable, *map(str, arguments)]
    started = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise ValueError(f"{command} failed: {result.stderr.strip()[-500:]}")
    return time.perf_counter() - started


_tokenizer = None


def as_megatron(source: str, tokenizer: str, prefix: str, workers: str) -> None:
    """Write the dataset `prefix` as Megatron-LM's preprocessing tool does, with the same imports.

    The workers of a pool parse and tokenize lines, sent in chunks of 32, and return a list of token
    IDs per line. The parent passes each list to Megatron-core's builder, which converts it to an
    array.
    """
    import torch  # noqa: F401
    from megatron.core.datasets import indexed_dataset

    _start(tokenizer)
    dtype = indexed_dataset.DType.optimal_dtype(_tokenizer.vocab_size())
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    with open(source, encoding="utf-8") as lines:
        with multiprocessing.Pool(int(workers), initializer=_start, initargs=(tokenizer,)) as pool:
            for ids, lengths, _ in pool.imap(_encode, lines, 32):
                builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")


def _start(path: str) -> None:
    global _tokenizer
    import sentencepiece

    _tokenizer = sentencepiece.SentencePieceProcessor(model_file=path)


def _encode(line: str) -> tuple[list[int], list[int], int]:
    ids = _tokenizer.encode_as_ids(json.loads(line)["text"])
    ids.append(_tokenizer.eos_id())
    return ids, [len(ids)], len(line)


if __name__ == "__main__":
    command_line.run(main)
