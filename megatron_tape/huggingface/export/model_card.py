"""Write the model card (README.md) of an exported model or adapter: facts, training, evaluation and
usage.

The templates are model_card.md and adapter_card.md. huggingface_hub writes the metadata for the
Hub.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from megatron_tape import command_line
from megatron_tape.checkpoint.locate import model_digest
from megatron_tape.config.data import blend
from megatron_tape.evaluation.results import Results, read_results, results_file
from megatron_tape.huggingface.export.markdown import plain
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.imports.source_card import CARD, CardFacts
from megatron_tape.io.records import parse_record
from megatron_tape.model.names import AVERAGE, kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import encoding_of
from megatron_tape.run.curves import METRICS
from megatron_tape.run.metrics import LOSS, VALIDATION_LOSS, VALIDATION_LOSS_AVERAGED, read_lines

CARD_SENTENCES = (
    "A decoder-only language model with ",
    "The trained parameters of a language model as a peft adapter",
)
"""The beginnings of the cards of models and adapters."""
_HERE = Path(__file__).parent
_PAPER = "https://arxiv.org/abs/2501.00712"
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

    short_positions = {
        "tape": "TAPE",
        "plain": "RoPE",
        "code": f"the positional encoding {plain(encoding.name)}",
    }

    card = ModelCard.from_template(
        _card_data(saved, library_name="transformers", tags=tags),
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
    directory: Path,
    name: str,
    saved: SavedWeights,
    dtype: str,
) -> None:
    """Write README.md of an adapter in peft's format for the base model in its directory `base`."""
    card = ModelCard.from_template(
        # The exported base model has no name on the Hub.
        _card_data(saved, library_name="peft", base_model=None),
        _HERE / "adapter_card.md",
        name=plain(name),
        dtype=dtype,
        training=_training(saved),
        remote=_remote(saved),
    )
    _save(card, directory)


def _card_data(saved: SavedWeights, **facts: Any) -> ModelCardData:
    """Return the card's metadata: `facts`, and the license, languages and name of an imported model
    if known.
    """
    known = saved.state["progress"].get("card", {})
    imported = {key: known[key] for key in CardFacts.__annotations__ if key in known}
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
    """Return a Markdown table of the run's start, trained parameters and settings."""
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


def _final_losses(saved: SavedWeights) -> dict[str, str]:
    """Return the last losses that the run logged up to this checkpoint."""
    names = {LOSS: "Training loss", VALIDATION_LOSS: "Validation loss"}
    if saved.average:
        names = {VALIDATION_LOSS_AVERAGED: "Validation loss"}

    losses = {}
    for line in read_lines(saved.path.parents[1] / METRICS):
        with suppress(ValueError):  # a killed process may leave an incomplete line
            row = parse_record(line, dict[str, Any])
            for key, name in names.items():
                if row.get(key) and row["step"] <= saved.state["step"]:
                    losses[name] = f"{row[key]:.4f} nats per token, at step {row['step']:,}"
    return losses


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
    counts = Counter()
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


def find_results(checkpoint: Path, average: bool = False) -> list[Results]:
    """Return the results that `pretrain.evaluate` wrote to the run's directory for a checkpoint
    or, with `average`, for its averaged weights.
    """
    # The default of evaluation.model_source: `evaluation/STEP` in the run's directory.
    step = f"{checkpoint.name}-{AVERAGE}" if average else checkpoint.name
    path = results_file(checkpoint.parent.parent / "evaluation" / step)
    if not path.is_file():
        return []
    try:
        results = read_results(path)
    except (ValueError, OSError) as error:
        command_line.log(f"the model card has no evaluation results: {error}")
        return []
    if results.model.digest != model_digest(checkpoint, average):
        return []
    return [results]


def _rows_of(all_results: Sequence[Results]) -> list[list[str]]:
    """Return the rows of the card's table of scores; cells are Markdown."""
    rows = []
    for results in all_results:
        for task in results.tasks.values():
            for score in task.scores:
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
