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
from megatron_tape.config.schema import ModelConfig
from megatron_tape.evaluation.results import Results, read_results, results_file
from megatron_tape.huggingface.export.markdown import escape_markdown
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
_TEMPLATES = Path(__file__).parent
_PAPER = "https://arxiv.org/abs/2501.00712"
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for matrices, AdamW for the rest"}
# The section about the training of a base model that is exported with an adapter.
_BASE_MODEL_NOTE = (
    "This is the base model of an adapter, without LoRA layers. The adapter's card describes the"
    " training."
)
# Packages whose versions the notes on scores show.
_SHOWN_VERSIONS = ("torch", "transformers", "lm_eval", "megatron-tape", "commit")
_ABSOLUTE_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/]+/)+")
"""The folders of an absolute path, without its last component."""


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
    model_type: str,
    saved: SavedWeights,
    options: ExportOptions,
    vocab_size: int,
    tokenizer_class: str | None,
) -> None:
    """Write the README.md of an exported model.

    `model_type` is its type in transformers, `vocab_size` the number of its embedding rows, and
    `tokenizer_class` the name of the class that loads its tokenizer, or None if the export has no
    tokenizer.
    """
    encoding = encoding_of(saved.model)
    # What is exported: "tape", the TAPE architecture; "plain", an architecture of transformers with
    # RoPE; "code", an architecture that runs the encoding's file.
    export_format = str(encoding.exports_to)
    # Tags make a model found on the Hub. All exports with "code" have the same model_type.
    tags = [encoding.name if export_format == "code" else model_type]
    pretrained = _was_pretrained_here(saved.state)
    if pretrained:
        tags.append("pretrained")

    position_names = {
        "tape": "TAPE",
        "plain": "RoPE",
        "code": f"the positional encoding {escape_markdown(encoding.name)}",
    }

    card = ModelCard.from_template(
        _card_data(saved, library_name="transformers", tags=tags),
        _TEMPLATES / "model_card.md",
        name=escape_markdown(options.name),
        position_name=position_names[export_format],
        facts=_model_facts(saved, vocab_size, options.dtype),
        training=_training_table(saved) if options.with_lora else _BASE_MODEL_NOTE,
        scores=_score_rows(options.results),
        notes=_score_notes(options.results),
        remote_code_argument=_remote_code_argument(saved),
        tokenizer_class=tokenizer_class,
        needs_transformers_in_vllm=(
            model_type in ("qwen2", "qwen3") and saved.model.full_attention_every is not None
        ),
        omitted_rows=saved.model.vocab_size - vocab_size,
        # The card warns that a model pretrained on plain text follows no instructions.
        text_only=pretrained and saved.state["config"]["data"].get("prefix") is not None,
        # Only for TAPE's matrices does the card say how to train them with peft.
        explains_peft=export_format == "tape" and options.with_lora,
    )
    _write(card, directory)


def _model_facts(saved: SavedWeights, vocab_size: int, dtype: str) -> dict[str, object]:
    """Return the rows of the card's first table: values in Markdown by their labels.

    `vocab_size` is the number of exported embedding rows, and `dtype` that of the weights.
    """
    model = saved.model
    encoding = encoding_of(model)
    # The file of an encoding begins with a docstring, whose first line describes the encoding.
    file_docstring = sys.modules[type(encoding).__module__].__doc__ or ""
    description, _, _ = file_docstring.strip().partition("\n")
    # The cell of the row "Positions", by format of the export.
    positions = {
        "tape": f"contextualized equivariant positional encoding ([TAPE]({_PAPER}))",
        "plain": "rotary (RoPE)",
        "code": escape_markdown(f"{encoding.name}: {description.rstrip('.')}"),
    }
    position = positions[str(encoding.exports_to)]
    # Only some encodings can be scaled.
    scaling_factor = getattr(model.position, "rope_scaling_factor", 1.0)
    if scaling_factor != 1.0:
        position += f", scaled by {scaling_factor:g} ({model.position.rope_scaling_type})"

    context = f"{model.seq_length:,} tokens"
    trained_length = saved.state["config"]["model"]["seq_length"]
    if trained_length != model.seq_length:
        context += f"; trained with {trained_length:,}, the scaling was chosen for the export"

    # Exports omit the rows that pad the embedding and, unless it is the same, the output layer.
    padded_matrices = 1 if model.tie_embeddings else 2
    omitted = padded_matrices * (model.vocab_size - vocab_size) * model.hidden_size
    return {
        "Parameters": f"{parameter_count(model) - omitted:,}",
        "Positions": position,
        "Layers": model.num_layers,
        **_layer_facts(model),
        "Hidden size": model.hidden_size,
        "MLP size": model.ffn_hidden_size,
        "Query heads, key/value heads": f"{model.num_attention_heads}, {model.query_groups}",
        "Context": context,
        "Vocabulary": f"{vocab_size:,} tokens",
        "Weights": dtype,
    }


