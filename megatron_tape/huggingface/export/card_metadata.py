"""The metadata at the top of a model card, by which the Hugging Face Hub sorts and shows models."""

from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from megatron_tape.checkpoint.directories import CardFacts
from megatron_tape.huggingface.export.evaluation_results import Results, rows_of
from megatron_tape.huggingface.export.saved_weights import SavedWeights


def metadata(name: str, kind: str, saved: SavedWeights, results: Sequence[Results]) -> list[str]:
    """Return the lines of the metadata of a model called `name`; its tag `kind` names the architecture or encoding.

    Licence, languages and the model it was made from are those that were known when it was imported.
    """
    state = saved.state
    return _lines(
        library_name="transformers",
        tags=[kind, "pretrained"] if was_pretrained_here(state) else [kind],
        model_name=name if results else None,
        eval_results=[_result(row) for one in results for row in rows_of(one)] or None,
        **_imported(state),
    )


def adapter_metadata(saved: SavedWeights) -> list[str]:
    """Return the lines of the metadata of an adapter; the model that it adds to has no name on the Hub."""
    facts = _imported(saved.state)
    facts.pop("base_model", None)
    return _lines(library_name="peft", **facts)


def _imported(state: dict) -> dict[str, Any]:
    card = state["progress"].get("card", {})
    return {key: card[key] for key in CardFacts.__annotations__ if key in card}


def _lines(**facts: Any) -> list[str]:
    return ["---", *ModelCardData(pipeline_tag="text-generation", **facts).to_yaml().splitlines(), "---"]


def was_pretrained_here(state: dict) -> bool:
    """Return whether the weights were trained from random ones, and so by this project alone."""
    config = state["config"]
    return (
        "train" in config
        and state["progress"].get("origin") is None
        and config.get("extension", {}).get("from") is None
    )


def _result(row: dict) -> EvalResult:
    length = f" at {row['length']:,} tokens" if row["length"] else ""
    return EvalResult(
        task_type="text-generation",
        dataset_type=row["task"],
        dataset_name=f"{row['task']}: {row['group']}" if row["group"] else row["task"],
        dataset_config=row["group"] or None,
        metric_type=row["metric"].replace(" ", "_"),
        metric_name=row["metric"] + length,
        metric_value=row["value"],
    )
