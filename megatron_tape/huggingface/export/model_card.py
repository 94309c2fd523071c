"""Write the model card (README.md) of an exported model or adapter: facts, training, evaluation and
usage.

The templates are model_card.md and adapter_card.md. huggingface_hub writes the metadata for the
Hub.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import STATE
from megatron_tape.checkpoint.locate import model_digest
from megatron_tape.config.data import blend
from megatron_tape.errors import CheckpointError, FileError
from megatron_tape.evaluation.results import Results, Score, read_results, results_file
from megatron_tape.huggingface.export.markdown import plain
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.imports.source_card import CARD, CardFacts
from megatron_tape.io.records import check_shape, parse_record
from megatron_tape.model.names import AVERAGE, kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import encoding_of
from megatron_tape.run.metrics import LOSS, VALIDATION_LOSS, VALIDATION_LOSS_AVERAGED, read_lines

CARD_SENTENCES = (
    "A decoder-only language model with ",
    "The trained parameters of a language model as a peft adapter",
)
"""The beginnings of the cards of models and adapters."""
_HERE = Path(__file__).parent
_PAPER = "https://arxiv.org/abs/2501.00712"
_METRICS = "metrics.jsonl"
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for matrices, AdamW for the rest"}
_BASE = (
    "This is the base model of an adapter, without LoRA layers. The adapter's card describes the"
    " training."
)
_SHOWN_VERSIONS = ("torch", "transformers", "lm_eval", "megatron-tape", "commit")
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/]+/)+")


@dataclass(frozen=True)
class ExportOptions:
    """Options of the export of a whole model; see `to_transformers.export`."""

    name: str
    dtype: str
    tokenizer: str | None
    max_shard_size: int = 5_000_000_000
    with_lora: bool = True
    """Whether to merge LoRA layers into the matrices; otherwise they are left out, for the base
    model of an adapter.
    """
    results: Sequence[Results] = ()
    """Evaluation results to show in the model card."""


def write_card(
    directory: Path,
    kind: str,
    saved: SavedWeights,
    options: ExportOptions,
    rows: int,
    loader: str | None,
) -> None:
    """Write the README.md of an exported model.

    `kind` is its `model_type` in transformers, `rows` the number of its embedding rows, and
    `loader` the name of the class that loads its tokenizer, or None if the export has no tokenizer.
    """
    encoding = encoding_of(saved.model)
    tag = encoding.name if encoding.exports_to == "code" else kind
    tags = [tag]
    pretrained = _was_pretrained_here(saved.state)
    if pretrained:
        tags.append("pretrained")
    facts: dict[str, Any] = {"library_name": "transformers", "tags": tags}
    if options.results:
        facts |= {"model_name": options.name, "eval_results": _scores_for_hub(options.results)}
    short_positions = {
        "tape": "TAPE",
        "plain": "RoPE",
        "code": f"the positional encoding {plain(encoding.name)}",
    }
    card = ModelCard.from_template(
        _card_data(saved, **facts),
        _HERE / "model_card.md",
        name=plain(options.name),
        short_positions=short_positions[str(encoding.exports_to)],
        facts=_facts(saved, rows, options.dtype),
        training=_training(saved) if options.with_lora else _BASE,
        scores=_rows_of(options.results),
        notes=_notes_of(options.results),
        remote=_remote(saved),
        loader=loader,
        padding=saved.model.vocab_size - rows,
        text_only=pretrained and saved.state["config"]["data"].get("prefix") is not None,
        adapts=encoding.exports_to == "tape" and options.with_lora,
    )
    _save(card, directory)


def _facts(saved: SavedWeights, rows: int, dtype: str) -> dict[str, object]:
    model = saved.model
    encoding = encoding_of(model)
    described = (sys.modules[type(encoding).__module__].__doc__ or "").strip().partition("\n")[0]
    positions = {
        "tape": f"contextualized equivariant positional encoding ([TAPE]({_PAPER}))",
        "plain": "rotary (RoPE)",
        "code": plain(f"{encoding.name}: {described.rstrip('.')}"),
    }
    matrices = 1 if model.tie_embeddings else 2
    padding = matrices * (model.vocab_size - rows) * model.hidden_size
    return {
        "Parameters": f"{parameter_count(model) - padding:,}",
        "Positions": positions[str(encoding.exports_to)],
        "Layers": model.num_layers,
        "Hidden size": model.hidden_size,
        "MLP size": model.ffn_hidden_size,
        "Query heads, key/value heads": f"{model.num_attention_heads}, {model.query_groups}",
        "Context": f"{model.seq_length:,} tokens",
        "Vocabulary": f"{rows:,} tokens",
        "Weights": dtype,
    }


def _remote(saved: SavedWeights) -> str:
    """Return the argument that lets transformers run the code of an export, if it has any."""
    if encoding_of(saved.model).exports_to == "plain":
        return ""
    return ", trust_remote_code=True"


def write_adapter_card(
    directory: Path, name: str, saved: SavedWeights, dtype: str, base: str
) -> None:
    """Write README.md of an adapter in peft's format for the base model in the directory `base`."""
    card = ModelCard.from_template(
        # The exported base model has no name on the Hub.
        _card_data(saved, library_name="peft", base_model=None),
        _HERE / "adapter_card.md",
        name=plain(name),
        dtype=dtype,
        training=_training(saved),
        base=json.dumps(base),
        remote=_remote(saved),
    )
    _save(card, directory)


