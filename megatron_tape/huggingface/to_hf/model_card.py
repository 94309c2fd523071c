"""README.md of an exported model: what it is, how it was trained, its final losses, and how to load it."""

import re
from collections import Counter
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import TypedDict

from megatron_tape.config.schema import blend
from megatron_tape.huggingface.to_hf.saved_weights import SavedWeights
from megatron_tape.model.names import parameter_shapes
from megatron_tape.model.weights import part_of
from megatron_tape.parameters import parameter_count
from megatron_tape.position import encoding_of
from megatron_tape.records import parse_record

_PAPER = "https://arxiv.org/abs/2501.00712"


def final_losses(checkpoint: Path, state: dict) -> dict[str, tuple[int, float]]:
    """Return the last `loss` and `validation_loss`, with their steps, that the run logged up to this checkpoint.

    Looks for `metrics.jsonl` above the checkpoints and where the run's settings say; returns nothing without it.
    """
    directories = [checkpoint.parent.parent]
    if configured := state["config"].get("logging", {}).get("directory"):
        directories.append(Path(configured))
    for directory in directories:
        if (directory / "metrics.jsonl").is_file():
            return _last(directory / "metrics.jsonl", state["step"])
    return {}


class _Step(TypedDict):
    step: int


class _Row(_Step, total=False):
    loss: float | None
    validation_loss: float | None


def _last(path: Path, last_step: int) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = parse_record(line, _Row)
            except ValueError:  # a line that a killed process left unfinished
                continue
            if row["step"] <= last_step:
                found |= {k: (row["step"], row[k]) for k in ("loss", "validation_loss") if row.get(k) is not None}
    return found


def model_card(
    name: str, kind: str, saved: SavedWeights, rows: int, dtype: str, has_tokenizer: bool, with_lora: bool = True
) -> str:
    """Return the card of a model of `rows` tokens exported as `dtype`; `kind` is transformers' `model_type`.

    Without `with_lora`, LoRA layers that the run trained are not part of it: it is the model that an adapter adds to.
    """
    whole = with_lora or not saved.extension.adds_lora
    tape, model, state = kind == "tape", saved.model, saved.state
    origin = state["progress"].get("origin")
    parameters = parameter_count(model) - (model.vocab_size - rows) * model.hidden_size * (2 - model.tie_embeddings)
    encoding = f"contextualized equivariant positional encoding ([TAPE]({_PAPER}))" if tape else "rotary (RoPE)"
    facts = {
        "Parameters": f"{parameters:,}",
        "Positions": encoding,
        "Layers": model.num_layers,
        "Hidden size": model.hidden_size,
        "MLP size": model.ffn_hidden_size,
        "Query heads, key/value heads": f"{model.num_attention_heads}, {model.query_groups}",
        "Context": f"{model.seq_length:,} tokens",
        "Vocabulary": f"{rows:,} tokens",
        "Weights": dtype,
    }
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [{kind}, pretrained]",
        "---",
        "",
        f"# {name}",
        "",
        f"A decoder-only language model with {'TAPE' if tape else 'RoPE'}, for transformers.",
        "",
        *_table(facts),
        "",
        "## Training",
        "",
        *([] if with_lora else [_of_adapter(saved), ""]),
        *_training(saved, () if whole else ("lora",)),
        *(_results(final_losses(saved.path, state)) if whole else []),
        "",
        "## Use",
        "",
        *_usage(tape, has_tokenizer),
        "",
    ]
    if rows < model.vocab_size:
        padding = f"Training padded the vocabulary by {model.vocab_size - rows} rows, which are not part of this model."
        lines += [padding, ""]
    if origin is None and state["config"].get("extension", {}).get("from") is None:
        lines.append("Pre-trained on text only: it continues text, but does not follow instructions.")
    return "\n".join(lines) + "\n"


def _usage(tape: bool, has_tokenizer: bool) -> list[str]:
    remote = ", trust_remote_code=True" if tape else ""
    load = ['path = "."  # this directory', f"model = AutoModelForCausalLM.from_pretrained(path{remote})"]
    if not has_tokenizer:
        return ["```python", "from transformers import AutoModelForCausalLM", "", *load, "```"]
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        *load,
        f"tokenizer = AutoTokenizer.from_pretrained(path{remote})",
        'inputs = tokenizer("The", return_tensors="pt", return_token_type_ids=False)',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))",
        "```",
    ]


def adapter_card(name: str, saved: SavedWeights, dtype: str, base: str) -> str:
    """Return the card of an adapter in peft's format for the model in the directory `base`."""
    remote = ", trust_remote_code=True" if encoding_of(saved.model).exports_to == "tape" else ""
    lines = [
        "---",
        "library_name: peft",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {name}",
        "",
        f"What was trained of a language model, as an adapter for peft; its weights are {dtype}.",
        "",
        "## Training",
        "",
        *_training(saved),
        *_results(final_losses(saved.path, saved.state)),
        "",
        "## Use",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base}"{remote})',
        'model = PeftModel.from_pretrained(base, ".")  # this directory',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _of_adapter(saved: SavedWeights) -> str:
    """Say in what the model that an adapter adds to differs from the one that was trained."""
    text = "This is the model that an adapter adds to."
    if not saved.extension.adds_lora:
        return text
    if not (parts := ", ".join(_own_parts(saved))):
        return f"{text} The LoRA layers are not part of it, and nothing else was trained."
    return (
        f"{text} It holds the parts that were trained beside the LoRA layers ({parts}), but not these layers: only "
        "together with the adapter is it the model that was trained."
    )


