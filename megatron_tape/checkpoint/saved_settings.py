"""Compare a run's settings with those of the checkpoint that it continues. Imports no torch."""

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import STATE, read_state
from megatron_tape.checkpoint.locate import check_complete, checkpoint_to_continue
from megatron_tape.config.schema import RunConfig, config_dict
from megatron_tape.config.sections import as_dict, settings_of
from megatron_tape.config.values import format_value
from megatron_tape.errors import CheckpointError, ConfigError, refuse
from megatron_tape.position import model_config

CHANGEABLE_MODEL_KEYS = ("seq_length", "attention_backend", "position.state_precision", "position.mlp_zero")
"""Model settings that may change although the weights stay the same."""
ORDER_KEYS = (
    "data.prefix",
    "data.stages",
    "data.split",
    "data.long_documents",
    "data.generator",
    "data.examples",
    "train.seed",
    "train.steps",
    "train.global_batch_size",
    "train.batch_ramp",
    "model.seq_length",
)
"""Settings that determine the order of the tokens."""
ORDER_KEYS_OF_DATASETS = ("data.split", "train.steps", "train.global_batch_size", "train.batch_ramp")
"""The order keys that matter for indexed datasets only, and not for other sources of samples."""
LORA_KEYS = ("lora_rank", "lora_alpha", "lora_targets")
"""Settings of the LoRA layers of a context extension."""
WITHOUT_EFFECT = (
    "evaluation.",
    "logging.",
    "checkpoint.",
    "model.attention_backend",
    "data.cache_directory",
    "data.allow_changed",
    "data.num_workers",
    "deepspeed.overlap_comm",
    "train.evaluations",
    "train.hang_timeout",
    "train.profile",
    "train.device",
    "train.allow_slow_attention",
)
"""Settings, or prefixes of settings, that do not affect what a run computes."""


def check_same_model(path: Path, config: RunConfig) -> None:
    """Raise ConfigError if the checkpoint at `path` is of another model, up to CHANGEABLE_MODEL_KEYS.

    Also raises it if only one of the checkpoint and the run extends a context, or if they extend different models or
    train different parameters.
    """
    state = read_state(path)
    sections = state["config"]
    kind = sections.get("optimizer", {}).get("kind", "adamw")
    refuse(
        state["optimizer_steps"] > 0 and kind != config.optimizer.kind,
        ("optimizer.kind", "checkpoint.resume"),
        f"is {config.optimizer.kind}, but {path} has the optimizer state of {kind}",
        f"set it to {kind}, or start another run from these weights (pretrain.extend_context)",
    )
    base, extends = sections.get("extension", {}).get("from"), config.extension.from_ is not None
    refuse(
        base is not None and not extends,
        "checkpoint.resume",
        f"means {path}, which extends the context of {base}",
        "continue it with pretrain.extend_context, or export it and import the export",
    )
    refuse(
        base is None and extends,
        ("checkpoint.resume", "extension.from"),
        f"means {path}, which does not extend the context of another model",
        f"give it as extension.from in place of checkpoint.resume, or {config.to_start_another_run}",
    )
    if extends:
        _check_same_extension(path, sections["extension"], config)
    saved = sections["model"]
    with suppress(ValueError):  # another version's settings may be invalid here
        saved = as_dict(model_config(saved))  # adds the settings that are newer than the checkpoint
    differences = model_differences(saved, as_dict(config.model), CHANGEABLE_MODEL_KEYS)
    settings = f"add --config {path / 'model.yaml'}" if (path / "model.yaml").is_file() else "restore these settings"
    refuse(
        bool(differences),
        ("checkpoint.resume", "model"),
        f"means {path}, which is of another model: {'; '.join(differences)}",
        f"{settings}, or {config.to_start_another_run}",
    )