def _card_data(saved: SavedWeights, **facts: Any) -> ModelCardData:
    """Return the card's metadata: `facts`, and the license, languages and name of an imported model
    if known.
    """
    known = saved.state["progress"].get("card", {})
    imported = {key: known[key] for key in CardFacts.__annotations__ if key in known}
    try:
        check_shape(imported, CardFacts, "progress.card")
    except ValueError as error:
        fix = "export the checkpoint of another step"
        raise CheckpointError(str(saved.path / STATE), f"cannot be used: {error}", fix) from None
    return ModelCardData(**{"pipeline_tag": "text-generation"} | imported | facts)


def _save(card: ModelCard, directory: Path) -> None:
    (directory / CARD).write_text(card.content.rstrip() + "\n", encoding="utf-8")


def _was_pretrained_here(state: dict) -> bool:
    """Return whether training started from random weights."""
    config = state["config"]
    return (
        "train" in config
        and state["progress"].get("origin") is None
        and config.get("extension", {}).get("from") is None
    )


def _training(saved: SavedWeights) -> str:
    """Return a Markdown table of the run's start, trained parameters, settings and losses. Raises
    CheckpointError.
    """
    state = saved.state
    config = state["config"]
    origin = state["progress"].get("origin")
    if "train" not in config:
        return f"Imported from {plain(origin)}; not trained further."

    facts: dict[str, object] = {}
    if origin is not None:
        facts["Started from"] = origin
    facts |= _extension(config.get("extension", {}))
    if saved.average:
        facts["Weights"] = f"averaged over steps ({config['train']['average']['kind']})"
    facts |= _trained(saved) | _settings(state, config) | _final_losses(saved)
    rows = [f"| {key} | {plain(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _extension(extension: dict) -> dict[str, object]:
    facts: dict[str, object] = {}
    if extended := extension.get("from"):
        path = Path(extended)
        facts["Extends"] = path.name
        if step := re.fullmatch(r"step-(\d+)", path.name):
            run = path.parent
            if run.name == "checkpoints":
                run = run.parent
            facts["Extends"] = f"{run.name}, step {int(step[1]):,}"
    if extension.get("attention", "full") != "full":
        facts["Attention in training"] = extension["attention"]
    return facts


def _trained(saved: SavedWeights) -> dict[str, object]:
    """Return the number of trained parameters of each kind; nothing if all were trained."""
    shapes = parameter_shapes(saved.model, saved.extension)
    extension = saved.extension
    if len(saved.trained) == len(shapes):
        return {}
    counts: Counter[str] = Counter()
    for name in saved.trained:
        counts[kind_of(name)] += prod(shapes[name])
    total = sum(map(prod, shapes.values()))
    facts: dict[str, object] = {
        "Trained": ", ".join(f"{kind} ({count:,})" for kind, count in counts.items())
    }
    if "lora" in counts:
        facts["LoRA layers"] = (
            f"rank {extension.lora_rank}, alpha {extension.lora_alpha:g}, for"
            f" {', '.join(extension.lora_targets)}"
        )
    facts["Trained parameters"] = f"{counts.total():,} of {total:,}"
    return facts


def _settings(state: dict, config: dict) -> dict[str, object]:
    train = config["train"]
    optimizer = config["optimizer"]
    schedule = config["schedule"]
    length = config["model"]["seq_length"]
    tokens = state["consumed_samples"] * length
    batch = str(train["global_batch_size"])
    if ramp := train.get("batch_ramp"):
        batch = f"{ramp['from']} to {batch}"
    return {
        "Steps": f"{state['step']:,} of {train['steps']:,}",
        "Tokens": f"{tokens:,} ({batch} sequences of {length:,} per step)",
        "Data": _data(config["data"]),
        "Optimizer": (
            f"{_OPTIMIZERS[optimizer['kind']]}, weight decay {optimizer['weight_decay']:g}, "
            f"betas {optimizer['beta1']:g} and {optimizer['beta2']:g}"
        ),
        "Learning rate": (
            f"{optimizer['lr']:g}, {schedule['kind']}, {schedule['warmup_steps']:,} warm-up steps"
        ),
        "Precision": train["precision"],
        "Seed": train["seed"],
    }


def _data(data: dict) -> str:
    """Describe the training data by the names of datasets, without their paths."""
    if data.get("examples") is not None:
        return f"examples of {Path(data['examples']['path']).name}"
    if data["prefix"] is None:
        settings = data["generator"].items()
        return ", ".join(f"{key} {value}" for key, value in settings if value is not None)
    text = _names(data["prefix"])
    for stage in data.get("stages") or ():
        text += f"; then, for {stage['share']:.0%} of the tokens, {_names(stage['prefix'])}"
    return text


def _names(prefix: dict | list | str) -> str:
    prefixes, weights = blend(prefix)
    names = [Path(prefix).name for prefix in prefixes]
    if weights is not None:
        total = sum(weights)
        names = [f"{name} ({w / total:.0%})" for name, w in zip(names, weights)]
    return ", ".join(names)


def _final_losses(saved: SavedWeights) -> dict[str, object]:
    """Return the last finite losses that the run logged up to this checkpoint, for the weights that
    are exported.
    """
    names = {LOSS: "Training loss", VALIDATION_LOSS: "Validation loss"}
    if saved.average:
        names = {VALIDATION_LOSS_AVERAGED: "Validation loss"}
    losses: dict[str, object] = {}
    for line in read_lines(saved.path.parent.parent / _METRICS):
        try:
            row = parse_record(line, dict[str, Any])
        except ValueError:  # a killed process may leave an incomplete line
            continue
        if row.get("step", inf) > saved.state["step"]:
            continue
        for key, name in names.items():
            if isfinite(row.get(key, inf)):
                losses[name] = f"{row[key]:.4f} nats per token, at step {row['step']:,}"
    return losses


def find_results(
    checkpoint: Path, given: Sequence[str | Path] = (), average: bool = False
) -> list[Results]:
    """Return the evaluation results of a checkpoint or, with `average`, of its averaged weights.

    Reads the directories or files `given`; by default, the directory to which `pretrain.evaluate`
    writes the results of this checkpoint. Raises FileError if given results cannot be read or
    belong to another model.
    """
    digest = model_digest(checkpoint, average)
    found = []
    for path in map(Path, given):
        if not results_file(path).is_file():
            fix = "give the output directory of pretrain.evaluate"
            raise FileError(str(path), "contains no results", fix)
        results = read_results(path)
        if results.model.digest != digest:
            problem = f"contains results of a model other than {checkpoint}"
            fix = f"evaluate it: python -m pretrain.evaluate TASK --model {checkpoint}"
            raise FileError(str(path), problem, fix)
        found.append(results)

    # The default of evaluation.model_source: `evaluation/STEP` in the run's directory.
    step = f"{checkpoint.name}-{AVERAGE}" if average else checkpoint.name
    default = results_file(checkpoint.parent.parent / "evaluation" / step)
    if given or not default.is_file():
        return found
    try:
        results = read_results(default)
    except (ValueError, OSError) as error:
        command_line.log(f"the model card has no evaluation results: {error}")
        return []
    return [results] if results.model.digest == digest else []


def _rows_of(all_results: Sequence[Results]) -> list[list[str]]:
    """Return the rows of the card's table of scores; cells are Markdown."""
    rows = []
    for score in _scores(all_results):
        length = f"{score.length:,}" if score.length else ""
        shown = (score.shown_value, score.shown_interval, score.shown_count)
        cells = [score.task, score.group, length, score.metric, *shown]
        rows.append([plain(cell) for cell in cells])
    return rows


def _scores(all_results: Sequence[Results]) -> list[Score]:
    tasks = [task for results in all_results for task in results.tasks.values()]
    return [score for task in tasks for score in task.scores]


def _notes_of(all_results: Sequence[Results]) -> list[str]:
    """Return notes on the scores in Markdown, without paths of the machine that ran the
    evaluation.
    """
    notes: dict[str, None] = {}
    for results in all_results:
        for name, task in results.tasks.items():
            versions = ", ".join(
                f"{key} {task.versions[key]}" for key in _SHOWN_VERSIONS if key in task.versions
            )
            data = "".join(f", on {Path(path).name}" for path in task.data)
            measured = f"measured in {task.dtype} on {task.hardware}{data} ({versions})."
            for note in (measured, *(_FOLDERS.sub("", note) for note in task.notes)):
                notes[plain(f"{name}: {note}")] = None
    return list(notes)


def _scores_for_hub(all_results: Sequence[Results]) -> list[EvalResult]:
    """Return all scores in the format of the Hub's metadata."""
    results = []
    for score in _scores(all_results):
        length = f" at {score.length:,} tokens" if score.length else ""
        group = f": {score.group}" if score.group else ""
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=score.task,
                dataset_name=score.task + group,
                dataset_config=score.group or None,
                metric_type=score.metric.replace(" ", "_"),
                metric_name=score.metric + length,
                metric_value=score.value,
            )
        )
    return results
