"""The demo: from text to two trained models, generated text, both models extended to four times the context, and a task
on which encodings differ, with the commands used on a cluster; all in one picture and on one page.

A stage whose output already exists is skipped. Outputs appear complete or not at all, so an interrupted demo continues
where it stopped.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.evaluation.comparison import NAME, read_comparison
from megatron_tape.evaluation.results import read_results
from megatron_tape.run.curves import read_run
from pretrain.comparison.programs import find_gpus
from pretrain.demo_results import BLANKS, CONTEXT, COPYING, EXTENDED, write_picture, write_summary
from pretrain.stages import Stage, export, exported_from, launcher, leave_gpus_out, run_stages, shortened

RECIPES = {"TAPE": "tape_demo", "RoPE": "rope_demo"}
EXTENSIONS = {"TAPE": "extend/tiny_tape", "RoPE": "extend/tiny_rope"}
MODELS = [(name, context) for context in (CONTEXT, EXTENDED) for name in RECIPES]
EVALUATION = "pretrain/recipes/evaluate/demo.yaml"
PROMPT = "def main("
COPYING_STEPS = 400


def main() -> int:
    """Run the stages one after another; return the exit status."""
    parser = command_line.Parser(description=__doc__)
    whole = command_line.whole_number
    parser.add_argument("--processes", type=whole, help="data-parallel processes (default: 2, or 1 on one core or GPU)")
    directory = Path("runs/demo")
    parser.add_argument(
        "--directory", type=Path, default=directory, help="where everything goes (default: %(default)s)"
    )
    parser.add_argument("--steps", type=whole, help="training steps, with a quicker evaluation (default: the recipes')")
    arguments = parser.parse_args()
    arguments.processes = arguments.processes or min(2, len(find_gpus()[0]) or os.cpu_count() or 1)
    leave_gpus_out(arguments.processes)
    started = time.monotonic()
    directory = arguments.directory
    as_in_recipes = directory == parser.get_default("directory")
    bin_directory = Path(sys.executable).parent
    print(f"Watch the curves grow: {bin_directory}/tensorboard --logdir {directory}", flush=True)
    # An export of an earlier demo may be of fewer steps.
    shutil.rmtree(exported_from(run_of(directory, "TAPE", CONTEXT)), ignore_errors=True)
    stages = [*preparation(directory), *training(arguments, as_in_recipes)]
    stages += evaluation(directory, as_in_recipes, quick=arguments.steps is not None)
    steps = arguments.steps or COPYING_STEPS
    stages += [copying(directory, steps), page(directory, steps)]
    if run_stages(stages, arguments.processes) != 0:
        return 1

    runs = {name: read_run(run_of(directory, name, CONTEXT)) for name in RECIPES}
    by_position = {
        when: {name: loss_by_position(directory, name, context) for name in RECIPES}
        for when, context in (("before", CONTEXT), ("after", EXTENDED))
    }
    copied = copied_symbols(directory, steps)
    write_picture(runs, by_position, copied, directory / "demo.png")
    write_summary(runs, by_position, copied, steps, directory / "summary.md")
    minutes = (time.monotonic() - started) / 60
    print(f"\n{(directory / 'summary.md').read_text(encoding='utf-8')}")
    print(f"The TAPE model for transformers: {exported_from(run_of(directory, 'TAPE', CONTEXT))}")
    print(f"Finished after {minutes:.1f} minutes: {directory}/summary.md and demo.png")
    print(f"All models on one page: {directory}/report.html")
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

    stages = [train(f"training {n}", "pretrain.train", RECIPES[n], run_of(directory, n, CONTEXT)) for n in RECIPES]
    tape = run_of(directory, "TAPE", CONTEXT)
    stages.append(Stage("export of TAPE to Hugging Face", export(tape)))
    generate = [sys.executable, "tools/generate.py", "--model", str(exported_from(tape)), "--prompt", PROMPT]
    stages.append(Stage("a continuation", [*generate, "--trust-remote-code"]))
    for name, recipe in EXTENSIONS.items():
        logs = run_of(directory, name, EXTENDED)
        extend = train(f"extending {name} to {EXTENDED:,} tokens", "pretrain.extend_context", recipe, logs)
        if not as_in_recipes:
            extend.command.extend(["--extension.from", str(run_of(directory, name, CONTEXT))])
        stages.append(extend)
    return stages


def evaluation(directory: Path, as_in_recipe: bool, quick: bool) -> list[Stage]:
    """Return the stages that evaluate the models."""
    stages = []
    for name, context in MODELS:
        command = [sys.executable, "-m", "pretrain.evaluate", "--config", EVALUATION]
        command += ["--model", str(run_of(directory, name, context)), "--label", f"{name} {context:,}"]
        command += [] if as_in_recipe else ["--perplexity.data", str(dataset(directory))]
        command += ["--perplexity.documents", "4"] if quick else []
        stages.append(Stage(f"evaluating {name} of {context:,} tokens", command))
    return stages


def copying(directory: Path, steps: int) -> Stage:
    """Return the stage that trains small models to copy symbols from among blanks."""
    command = [sys.executable, "-m", "pretrain.compare", "--recipe", "pretrain/recipes/compare/selective_copy.yaml"]
    command += ["--encodings", ",".join(COPYING.values()), "--seeds", "1", "--train.steps", str(steps)]
    command += ["--schedule.warmup_steps", str(steps // 10), "--output", str(copying_of(directory, steps))]
    return Stage("copying symbols from among blanks", command)


def copying_of(directory: Path, steps: int) -> Path:
    """Return where the models that copy are trained; those of fewer steps than a whole demo's are kept apart."""
    return directory / ("copying" if steps == COPYING_STEPS else f"copying-{steps}")


def page(directory: Path, steps: int) -> Stage:
    """Return the stage that makes a page of all results."""
    shown = [str(run_of(directory, *model)) for model in MODELS] + [str(copying_of(directory, steps))]
    command = [sys.executable, "-m", "pretrain.report", *shown, "--output", str(directory / "report.html")]
    return Stage("a page of all results", command)


def loss_by_position(directory: Path, name: str, context: int) -> tuple[list[float], list[float]]:
    """Return positions, and the losses there of text held out, for the last step of a run."""
    newest = max((run_of(directory, name, context) / "evaluation").glob("step-*"))
    (losses,) = read_results(newest).tasks["perplexity"].details["loss_by_position"].values()
    return losses["tokens_before"], losses["loss"]


def copied_symbols(directory: Path, steps: int) -> dict[str, dict[str, float]]:
    """Return the accuracies of copying, where the blanks are as many as in training, fewer and more."""
    found = {
        (run.variant, score.group): score.value
        for run in read_comparison(copying_of(directory, steps) / NAME).runs
        for score in run.scores
        if score.metric == "accuracy"
    }
    return {name: {group: found[variant, group] for group in BLANKS} for name, variant in COPYING.items()}


def dataset(directory: Path) -> Path:
    """Return the prefix of the dataset; text and tokenizer lie beside it."""
    return directory / "data" / "stdlib"


def run_of(directory: Path, name: str, context: int) -> Path:
    """Return where a model of this context is trained."""
    return directory / (name.lower() if context == CONTEXT else f"{name.lower()}-{context}")


if __name__ == "__main__":
    command_line.run(main, interrupted="make demo continues from here")
