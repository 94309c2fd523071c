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
from contextlib import suppress
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
from megatron_tape.evaluation.results import Results, read_results, results_file
from megatron_tape.huggingface.export.markdown import plain
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.imports.source_card import CARD, CardFacts
from megatron_tape.io.records import check_shape, parse_record
from megatron_tape.model.names import AVERAGE, kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import PositionEncoding, encoding_of
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
    model, encoding = saved.model, encoding_of(saved.model)
    tape = encoding.exports_to == "tape"
    is_plain = encoding.exports_to == "plain"
    results = options.results
    pretrained = _was_pretrained_here(saved.state)
    tag = encoding.name if encoding.exports_to == "code" else kind
    data = _card_data(
        saved,
        library_name="transformers",
        tags=[tag, "pretrained"] if pretrained else [tag],
        model_name=options.name if results else None,
        eval_results=_scores_for_hub(results) or None,
    )
    card = ModelCard.from_template(
        data,
        _HERE / "model_card.md",
        name=plain(options.name),
        short_positions={"tape": "TAPE", "plain": "RoPE"}.get(
            encoding.exports_to, f"the positional encoding {plain(encoding.name)}"
        ),
        facts=_facts(saved, rows, options.dtype),
        training=_training(saved) if options.with_lora else _BASE,
        scores=_rows_of(results),
        notes=_notes_of(results),
        remote="" if is_plain else ", trust_remote_code=True",
        loader=loader,
        padding=model.vocab_size - rows,
        text_only=pretrained and saved.state["config"]["data"].get("prefix") is not None,
        adapts=tape and options.with_lora,
    )
    _save(card, directory)


def _facts(saved: SavedWeights, rows: int, dtype: str) -> dict[str, object]:
    model, encoding = saved.model, encoding_of(saved.model)
    positions = {
        "tape": f"contextualized equivariant positional encoding ([TAPE]({_PAPER}))",
        "plain": "rotary (RoPE)",
        "code": plain(_described(encoding)),
    }
    parameters = parameter_count(model) - (model.vocab_size - rows) * model.hidden_size * (
        2 - model.tie_embeddings
    )
    return {
        "Parameters": f"{parameters:,}",
        "Positions": positions[encoding.exports_to],
        "Layers": model.num_layers,
        "Hidden size": model.hidden_size,
        "MLP size": model.ffn_hidden_size,
        "Query heads, key/value heads": f"{model.num_attention_heads}, {model.query_groups}",
        "Context": f"{model.seq_length:,} tokens",
        "Vocabulary": f"{rows:,} tokens",
        "Weights": dtype,
    }


def _described(encoding: PositionEncoding) -> str:
    """Return the name of an encoding and the first line of its file's docstring."""
    text = sys.modules[type(encoding).__module__].__doc__ or type(encoding).__doc__ or ""
    if text.strip():
        return f"{encoding.name}: {text.strip().partition(chr(10))[0].rstrip('.')}"
    return encoding.name


