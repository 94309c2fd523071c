"""README.md of an exported model: what it is, how it was trained and evaluated, how to load it and to adapt it.

The texts are model_card.md and adapter_card.md; huggingface_hub writes the metadata by which the Hub sorts models.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from megatron_tape.checkpoint.directories import STATE
from megatron_tape.errors import CheckpointError
from megatron_tape.evaluation.results import Results
from megatron_tape.huggingface.export.evaluation_results import notes_of, rows_of, scores_for_hub
from megatron_tape.huggingface.export.markdown import plain
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.export.training_facts import (
    base_of_adapter,
    final_losses,
    last_logged,
    training_facts,
    was_pretrained_here,
)
from megatron_tape.huggingface.imports.source_card import CARD, CardFacts
from megatron_tape.io.records import check_shape
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import PositionEncoding, encoding_of

_HERE = Path(__file__).parent
_PAPER = "https://arxiv.org/abs/2501.00712"


@dataclass(frozen=True)
class ExportOptions:
    """How a whole model is exported; see `to_transformers.export`."""

    name: str
    dtype: str
    max_shard_size: int
    tokenizer: str | None
    with_lora: bool = True
    """Merge LoRA layers into the matrices; without them, the model is the one that an adapter adds to."""
    results: Sequence[Results] = ()
    """Of the model's evaluation."""


def write_card(
    directory: Path, kind: str, saved: SavedWeights, options: ExportOptions, rows: int, loader: str | None
) -> None:
    """Write README.md of a model of `rows` tokens whose `model_type` in transformers is `kind`.

    `loader` is the class that loads its tokenizer, if it has one.
    """
    model, encoding = saved.model, encoding_of(saved.model)
    tape, is_plain = encoding.exports_to == "tape", encoding.exports_to == "plain"
    whole = options.with_lora or not saved.extension.adds_lora
    results = options.results if whole else ()
    logged = last_logged(saved.path, saved.state) if whole else {}
    pretrained = was_pretrained_here(saved.state)
    tag = encoding.name if encoding.exports_to == "code" else kind
    training = [training_facts(saved, () if whole else ("lora",)), final_losses(logged, saved.average)]
    if not options.with_lora:
        training.insert(0, base_of_adapter(saved))
    data = _card_data(
        saved,
        library_name="transformers",
        tags=[tag, "pretrained"] if pretrained else [tag],
        model_name=options.name if results else None,
        eval_results=scores_for_hub(results) or None,
    )
    card = ModelCard.from_template(
        data,
        _HERE / "model_card.md",
        name=plain(options.name),
        positions_in_short={"tape": "TAPE", "plain": "RoPE"}.get(
            encoding.exports_to, f"the positional encoding {plain(encoding.name)}"
        ),
        facts=_facts(saved, rows, options.dtype),
        training="\n\n".join(filter(None, training)),
        scores=rows_of(results),
        notes=notes_of(results),
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
    parameters = parameter_count(model) - (model.vocab_size - rows) * model.hidden_size * (2 - model.tie_embeddings)
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
    """Return what the file of an encoding says that it is, in its first line."""
    text = sys.modules[type(encoding).__module__].__doc__ or type(encoding).__doc__ or ""
    return f"{encoding.name}: {text.strip().partition(chr(10))[0].rstrip('.')}" if text.strip() else encoding.name


def write_adapter_card(directory: Path, name: str, saved: SavedWeights, dtype: str, base: str) -> None:
    """Write README.md of an adapter in peft's format for the model in the directory `base`."""
    data = _card_data(saved, library_name="peft", base_model=None)  # which has no name on the Hub
    losses = final_losses(last_logged(saved.path, saved.state), saved.average)
    card = ModelCard.from_template(
        data,
        _HERE / "adapter_card.md",
        name=plain(name),
        dtype=dtype,
        training="\n\n".join(filter(None, [training_facts(saved), losses])),
        base=json.dumps(base),
        remote="" if encoding_of(saved.model).exports_to == "plain" else ", trust_remote_code=True",
    )
    _save(card, directory)


def _card_data(saved: SavedWeights, **facts: Any) -> ModelCardData:
    """Return the metadata; licence, languages and the original model are those known when it was imported."""
    known = saved.state["progress"].get("card", {})
    imported = {key: known[key] for key in CardFacts.__annotations__ if key in known}
    try:
        check_shape(imported, CardFacts, "progress.card")
    except ValueError as error:
        raise CheckpointError(str(saved.path / STATE), f"cannot be used: {error}", "choose another step") from None
    return ModelCardData(**{"pipeline_tag": "text-generation"} | imported | facts)


def _save(card: ModelCard, directory: Path) -> None:
    (directory / CARD).write_text(card.content.rstrip() + "\n", encoding="utf-8")