def _layer_facts(model: ModelConfig) -> dict[str, str]:
    """Return rows of the card's first table about settings that only some layers have, by their
    labels.
    """
    facts = {}
    if model.sliding_window is not None:
        layers = "all layers"
        if model.full_attention_every is not None:
            layers += f" except {_every_nth_layer(model, model.full_attention_every)}"
        facts["Sliding window"] = f"{model.sliding_window:,} tokens in {layers}"
    if model.layers_without_positions is not None:
        facts["Without positions"] = _every_nth_layer(model, model.layers_without_positions)
    if model.temperature_scale:
        facts["Temperature of queries without positions"] = (
            f"1 + {model.temperature_scale:g} log(floor((p + 1) / {model.temperature_floor_scale})"
            " + 1) at position p"
        )
    return facts


def _every_nth_layer(model: ModelConfig, interval: int) -> str:
    """Return the numbers of every n-th layer for the card, where n is `interval`."""
    numbers = [str(number) for number in range(interval, model.num_layers + 1, interval)]
    if len(numbers) > 3:
        numbers[2:-1] = ["..."]
    noun = "layer" if len(numbers) == 1 else "layers"
    return f"{noun} {', '.join(numbers)} (counted from 1)"


def _remote_code_argument(saved: SavedWeights) -> str:
    """Return the argument of `from_pretrained`, with a leading comma, that lets transformers run
    the code of an export; "" if it has no code.
    """
    if encoding_of(saved.model).exports_to == "plain":
        return ""
    return ", trust_remote_code=True"


def write_adapter_card(
    directory: Path,
    name: str,
    saved: SavedWeights,
    dtype: str,
) -> None:
    """Write the README.md of an adapter in peft's format, in `directory`.

    `name` is the adapter's name, and `dtype` that of its weights. Its base model is in `directory`,
    too.
    """
    card = ModelCard.from_template(
        # Not the name of an imported model: the adapter's base model is the exported one, which is
        # not on the Hub.
        _card_data(saved, library_name="peft", base_model=None),
        _TEMPLATES / "adapter_card.md",
        name=escape_markdown(name),
        dtype=dtype,
        training=_training_table(saved),
        remote_code_argument=_remote_code_argument(saved),
    )
    _write(card, directory)


def _card_data(saved: SavedWeights, **facts: Any) -> ModelCardData:
    """Return the card's metadata: `facts`, and the license, languages and name of an imported model
    if known.

    `facts` have the keys of the Hub's metadata, and override what is known.
    """
    known = saved.state["progress"].get("card", {})
    imported = {key: known[key] for key in CardFacts.__annotations__ if key in known}
    return ModelCardData(**{"pipeline_tag": "text-generation"} | imported | facts)


def _write(card: ModelCard, directory: Path) -> None:
    """Write a card to README.md, with one line break at its end."""
    (directory / CARD).write_text(card.content.rstrip() + "\n", encoding="utf-8")


def _was_pretrained_here(state: dict) -> bool:
    """Return whether training started from random weights. `state` is that of the checkpoint."""
    # An imported model has an origin, and an extension starts from another model.
    config = state["config"]
    return (
        "train" in config
        and state["progress"].get("origin") is None
        and config.get("extension", {}).get("from") is None
    )


