"""The demo: from text to two trained models, their loss curves and generated text, with the commands used on a cluster.

A stage whose output already exists is skipped. Outputs appear complete or not at all, so an interrupted demo continues
where it stopped.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.files import atomic_output

RECIPES = {"TAPE": "tape_demo", "RoPE": "rope_demo"}
PROMPT = "def main("
STYLES = {"TAPE": {"color": "tab:red", "linewidth": 3.5}, "RoPE": {"color": "tab:blue", "linestyle": "--"}}


def main() -> int:
    """Run the stages one after another; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, help="data-parallel processes (default: 2, or 1 on one core or GPU)")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/demo"), help="where everything goes (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="training steps (default: the recipes')")
    arguments = parser.parse_args()
    arguments.processes = arguments.processes or min(2, devices())
    started = time.monotonic()
    directory = arguments.directory
    data = directory / "data"
    python, bin_directory = sys.executable, Path(sys.executable).parent
    corpus, tokenizer, prefix = data / "stdlib.jsonl", data / "tokenizer.model", data / "stdlib"
    threads = max(1, (os.cpu_count() or 1) // arguments.processes)
    launcher = [str(bin_directory / "torchrun"), "--standalone", "--nproc-per-node", str(arguments.processes)]
    stages = [
        ("corpus", corpus, [python, "tools/make_corpus.py", "stdlib", "--output", str(corpus)]),
        (
            "tokenizer",
            tokenizer,
            [python, "tools/train_tokenizer.py", "--input", str(corpus), "--vocab-size", "4096"]
            + ["--output", str(tokenizer)],
        ),
        (
            "indexed dataset",
            prefix.with_suffix(".idx"),
            [python, "tools/preprocess_data.py", "--input", str(corpus), "--tokenizer", str(tokenizer)]
            + ["--output-prefix", str(prefix), "--workers", "2", "--append-eod"],
        ),
    ]
    for name, recipe in RECIPES.items():
        command = [*launcher, "-m", "pretrain.train", "--config", f"pretrain/recipes/{recipe}.yaml"]
        command += ["--logging.directory", str(directory / name.lower())]
        if directory != parser.get_default("directory"):
            command += ["--data.prefix", str(prefix), "--data.tokenizer", str(tokenizer)]
        if arguments.steps is not None:
            command += ["--train.steps", str(arguments.steps), "--schedule.warmup_steps", str(arguments.steps // 10)]
        stages.append((f"training {name}", None, command))

    exported = directory / "tape-hf"
    stages += [
        (
            "export to Hugging Face",
            None,
            [python, "tools/convert_checkpoint.py", "to-hf", "--checkpoint", str(directory / "tape")]
            + ["--output", str(exported)],
        ),
        (
            "a continuation",
            None,
            [python, "tools/generate.py", "--model", str(exported), "--prompt", PROMPT, "--trust-remote-code"],
        ),
    ]

    print(f"Watch the curves grow: {bin_directory}/tensorboard --logdir {directory}", flush=True)
    for number, (name, output, command) in enumerate(stages, 1):
        shown = shlex.join([Path(command[0]).name, *command[1:]])
        print(f"\n[{number}/{len(stages)}] {name}: {shown}", flush=True)
        if output is not None and output.exists():
            if output.suffix != ".idx" or is_whole(prefix):
                print(f"{output} exists already", flush=True)
                continue
            print(f"{prefix} is damaged and is made again", flush=True)
            command = [*command, "--overwrite"]
        if "to-hf" in command:
            # An export of an earlier demo may be of fewer steps.
            shutil.rmtree(exported, ignore_errors=True)
        status = run(command, threads)
        if status != 0:
            print(f"error: {name} ended with status {status}; see above", file=sys.stderr)
            return 1

    rows = {name: read_rows(directory / name.lower() / "metrics.jsonl") for name in RECIPES}
    write_curves(rows, directory / "curves.png")
    write_summary(rows, directory / "summary.md")
    minutes = (time.monotonic() - started) / 60
    print(f"\n{(directory / 'summary.md').read_text()}")
    print(f"The TAPE model for transformers: {exported}")
    print(f"Finished after {minutes:.1f} minutes: {directory}/summary.md, {directory}/curves.png")
    print(f"Look at the curves with {bin_directory}/tensorboard --logdir {directory}")
    return 0


def run(command: list[str], threads: int) -> int:
    """Run a command and return its exit status; on Ctrl-C, which also reaches the command, let it clean up first."""
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait(timeout=30)
            raise


def devices() -> int:
    """Return the number of GPUs or, if there are none, of CPU cores."""
    count = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True
    )
    return int(count.stdout.strip() or 0) or os.cpu_count() or 1


def is_whole(prefix: Path) -> bool:
    """Return whether an indexed dataset's files are intact and match each other."""
    try:
        return next(IndexedDatasetReader(prefix).problems(), None) is None
    except (ValueError, OSError):
        return False


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_curves(rows: dict[str, list[dict]], path: Path) -> None:
    """Plot training and validation loss by step, and how far TAPE's positions have moved away from RoPE's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=[1.5, 1])
    for name, run in rows.items():
        left.plot(*columns(run, "loss"), **STYLES[name] | {"linewidth": 1, "alpha": 0.5}, label=f"{name}, training")
        left.plot(*columns(run, "validation_loss"), **STYLES[name], marker="o", label=f"{name}, validation")
    left.set(xlabel="step", ylabel="loss (nats per token)", title="Python standard library, 4.2 M parameters, CPU")
    left.legend()
    left.grid(alpha=0.3)
    updates = sorted({key for row in rows["TAPE"] for key in row if key.startswith("position/update_norm/")})
    for index, key in enumerate(updates):
        shade = plt.cm.viridis(index / max(1, len(updates) - 1))
        right.plot(*columns(rows["TAPE"], key), color=shade, label=f"layer {index}")
    right.set(xlabel="step", ylabel="norm of a layer's update (RoPE: 0)", title="TAPE's positions leave RoPE")
    right.legend(fontsize="small")
    right.grid(alpha=0.3)
    figure.tight_layout()
    with atomic_output(path, overwrite=True) as file:
        figure.savefig(file, format="png", dpi=110)


def columns(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of the rows that have `key`."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def write_summary(rows: dict[str, list[dict]], path: Path) -> None:
    """Write the final figures of each run as a Markdown table."""
    lines = [
        "# Demo",
        "",
        "| position encoding | steps | training loss | validation loss | perplexity | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in rows.items():
        last = run[-1]
        speeds = sorted(row["tokens_per_second"] for row in run)
        lines.append(
            f"| {name} | {last['step']} | {last['loss']:.4f} | {last['validation_loss']:.4f} | "
            f"{math.exp(last['validation_loss']):.2f} | {speeds[len(speeds) // 2]:,.0f} |"
        )
    lines += [
        "",
        "This is one small model, one seed and a few minutes of training: the losses show that both encodings learn,",
        "not which is better, and after so few steps they nearly coincide. The speeds depend on the machine's load.",
        "",
        "![curves](curves.png)",
        "",
    ]
    with atomic_output(path, "w", overwrite=True) as file:
        file.write("\n".join(lines))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; make demo continues from here")