def _own_parts(saved: SavedWeights) -> list[str]:
    """Return which parts were trained, but for LoRA layers."""
    return [part for part in dict.fromkeys(map(part_of, saved.trained)) if part != "lora"]


def _training(saved: SavedWeights, without: Collection[str] = ()) -> list[str]:
    """Return a table of what was trained but for the parts in `without`, from what, and how.

    Raises ValueError if the settings are not those of a run.
    """
    state, origin = saved.state, saved.state["progress"].get("origin")
    config = state["config"]
    if "train" not in config:
        return [f"Imported from {origin}; not trained further."]
    try:
        start = {} if origin is None else {"Started from": origin}
        start |= _extension(config.get("extension", {}))
        if without and not _own_parts(saved):
            return _table(start) if start else []
        return _table(start | _trained(saved, without) | _settings(state, config))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"state.json holds settings that no run can have had ({type(error).__name__}: {error}); choose another step"
        ) from None


def _extension(extension: dict) -> dict[str, object]:
    facts = {}
    if extended := extension.get("from"):
        path = Path(extended)
        step = re.fullmatch(r"step-(\d+)", path.name)
        run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        facts["Extends"] = f"{run.name}, step {int(step[1]):,}" if step else path.name
    if extension.get("attention", "full") != "full":
        facts["Attention in training"] = extension["attention"]
    return facts


def _trained(saved: SavedWeights, without: Collection[str]) -> dict[str, object]:
    """Return how many parameters of each part were trained, if some were not; parts in `without` count as absent."""
    shapes = parameter_shapes(saved.model, saved.extension)
    numbers = {name: prod(shape) for name, shape in shapes.items() if part_of(name) not in without}
    trained = [name for name in saved.trained if name in numbers]
    if len(trained) == len(numbers):
        return {}
    counts: Counter[str] = Counter()
    for name in trained:
        counts[part_of(name)] += numbers[name]
    facts = {"Trained": ", ".join(f"{part} ({count:,})" for part, count in counts.items())}
    extension = saved.extension
    if "lora" in counts:
        lora = f"rank {extension.lora_rank}, alpha {extension.lora_alpha:g}, for {', '.join(extension.lora_targets)}"
        facts["LoRA layers"] = lora
    return facts | {"Trained parameters": f"{counts.total():,} of {sum(numbers.values()):,}"}


def _settings(state: dict, config: dict) -> dict[str, object]:
    train, optimizer, schedule = config["train"], config["optimizer"], config["schedule"]
    samples, length = state["consumed_samples"], config["model"]["seq_length"]
    tensor, data = state["tensor_model_parallel_size"], state["data_parallel_size"]
    processes = "1 process" if tensor * data == 1 else f"{tensor * data} processes"
    return {
        "Steps": f"{state['step']:,} of {train['steps']:,}",
        "Tokens": f"{samples * length:,} ({train['global_batch_size']} sequences of {length:,} a step)",
        "Data": _data(config["data"]),
        "Optimizer": f"AdamW, weight decay {optimizer['weight_decay']:g}, "
        f"betas {optimizer['beta1']:g} and {optimizer['beta2']:g}",
        "Learning rate": f"{optimizer['lr']:g}, {schedule['kind']}, {schedule['warmup_steps']:,} warm-up steps",
        "Arithmetic": train["precision"],
        "Layout": f"{processes}: tensor parallel {tensor}, data parallel {data}, "
        f"ZeRO stage {config['deepspeed']['zero_stage']}",
        "Seed": train["seed"],
    }


def _data(data: dict) -> str:
    """Describe what the model was trained on, by the names of datasets alone: their paths concern nobody else."""
    if data["prefix"] is None and data.get("examples") is not None:
        return f"examples of {Path(data['examples']['path']).name}"
    if data["prefix"] is None:
        return ", ".join(f"{key} {value}" for key, value in data["generator"].items())
    prefixes, weights = blend(data["prefix"])
    names = [Path(prefix).name for prefix in prefixes]
    shares = names if weights is None else [f"{name} ({w / sum(weights):.0%})" for name, w in zip(names, weights)]
    return ", ".join(shares)


def _results(losses: dict[str, tuple[int, float]]) -> list[str]:
    names = {"loss": "Training loss", "validation_loss": "Validation loss"}
    rows = [f"| {names[key]} | {value:.4f} | {step:,} |" for key, (step, value) in losses.items()]
    header = ["", "## Final losses", "", "| | nats per token | at step |", "|---|---|---|"]
    return [*header, *rows] if rows else []


def _table(facts: dict[str, object]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