def _training_table(saved: SavedWeights) -> str:
    """Return a Markdown table of the run's start, trained parameters, settings and losses; a
    sentence for a checkpoint that has only been imported.
    """
    state = saved.state
    config = state["config"]
    origin = state["progress"].get("origin")
    if "train" not in config:
        return f"Imported from {escape_markdown(origin)}; not trained further."

    facts: dict[str, object] = {}
    if origin is not None:
        facts["Started from"] = origin
    facts |= _extension_facts(config.get("extension", {}))
    if saved.average:
        facts["Weights"] = f"averaged over steps ({config['train']['average']['kind']})"
    facts |= _trained_parameters(saved) | _training_settings(state, config) | _final_losses(saved)
    rows = [f"| {key} | {escape_markdown(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _final_losses(saved: SavedWeights) -> dict[str, str]:
    """Return the last losses that the run logged up to this checkpoint, by their labels in the
    card.
    """
    labels = {LOSS: "Training loss", VALIDATION_LOSS: "Validation loss"}
    # The training loss is that of the weights before averaging.
    if saved.average:
        labels = {VALIDATION_LOSS_AVERAGED: "Validation loss"}

    losses = {}
    # The checkpoint is in RUN/checkpoints/step-N, and the metrics are in RUN.
    for line in read_lines(saved.path.parents[1] / METRICS):
        with suppress(ValueError):  # a killed process may leave an incomplete line
            row = parse_record(line, dict[str, Any])
            # Later lines replace earlier ones, up to the step of this checkpoint.
            for metric, label in labels.items():
                if row.get(metric) and row["step"] <= saved.state["step"]:
                    losses[label] = f"{row[metric]:.4f} nats per token, at step {row['step']:,}"
    return losses


def _extension_facts(extension: dict) -> dict[str, object]:
    """Return which model the run extended and how, for the card; {} if it extended none.

    `extension` is the run's section of that name.
    """
    facts: dict[str, object] = {}
    if extended := extension.get("from"):
        # Only names, since paths of the machine mean nothing to readers of the card.
        path = Path(extended)
        facts["Extends"] = path.name
        # A checkpoint in RUN/checkpoints/step-N, or RUN/step-N.
        if step := re.fullmatch(r"step-(\d+)", path.name):
            run = path.parent
            if run.name == "checkpoints":
                run = run.parent
            facts["Extends"] = f"{run.name}, step {int(step[1]):,}"
    if extension.get("attention", "full") != "full":
        facts["Attention in training"] = extension["attention"]
    return facts


def _trained_parameters(saved: SavedWeights) -> dict[str, object]:
    """Return the number of trained parameters of each kind, and the settings of LoRA, for the card;
    {} if all parameters were trained.
    """
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


def _training_settings(state: dict, config: dict) -> dict[str, object]:
    """Return the settings of the run by their labels in the card. `config` is that in the
    checkpoint's `state`.
    """
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
        "Data": _describe_data(config["data"]),
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


def _describe_data(data: dict) -> str:
    """Return the names of the training datasets, without their paths, with their shares.

    `data` is the run's section of that name.
    """
    if data.get("examples") is not None:
        return f"examples of {Path(data['examples']['path']).name}"
    # Generated data has no files.
    if data["prefix"] is None:
        settings = data["generator"].items()
        return ", ".join(f"{key} {value}" for key, value in settings if value is not None)
    text = _dataset_names(data["prefix"])
    for stage in data.get("stages") or ():
        text += f"; then, for {stage['share']:.0%} of the tokens, {_dataset_names(stage['prefix'])}"
    return text


def _dataset_names(prefix: dict | list | str) -> str:
    """Return the names in a setting such as `data.prefix`, with shares if it has weights."""
    prefixes, weights = blend(prefix)
    names = [Path(prefix).name for prefix in prefixes]
    if weights is not None:
        total = sum(weights)
        names = [f"{name} ({w / total:.0%})" for name, w in zip(names, weights)]
    return ", ".join(names)


def find_results(checkpoint: Path, average: bool) -> list[Results]:
    """Return the results that `pretrain.evaluate` wrote to the run's directory for a checkpoint
    or, with `average`, for its averaged weights.

    The list is empty if there are none, if they cannot be read, or if they are for other weights.
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


def _score_rows(all_results: Sequence[Results]) -> list[list[str]]:
    """Return the rows of the card's table of scores. Cells are Markdown, in the order of the
    columns in model_card.md.
    """
    rows = []
    for results in all_results:
        for task in results.tasks.values():
            for score in task.scores:
                length = f"{score.length:,}" if score.length else ""
                shown = (score.shown_value, score.shown_interval, score.shown_count)
                cells = [score.task, score.group, length, score.metric, *shown]
                rows.append([escape_markdown(cell) for cell in cells])
    return rows


def _score_notes(all_results: Sequence[Results]) -> list[str]:
    """Return notes on the scores in Markdown, without paths of the machine that ran the
    evaluation.
    """
    # A dictionary keeps the order, but no duplicates.
    notes: dict[str, None] = {}
    for results in all_results:
        for name, task in results.tasks.items():
            versions = ", ".join(
                f"{key} {task.versions[key]}" for key in _SHOWN_VERSIONS if key in task.versions
            )
            data = "".join(f", on {Path(path).name}" for path in task.data)
            measured = f"measured in {task.dtype} on {task.hardware}{data} ({versions})."
            for note in (measured, *(_ABSOLUTE_FOLDERS.sub("", note) for note in task.notes)):
                notes[escape_markdown(f"{name}: {note}")] = None
    return list(notes)
