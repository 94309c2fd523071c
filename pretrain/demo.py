"""The demo: from text to two trained models, their loss curves and generated text, both extended to four times the
context, and all evaluated on one page, with the commands used on a cluster.

A stage whose output already exists is skipped. Outputs appear complete or not at all, so an interrupted demo continues
where it stopped.
"""

import argparse
import math
import os
import shutil
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from megatron_tape import command_line
from megatron_tape.evaluation.report.models import read_run
from megatron_tape.evaluation.results import read_results
from megatron_tape.io.files import atomic_output
from pretrain.comparison.programs import find_gpus
from pretrain.stages import Stage, export, exported_from, launcher, run_stages, shortened

RECIPES = {"TAPE": "tape_demo", "RoPE": "rope_demo"}
EXTENSIONS = {"TAPE": "extend/tiny_tape", "RoPE": "extend/tiny_rope"}
CONTEXT, EXTENDED = 256, 1024
"""Of the recipes."""
MODELS = [(name, context) for context in (CONTEXT, EXTENDED) for name in RECIPES]
EVALUATION = "pretrain/recipes/evaluate/demo.yaml"
PROMPT = "def main("
ByPosition = dict[str, dict[str, tuple[list[float], list[float]]]]
"""Positions and losses there, by when it was (before or after the extension) and model."""
STYLES = {"TAPE": {"color": "tab:red", "linewidth": 3.5}, "RoPE": {"color": "tab:blue", "linestyle": "--"}}