def _check_same_extension(path: Path, saved: dict[str, Any], config: RunConfig) -> None:
    now = json.loads(json.dumps(config_dict(config)["extension"]))
    keys = ["trains", *LORA_KEYS] if "lora" in saved["trains"] and "lora" in now["trains"] else ["trains"]
    found = [key for key in keys if _in_order(saved[key]) != _in_order(now[key])]
    # A run as the model to extend means its newest checkpoint, which may have changed. The run's name was saved if all
    # settings of the model were given.
    a, b = (Path(value).resolve() for value in (saved["from"], now["from"]))
    same_run = a.parent == b.parent and a.name.startswith("step-") and b.name.startswith("step-")
    if not same_run and not b.is_relative_to(a):
        found.insert(0, "from")
    both = "; ".join(
        f"extension.{key}: was {format_value(saved[key])}, is now {format_value(now[key])}" for key in found
    )
    without = "" if config.checkpoint.resume in ("auto", "none") else " and without checkpoint.resume"
    refuse(
        bool(found),
        ("checkpoint.resume", *(f"extension.{key}" for key in found)),
        f"means {path}, which was made with other settings ({both})",
        f"restore them, as in config.yaml in its run's directory, or {config.to_start_another_run}{without}",
    )


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def check_start(config: RunConfig) -> Path | None:
    """Return the checkpoint that a run will continue, checked by its file sizes, or None.

    Raises ConfigError if the given checkpoint is not complete, or is of another model (see `check_same_model`).
    """
    try:
        start = checkpoint_to_continue(config)
        if start is None:
            return None
        check_complete(start, deep=False)
        if (start / STATE).is_file():
            check_same_model(start, config)
        return start
    except CheckpointError as error:
        raise ConfigError(error.subjects, error.problem, error.fix) from None


def changes(saved: dict[str, dict[str, Any]], config: RunConfig) -> list[str]:
    """Return `key: was X, is now Y` for each setting that differs from the `saved` settings of a checkpoint.

    Settings that were not saved or do not affect the computation are skipped. If the order of the data has changed, the
    last sentence says so.
    """
    found = []
    for key, was, now in changed_values(saved, json.loads(json.dumps(config_dict(config)))):
        same_model = key.startswith("model.") and key.removeprefix("model.") not in CHANGEABLE_MODEL_KEYS
        if not same_model and not key.startswith(WITHOUT_EFFECT):
            found.append((key, f"{key}: was {format_value(was)}, is now {format_value(now)}"))
    sentences = [sentence for _, sentence in found]
    of_datasets = () if config.data.prefix is not None else ORDER_KEYS_OF_DATASETS
    if reordered := [key for key, _ in found if _is_in(key, ORDER_KEYS) and not _is_in(key, of_datasets)]:
        sentences.append(
            f"{', '.join(reordered)}: the data is shuffled again, so some sequences repeat and some are missed"
        )
    return sentences


def _is_in(key: str, keys: Collection[str]) -> bool:
    """Return whether a setting, or a section that contains it, is one of `keys`."""
    return any(f"{key}.".startswith(f"{other}.") for other in keys)


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value before, value now) for each setting that differs in the section `name`.

    Settings that `before` does not have are skipped, unless it has null for their section.
    """
    for part, value in now.items():
        key = f"{name}.{part}" if name else part
        if part not in before or before[part] == value:
            continue
        if key in _sections() and isinstance(before[part], Mapping) and isinstance(value, Mapping):
            yield from changed_values(before[part], value, key)
        else:
            yield key, before[part], value


@functools.cache
def _sections() -> set[str]:
    return {setting.key for setting in settings_of(RunConfig) if setting.sections}


def model_differences(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    free: Collection[str] = (),
    names: tuple[str, str] = ("checkpoint", "configuration"),
) -> list[str]:
    """Return a description of each model setting that differs between `a` and `b`, which are called by `names`.

    Only keys of both are compared. A null that stands for a derived value equals that value. Keys in `free` may differ.
    """
    given = {key for key, *_ in changed_values(a, b, "model") if key.removeprefix("model.") not in free}
    found = changed_values(_derived(a), _derived(b), "model")
    return [f"{key}: {names[0]} {was}, {names[1]} {now}" for key, was, now in found if key in given]


def _derived(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's settings with the derived values in place of nulls."""
    heads, hidden, position = model.get("num_attention_heads"), model.get("hidden_size"), model.get("position")
    if type(heads) is not int or type(hidden) is not int or heads < 1 or not isinstance(position, Mapping):
        return dict(model)
    defaults = {"num_query_groups": heads, "kv_channels": hidden // heads}
    position = dict(position) | ({"mlp_size": 4 * heads} if position.get("mlp_size", 0) is None else {})
    return {key: defaults.get(key) if value is None else value for key, value in model.items()} | {"position": position}
