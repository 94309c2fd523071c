"""Compare the speed of `tools/preprocess_data.py` with Megatron-LM's way, on the source of the standard library.

    python -m benchmarks.preprocess --workers 1 2 --repetitions 3 --record

Both are started as a user starts them, so imports count. They run one after the other, `--repetitions` times; medians
are reported. No figure appears unless both wrote the same bytes. `--record` adds a file to benchmarks/results/.
"""

import argparse
import filecmp
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import Record
from megatron_tape import command_line

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure, print and record."""
    arguments = parser().parse_args()
    if min(arguments.workers) < 1 or arguments.repetitions < 1:
        raise ValueError("--workers and --repetitions are counts; give 1 or more")
    with tempfile.TemporaryDirectory(prefix="preprocess-") as directory:
        corpus, tokenizer = prepare(Path(directory), arguments)
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in corpus.open("rb")) / 1e6
        rows = []
        for workers in arguments.workers:
            seconds = measure(corpus, tokenizer, workers, arguments.repetitions)
            rows.append(summarize(workers, seconds, megabytes))
            print("{workers} workers: {ours:.2f} s ({ours_mb_s:.1f} MB/s), Megatron-LM's way {megatron:.2f} s "
                  "({megatron_mb_s:.1f} MB/s), ratio {ratio:.2f}".format(**rows[-1]), flush=True)  # fmt: skip
    if arguments.record:
        Record("preprocess").write({"corpus_mb": megabytes, "model_type": arguments.model_type, "rows": rows})


def prepare(directory: Path, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Write the corpus and train the tokenizer."""
    corpus, tokenizer = directory / "corpus.jsonl", directory / "tokenizer.model"
    run("tools/make_corpus.py", "stdlib", "--output", corpus)
    run("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", 4096, "--output", tokenizer,
        "--model-type", arguments.model_type)  # fmt: skip
    return corpus, tokenizer


def measure(corpus: Path, tokenizer: Path, workers: int, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every repetition of both tools; raises ValueError when their outputs differ."""
    ours, theirs = corpus.with_name("ours"), corpus.with_name("theirs")
    seconds: dict[str, list[float]] = {"ours": [], "megatron": []}
    for _ in range(repetitions):
        seconds["ours"].append(
            run(
                "tools/preprocess_data.py",
                "--input",
                corpus,
                "--tokenizer",
                tokenizer,
                "--output-prefix",
                ours,
                "--workers",
                workers,
                "--append-eod",
                "--overwrite",
            )  # fmt: skip
        )
        seconds["megatron"].append(run("benchmarks/megatron_preprocess.py", corpus, tokenizer, theirs, workers))
        for ending in (".bin", ".idx"):
            if not filecmp.cmp(f"{ours}{ending}", f"{theirs}{ending}", shallow=False):
                raise ValueError(f"the two tools wrote different {ending} files; no speed is reported")
    return seconds


def run(program: str, *arguments: object) -> float:
    """Run a program of this repository and return its seconds; raises ValueError with its last output on failure."""
    started = time.perf_counter()
    result = subprocess.run(
        [sys.executable, str(ROOT / program), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )
    if result.returncode:
        raise ValueError(f"{program} failed: {result.stderr.strip()[-500:]}")
    return time.perf_counter() - started


def summarize(workers: int, seconds: dict[str, list[float]], megabytes: float) -> dict:
    """Return medians, speeds and their ratio."""
    ours, megatron = statistics.median(seconds["ours"]), statistics.median(seconds["megatron"])
    return {
        "workers": workers,
        "ours": ours,
        "ours_mb_s": megabytes / ours,
        "megatron": megatron,
        "megatron_mb_s": megabytes / megatron,
        "ratio": megatron / ours,
        "seconds": seconds,
    }


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    result.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    result.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: %(default)s")
    result.add_argument("--record", action="store_true", help="write benchmarks/results/preprocess-*.json")
    return result


if __name__ == "__main__":
    command_line.run(main)