def main() -> int:
    """Run the stages one after another; return the exit status."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--processes", type=int, help="data-parallel processes (default: 2, or 1 on one core or GPU)")
    directory = Path("runs/demo")
    parser.add_argument(
        "--directory", type=Path, default=directory, help="where everything goes (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="training steps, with a quicker evaluation (default: the recipes')")
    arguments = parser.parse_args()
    arguments.processes = arguments.processes or min(2, len(find_gpus()[0]) or os.cpu_count() or 1)
    started = time.monotonic()
    directory = arguments.directory
    as_in_recipes = directory == parser.get_default("directory")
    bin_directory = Path(sys.executable).parent
    print(f"Watch the curves grow: {bin_directory}/tensorboard --logdir {directory}", flush=True)
    for name, context in MODELS:
        # An export of an earlier demo may be of fewer steps.
        shutil.rmtree(exported_from(run_of(directory, name, context)), ignore_errors=True)
    stages = [*preparation(directory), *training(arguments, as_in_recipes)]
    stages += evaluation(directory, as_in_recipes, quick=arguments.steps is not None)
    if run_stages(stages, arguments.processes) != 0:
        return 1

    rows = {name: read_run(run_of(directory, name, CONTEXT)).rows for name in RECIPES}
    write_curves(rows, directory / "curves.png")
    by_position = {
        when: {name: loss_by_position(directory, name, context) for name in RECIPES}
        for when, context in (("before", CONTEXT), ("after", EXTENDED))
    }
    write_loss_by_position(by_position, directory / "extended.png")
    write_summary(rows, by_position, directory / "summary.md")
    minutes = (time.monotonic() - started) / 60
    print(f"\n{(directory / 'summary.md').read_text()}")
    exported = (str(exported_from(run_of(directory, "TAPE", context))) for context in (CONTEXT, EXTENDED))
    print(f"The TAPE models for transformers: {', '.join(exported)}")
    print(f"Finished after {minutes:.1f} minutes: {directory}/summary.md, curves.png and extended.png")
    print(f"All four models on one page: {directory}/report.html")
    print(f"Look at the curves with {bin_directory}/tensorboard --logdir {directory}")
    return 0


def preparation(directory: Path) -> list[Stage]:
    """Return the stages from text to tokens."""
    python, prefix = sys.executable, dataset(directory)
    corpus, tokenizer = str(prefix.with_suffix(".jsonl")), str(prefix.with_name("tokenizer.model"))
    preprocess = [python, "tools/preprocess_data.py", "--input", corpus, "--tokenizer", tokenizer]
    preprocess += ["--output-prefix", str(prefix), "--workers", "2", "--append-eod"]
    train_tokenizer = [python, "tools/train_tokenizer.py", "--input", corpus, "--vocab-size", "4096"]
    return [
        Stage("corpus", [python, "tools/make_corpus.py", "stdlib", "--output", corpus], Path(corpus)),
        Stage("tokenizer", [*train_tokenizer, "--output", tokenizer], Path(tokenizer)),
        Stage("indexed dataset", preprocess, prefix.with_suffix(".idx")),
    ]


def training(arguments: argparse.Namespace, as_in_recipes: bool) -> list[Stage]:
    """Return the stages that train, export and extend; each command knows what is done."""
    directory, prefix = arguments.directory, dataset(arguments.directory)
    given = shortened(arguments.steps)
    if not as_in_recipes:
        given += ["--data.prefix", str(prefix), "--data.tokenizer", str(prefix.with_name("tokenizer.model"))]

    def train(name: str, program: str, recipe: str, logs: Path) -> Stage:
        command = [*launcher(arguments.processes), program, "--config", f"pretrain/recipes/{recipe}.yaml"]
        return Stage(name, [*command, "--logging.directory", str(logs), *given])

    def exporting(name: str, logs: Path) -> Stage:
        return Stage(f"export of {name} to Hugging Face", export(logs))

    stages = [train(f"training {n}", "pretrain.train", RECIPES[n], run_of(directory, n, CONTEXT)) for n in RECIPES]
    stages += [exporting(name, run_of(directory, name, CONTEXT)) for name in RECIPES]
    model = str(exported_from(run_of(directory, "TAPE", CONTEXT)))
    generate = [sys.executable, "tools/generate.py", "--model", model, "--prompt", PROMPT, "--trust-remote-code"]
    stages.append(Stage("a continuation", generate))
    for name, recipe in EXTENSIONS.items():
        logs = run_of(directory, name, EXTENDED)
        extend = train(f"extending {name} to {EXTENDED:,} tokens", "pretrain.extend_context", recipe, logs)
        if not as_in_recipes:
            extend.command.extend(["--extension.from", str(run_of(directory, name, CONTEXT))])
        stages += [extend, exporting(f"{name} with {EXTENDED:,} tokens", logs)]
    return stages


def evaluation(directory: Path, as_in_recipe: bool, quick: bool) -> list[Stage]:
    """Return the stages that evaluate the models and make a page of the results."""
    python, prefix = sys.executable, str(dataset(directory))
    stages = []
    for name, context in MODELS:
        command = [python, "-m", "pretrain.evaluate", "--config", EVALUATION]
        command += ["--model", str(run_of(directory, name, context)), "--label", f"{name} {context:,}"]
        if not as_in_recipe:
            command += ["--perplexity.data", prefix, "--context_gain.data", prefix]
        if quick:
            command += ["--perplexity.documents", "4", "--context_gain.documents", "2", "--passkey.samples", "1"]
        stages.append(Stage(f"evaluating {name} of {context:,} tokens", command))
    page = [python, "-m", "pretrain.report", *(str(run_of(directory, *model)) for model in MODELS)]
    return [*stages, Stage("a page of all results", [*page, "--output", str(directory / "report.html")])]


def loss_by_position(directory: Path, name: str, context: int) -> tuple[list[float], list[float]]:
    """Return positions, and the losses there of text held out, for the last step of a run."""
    newest = max((run_of(directory, name, context) / "evaluation").glob("step-*"))
    (losses,) = read_results(newest).tasks["perplexity"].details["loss_by_position"].values()
    return losses["tokens_before"], losses["loss"]


def dataset(directory: Path) -> Path:
    """Return the prefix of the dataset; text and tokenizer lie beside it."""
    return directory / "data" / "stdlib"


def run_of(directory: Path, name: str, context: int) -> Path:
    """Return where a model of this context is trained."""
    return directory / (name.lower() if context == CONTEXT else f"{name.lower()}-{context}")


def write_curves(rows: dict[str, list[dict]], path: Path) -> None:
    """Plot training and validation loss by step, and how far TAPE's positions have moved away from RoPE's."""
    figure = Figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for name, run in rows.items():
        left.plot(*columns(run, "loss"), **STYLES[name] | {"linewidth": 1, "alpha": 0.5}, label=f"{name}, training")
        left.plot(*columns(run, "validation_loss"), **STYLES[name], marker="o", label=f"{name}, validation")
    left.set(xlabel="step", ylabel="loss (nats per token)", title="Python standard library, 4.2 M parameters, CPU")
    left.legend()
    left.grid(alpha=0.3)
    updates = sorted({key for row in rows["TAPE"] for key in row if key.startswith("position/update_norm/")})
    for index, key in enumerate(updates):
        shade = matplotlib.colormaps["viridis"](index / max(1, len(updates) - 1))
        right.plot(*columns(rows["TAPE"], key), color=shade, label=f"layer {index}")
    right.set(xlabel="step", ylabel="norm of a layer's update (RoPE: 0)", title="TAPE's positions leave RoPE")
    right.legend(fontsize="small")
    right.grid(alpha=0.3)
    save(figure, path)


def write_loss_by_position(by_position: ByPosition, path: Path) -> None:
    """Plot the losses on text held out by position, before and after the extension."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (when, losses) in zip(panels, by_position.items()):
        for name, loss in losses.items():
            axes.plot(*loss, **STYLES[name] | {"linewidth": 2}, label=name)
        axes.axvline(CONTEXT, color="gray", linestyle=":")
        axes.set(xlabel="position", title=f"{when} the extension from {CONTEXT} to {EXTENDED:,} tokens")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="loss on text held out (nats per token)")
    panels[0].legend()
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.tight_layout()
    with atomic_output(path, overwrite=True) as file:
        figure.savefig(file, format="png", dpi=110)


def columns(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of the rows that have `key`."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def write_summary(rows: dict[str, list[dict]], by_position: ByPosition, path: Path) -> None:
    """Write the final figures of each run, and those of the extensions, as Markdown tables."""
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
        f"Extended from {CONTEXT} to {EXTENDED:,} tokens, with positions divided by {EXTENDED // CONTEXT}: TAPE trains",
        "its matrices, RoPE LoRA layers, and both the embeddings and norms. The loss on text held out:",
        "",
        f"| position encoding | first {CONTEXT} before | after | later ones before | after |",
        "|---|---|---|---|---|",
    ]
    for name in rows:
        means = []
        for early in (True, False):
            for when in ("before", "after"):
                positions, losses = map(np.array, by_position[when][name])
                means.append(losses[(positions <= CONTEXT) == early].mean())
        lines.append(f"| {name} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    lines += ["", "![loss by position](extended.png)", "", "All results: [report.html](report.html)", ""]
    with atomic_output(path, "w", overwrite=True) as file:
        file.write("\n".join(lines))


if __name__ == "__main__":
    command_line.run(main, interrupted="make demo continues from here")
