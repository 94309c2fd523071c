"""How a checkpoint was trained: the facts and final losses that a model card gives."""

import re
from collections import Counter
from collections.abc import Collection
from math import isfinite, prod
from pathlib import Path

from typing_extensions import TypedDict

from megatron_tape.checkpoint.directories import STATE
from megatron_tape.config.data import blend
from megatron_tape.errors import CheckpointError
from megatron_tape.huggingface.export.markdown import plain
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.io.records import parse_record
from megatron_tape.model.names import kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.text import counted

_METRICS = "metrics.jsonl"
_LINE = 8 << 20
_LOSSES = {"loss": "Training loss", "validation_loss": "Validation loss"}
_LOSSES_OF_AVERAGE = {"validation_loss_average": "Validation loss"}


class _Row(TypedDict):
    step: int


def last_logged(checkpoint: Path, state: dict) -> dict[str, tuple[int, float]]:
    """Return the last finite value of each loss, with its step, that the run logged up to this checkpoint.

    Looks for `metrics.jsonl` above the checkpoints and where the run's settings say; returns nothing without it.
    """
    directories = [checkpoint.parent.parent]
    if configured := state["config"].get("logging", {}).get("directory"):
        directories.append(Path(configured))
    path = next((place / _METRICS for place in directories if (place / _METRICS).is_file()), None)
    if path is None:
        return {}
    found: dict[str, tuple[int, float]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(_LINE):
            try:
                row = parse_record(line, _Row)
            except ValueError:  # a line that a killed process left unfinished
                continue
            if (step := row["step"]) <= state["step"]:
                losses = {key: row[key] for key in (*_LOSSES, *_LOSSES_OF_AVERAGE) if key in row}
                found |= {k: (step, v) for k, v in losses.items() if type(v) in (int, float) and isfinite(v)}
    return found


def base_of_adapter(saved: SavedWeights) -> str:
    """Say in what the model that an adapter adds to differs from the one that was trained."""
    text = "This is the model that an adapter adds to."
    if not saved.extension.adds_lora:
        return text
    if not (kinds := ", ".join(_own_kinds(saved))):
        return f"{text} The LoRA layers are not part of it, and nothing else was trained."
    return (
        f"{text} It holds what was trained beside the LoRA layers ({kinds}), but not these layers: only "
        "together with the adapter is it the model that was trained."
    )


def _own_kinds(saved: SavedWeights) -> list[str]:
    """Return which kinds of parameters were trained, but for LoRA layers."""
    return [kind for kind in dict.fromkeys(map(kind_of, saved.trained)) if kind != "lora"]


def training_facts(saved: SavedWeights, without: Collection[str] = ()) -> str:
    """Return a table of what was trained but for the kinds in `without`, from what, and how.

    Raises CheckpointError if the settings are not those of a run.
    """
    state, origin = saved.state, saved.state["progress"].get("origin")
    config = state["config"]
    if "train" not in config:
        return f"Imported from {plain(origin)}; not trained further."
    try:
        start = {} if origin is None else {"Started from": origin}
        start |= _extension(config.get("extension", {}))
        if without and not _own_kinds(saved):
            return _table(start)
        if saved.average:
            start["Weights"] = f"averaged over steps ({config['train']['average']['kind']})"
        return _table(start | _trained(saved, without) | _settings(state, config))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        problem = f"holds settings that no run can have had ({type(error).__name__}: {str(error):.200})"
        raise CheckpointError(str(saved.path / STATE), problem, "choose another step") from None


def _extension(extension: dict) -> dict[str, object]:
    facts: dict[str, object] = {}
    if extended := extension.get("from"):
        path = Path(extended)
        step = re.fullmatch(r"step-(\d+)", path.name)
        run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        facts["Extends"] = f"{run.name}, step {int(step[1]):,}" if step else path.name
    if extension.get("attention", "full") != "full":
        facts["Attention in training"] = extension["attention"]
    return facts


def _trained(saved: SavedWeights, without: Collection[str]) -> dict[str, object]:
    """Return how many parameters of each kind were trained, if some were not; kinds in `without` count as absent."""
    shapes = parameter_shapes(saved.model, saved.extension)
    numbers = {name: prod(shape) for name, shape in shapes.items() if kind_of(name) not in without}
    trained = [name for name in saved.trained if name in numbers]
    if len(trained) == len(numbers):
        return {}
    counts: Counter[str] = Counter()
    for name in trained:
        counts[kind_of(name)] += numbers[name]
    facts: dict[str, object] = {"Trained": ", ".join(f"{kind} ({count:,})" for kind, count in counts.items())}
    extension = saved.extension
    if "lora" in counts:
        lora = f"rank {extension.lora_rank}, alpha {extension.lora_alpha:g}, for {', '.join(extension.lora_targets)}"
        facts["LoRA layers"] = lora
    return facts | {"Trained parameters": f"{counts.total():,} of {sum(numbers.values()):,}"}


_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for matrices, AdamW for the rest"}


def _settings(state: dict, config: dict) -> dict[str, object]:
    train, optimizer, schedule = config["train"], config["optimizer"], config["schedule"]
    samples, length = state["consumed_samples"], config["model"]["seq_length"]
    ramp = train.get("batch_ramp")
    begins = f"{ramp['from']} to " if ramp else ""
    tensor, replicas = state["tensor_model_parallel_size"], state["data_parallel_size"]
    parallel = config.get("parallel", {})
    context, stages = parallel.get("context_parallel_size", 1), parallel.get("pipeline_model_parallel_size", 1)
    processes = counted(tensor * replicas * stages, "process", "processes")
    shared = f"context parallel {context}, " if context > 1 else ""
    shared += f"pipeline parallel {stages}, " if stages > 1 else ""
    return {
        "Steps": f"{state['step']:,} of {train['steps']:,}",
        "Tokens": f"{samples * length:,} ({begins}{train['global_batch_size']} sequences of {length:,} a step)",
        "Data": _data(config["data"]),
        "Optimizer": f"{_OPTIMIZERS[optimizer.get('kind', 'adamw')]}, weight decay {optimizer['weight_decay']:g}, "
        f"betas {optimizer['beta1']:g} and {optimizer['beta2']:g}",
        "Learning rate": f"{optimizer['lr']:g}, {schedule['kind']}, {schedule['warmup_steps']:,} warm-up steps",
        "Precision": train["precision"],
        "Layout": f"{processes}: tensor parallel {tensor}, {shared}data parallel {replicas // context}, "
        f"ZeRO stage {config['deepspeed']['zero_stage']}",
        "Seed": train["seed"],
    }


def _data(data: dict) -> str:
    """Describe what the model was trained on, by the names of datasets alone: their paths concern nobody else."""
    if data["prefix"] is None and data.get("examples") is not None:
        return f"examples of {Path(data['examples']['path']).name}"
    if data["prefix"] is None:
        return ", ".join(f"{key} {value}" for key, value in data["generator"].items() if value is not None)
    stages = "".join(
        f"; then, for {x['share']:.0%} of the tokens, {_names(x['prefix'])}" for x in data.get("stages") or ()
    )
    return _names(data["prefix"]) + stages


def _names(prefix: dict | list | str) -> str:
    prefixes, weights = blend(prefix)
    names = [Path(prefix).name for prefix in prefixes]
    shares = names if weights is None else [f"{name} ({w / sum(weights):.0%})" for name, w in zip(names, weights)]
    return ", ".join(shares)


def final_losses(logged: dict[str, tuple[int, float]], average: bool = False) -> str:
    """Return the section of the final losses, given what `last_logged` found; nothing without losses.

    Those of an `average` of weights are others.
    """
    losses = _LOSSES_OF_AVERAGE if average else _LOSSES
    rows = [f"| {name} | {logged[key][1]:.4f} | {logged[key][0]:,} |" for key, name in losses.items() if key in logged]
    header = ["## Final losses", "", "| | nats per token | at step |", "|---|---|---|"]
    return "\n".join([*header, *rows]) if rows else ""


def was_pretrained_here(state: dict) -> bool:
    """Return whether the weights were trained from random ones, and so by this project alone."""
    config = state["config"]
    return (
        "train" in config
        and state["progress"].get("origin") is None
        and config.get("extension", {}).get("from") is None
    )


def _table(facts: dict[str, object]) -> str:
    rows = [f"| {key} | {plain(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