def write_adapter_card(
    directory: Path, name: str, saved: SavedWeights, dtype: str, base: str
) -> None:
    """Write README.md of an adapter in peft's format for the base model in the directory `base`."""
    data = _card_data(
        saved, library_name="peft", base_model=None
    )  # the exported base model has no name on the Hub
    card = ModelCard.from_template(
        data,
        _HERE / "adapter_card.md",
        name=plain(name),
        dtype=dtype,
        training=_training(saved),
        base=json.dumps(base),
        remote="" if encoding_of(saved.model).exports_to == "plain" else ", trust_remote_code=True",
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
        raise CheckpointError(
            str(saved.path / STATE),
            f"cannot be used: {error}",
            "export the checkpoint of another step",
        ) from None
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
    state, origin = saved.state, saved.state["progress"].get("origin")
    config = state["config"]
    if "train" not in config:
        return f"Imported from {plain(origin)}; not trained further."
    try:
        facts = {} if origin is None else {"Started from": origin}
        facts |= _extension(config.get("extension", {}))
        if saved.average:
            facts["Weights"] = f"averaged over steps ({config['train']['average']['kind']})"
        facts |= _trained(saved) | _settings(state, config) | _final_losses(saved)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        problem = (
            f"contains invalid settings of the run ({type(error).__name__}: {str(error):.200})"
        )
        raise CheckpointError(str(saved.path / STATE), problem, "choose another step") from None
    rows = [f"| {key} | {plain(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _extension(extension: dict) -> dict[str, object]:
    facts: dict[str, object] = {}
    if extended := extension.get("from"):
        path = Path(extended)
        step = re.fullmatch(r"step-(\d+)", path.name)
        if path.parent.name == "checkpoints":
            run = path.parent.parent
        else:
            run = path.parent
        facts["Extends"] = f"{run.name}, step {int(step[1]):,}" if step else path.name
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
    facts: dict[str, object] = {
        "Trained": ", ".join(f"{kind} ({count:,})" for kind, count in counts.items())
    }
    if "lora" in counts:
        lora = (
            f"rank {extension.lora_rank}, alpha {extension.lora_alpha:g}, for"
            f" {', '.join(extension.lora_targets)}"
        )
        facts["LoRA layers"] = lora
    return facts | {
        "Trained parameters": f"{counts.total():,} of {sum(map(prod, shapes.values())):,}"
    }


def _settings(state: dict, config: dict) -> dict[str, object]:
    train = config["train"]
    optimizer = config["optimizer"]
    schedule = config["schedule"]
    samples = state["consumed_samples"]
    length = config["model"]["seq_length"]
    if ramp := train.get("batch_ramp"):
        ramp_start = f"{ramp['from']} to "
    else:
        ramp_start = ""
    return {
        "Steps": f"{state['step']:,} of {train['steps']:,}",
        "Tokens": (
            f"{samples * length:,} ({ramp_start}{train['global_batch_size']} sequences of"
            f" {length:,} per step)"
        ),
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
    if data["prefix"] is None and data.get("examples") is not None:
        return f"examples of {Path(data['examples']['path']).name}"
    if data["prefix"] is None:
        return ", ".join(
            f"{key} {value}" for key, value in data["generator"].items() if value is not None
        )
    stages = "".join(
        f"; then, for {x['share']:.0%} of the tokens, {_names(x['prefix'])}"
        for x in data.get("stages") or ()
    )
    return _names(data["prefix"]) + stages


def _names(prefix: dict | list | str) -> str:
    prefixes, weights = blend(prefix)
    names = [Path(prefix).name for prefix in prefixes]
    if weights is None:
        shares = names
    else:
        shares = [f"{name} ({w / sum(weights):.0%})" for name, w in zip(names, weights)]
    return ", ".join(shares)


def _final_losses(saved: SavedWeights) -> dict[str, object]:
    """Return the last finite losses that the run logged up to this checkpoint, for the weights that
    are exported.
    """
    names = {LOSS: "Training loss", VALIDATION_LOSS: "Validation loss"}
    if saved.average:
        names = {VALIDATION_LOSS_AVERAGED: "Validation loss"}
    path = saved.path.parent.parent / _METRICS
    found = {}
    for line in read_lines(path):
        with suppress(ValueError):  # a killed process may leave an incomplete line
            row = parse_record(line, dict[str, Any])
            losses = {
                names[key]: row[key]
                for key in names
                if isinstance(row.get(key), float) and isfinite(row[key])
            }
            if row.get("step", inf) <= saved.state["step"]:
                found |= {
                    name: f"{loss:.4f} nats per token, at step {row['step']:,}"
                    for name, loss in losses.items()
                }
    return found


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
            raise FileError(
                str(path), "contains no results", "give the output directory of pretrain.evaluate"
            )
        results = read_results(path)
        if results.model.digest != digest:
            problem = f"contains results of a model other than {checkpoint}"
            raise FileError(
                str(path),
                problem,
                f"evaluate it: python -m pretrain.evaluate TASK --model {checkpoint}",
            )
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
    if results.model.digest == digest:
        return [results]
    return []


def _rows_of(all_results: Sequence[Results]) -> list[list[str]]:
    """Return the rows of the card's table of scores; cells are Markdown."""
    rows = []
    for score in (
        score for results in all_results for task in results.tasks.values() for score in task.scores
    ):
        length = f"{score.length:,}" if score.length else ""
        shown = (score.shown_value, score.shown_interval, score.shown_count)
        cells = [score.task, score.group, length, score.metric, *shown]
        rows.append([plain(cell) for cell in cells])
    return rows


def _notes_of(all_results: Sequence[Results]) -> list[str]:
    """Return notes on the scores in Markdown, without paths of the machine that ran the
    evaluation.
    """
    notes: dict[str, None] = {}
    for name, task in (item for results in all_results for item in results.tasks.items()):
        versions = ", ".join(
            f"{key} {task.versions[key]}" for key in _SHOWN_VERSIONS if key in task.versions
        )
        data = "".join(f", on {Path(path).name}" for path in task.data)
        notes[f"{name}: measured in {task.dtype} on {task.hardware}{data} ({versions})."] = None
        notes |= {f"{name}: {_FOLDERS.sub('', note)}": None for note in task.notes}
    return [plain(note) for note in notes]


def _scores_for_hub(all_results: Sequence[Results]) -> list[EvalResult]:
    """Return all scores in the format of the Hub's metadata."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.task,
            dataset_name=f"{score.task}: {score.group}" if score.group else score.task,
            dataset_config=score.group or None,
            metric_type=score.metric.replace(" ", "_"),
            metric_name=score.metric + (f" at {score.length:,} tokens" if score.length else ""),
            metric_value=score.value,
        )
        for results in all_results
        for task in results.tasks.values()
        for score in task.scores
    ]
