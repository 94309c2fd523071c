"""README.md of an exported model: what it is, how it was trained and evaluated, how to load it and to adapt it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_tape.huggingface.export.card_metadata import adapter_metadata, metadata, was_pretrained_here
from megatron_tape.huggingface.export.evaluation_results import Results, results_section
from megatron_tape.huggingface.export.position_picture import PICTURE, position_section
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.export.training_facts import (
    base_of_adapter,
    final_losses,
    last_logged,
    table,
    training_facts,
)
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import PositionEncoding, encoding_of

CARD = "README.md"
_PAPER = "https://arxiv.org/abs/2501.00712"


def write_card(
    directory: Path,
    name: str,
    kind: str,
    saved: SavedWeights,
    rows: int,
    dtype: str,
    has_tokenizer: bool,
    with_lora: bool = True,
    results: Sequence[Results] = (),
    repository: str | None = None,
) -> None:
    """Write README.md, and its picture, of a model of `rows` tokens exported as `dtype` into `directory`.

    `kind` is transformers' `model_type`. Without `with_lora`, LoRA layers that the run trained are not part of it: it
    is the model that an adapter adds to. `results` are those of the model's evaluation; `repository` is its name on
    the Hub, if it has one.
    """
    whole = with_lora or not saved.extension.adds_lora
    tape, model, state = kind == "tape", saved.model, saved.state
    encoding = encoding_of(model)
    logged = last_logged(saved.path, state) if whole else {}
    place = '"."  # this directory' if repository is None else f'"{repository}"'
    positions, picture = position_section(saved, logged) if tape else ([], None)
    parameters = parameter_count(model) - (model.vocab_size - rows) * model.hidden_size * (2 - model.tie_embeddings)
    what = {
        "tape": f"contextualized equivariant positional encoding ([TAPE]({_PAPER}))",
        "plain": "rotary (RoPE)",
        "code": _described(encoding),
    }
    name_of_encoding = {"tape": "TAPE", "plain": "RoPE", "code": f"the positional encoding {encoding.name}"}
    facts = {
        "Parameters": f"{parameters:,}",
        "Positions": what[encoding.exports_to],
        "Layers": model.num_layers,
        "Hidden size": model.hidden_size,
        "MLP size": model.ffn_hidden_size,
        "Query heads, key/value heads": f"{model.num_attention_heads}, {model.query_groups}",
        "Context": f"{model.seq_length:,} tokens",
        "Vocabulary": f"{rows:,} tokens",
        "Weights": dtype,
    }
    lines = [
        *metadata(name, kind if encoding.exports_to != "code" else encoding.name, saved, results if whole else ()),
        "",
        f"# {name}",
        "",
        f"A decoder-only language model with {name_of_encoding[encoding.exports_to]}, for transformers.",
        "",
        *table(facts),
        "",
        "## Training",
        "",
        *([] if with_lora else [base_of_adapter(saved), ""]),
        *training_facts(saved, () if whole else ("lora",)),
        *final_losses(logged),
        *(results_section(results) if whole else []),
        *positions,
        "",
        "## Use",
        "",
        *_usage(place, encoding.exports_to != "plain", has_tokenizer),
        "",
    ]
    if rows < model.vocab_size:
        padding = f"Training padded the vocabulary by {model.vocab_size - rows} rows, which are not part of this model."
        lines += [padding, ""]
    if was_pretrained_here(state) and state["config"]["data"].get("prefix") is not None:
        lines += ["Pre-trained on text only: it continues text, but does not follow instructions.", ""]
    lines += _adaptation(place) if tape and with_lora else []
    (directory / CARD).write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    if picture is not None:
        (directory / PICTURE).write_bytes(picture)


def _described(encoding: PositionEncoding) -> str:
    """Return what the file of an encoding says that it is, in its first line."""
    text = sys.modules[type(encoding).__module__].__doc__ or type(encoding).__doc__ or ""
    return f"{encoding.name}: {text.strip().partition(chr(10))[0].rstrip('.')}" if text.strip() else encoding.name


def _adaptation(place: str) -> list[str]:
    """Say how LoRA layers are trained with peft so that positions are trained, too."""
    return [
        "## Adapt",
        "",
        "With peft: LoRA layers for all matrices, TAPE's own included. Positions are sensitive to the learning rate: a "
        "model that has not been trained with TAPE wants about 2e-4 with AdamW.",
        "",
        "```python",
        "from peft import LoraConfig, PeftModel, get_peft_model",
        "from transformers import AutoModelForCausalLM",
        "",
        f"path = {place}",
        "model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)",
        'config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")',
        "model = get_peft_model(model, config)",
        "# Train the model here, with transformers' Trainer or trl, and then:",
        'model.save_pretrained("adapter")',
        "",
        "base = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)",
        'merged = PeftModel.from_pretrained(base, "adapter").merge_and_unload()',
        "```",
    ]


def _usage(place: str, has_code: bool, has_tokenizer: bool) -> list[str]:
    remote = ", trust_remote_code=True" if has_code else ""
    load = [f"path = {place}", f"model = AutoModelForCausalLM.from_pretrained(path{remote})"]
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
    remote = "" if encoding_of(saved.model).exports_to == "plain" else ", trust_remote_code=True"
    lines = [
        *adapter_metadata(saved),
        "",
        f"# {name}",
        "",
        f"What was trained of a language model, as an adapter for peft; its weights are {dtype}.",
        "",
        "## Training",
        "",
        *training_facts(saved),
        *final_losses(last_logged(saved.path, saved.state)),
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
