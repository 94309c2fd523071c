"""Compare a run's settings with those of the checkpoint that it continues. Imports no torch."""

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import STATE, read_state
from megatron_tape.checkpoint.locate import check_complete, checkpoint_to_continue
from megatron_tape.config.schema import RunConfig, config_dict, replace_settings
from megatron_tape.config.sections import as_dict, settings_of
from megatron_tape.config.values import format_value
from megatron_tape.errors import CheckpointError, ConfigError
from megatron_tape.position import model_config

CHANGEABLE_MODEL_KEYS = (
    "seq_length",
    "attention_backend",
    "position.state_precision",
    "position.mlp_zero",
)
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
"""Settings that determine which tokens each step trains on."""
SIZE_KEYS = ("data.stages", "train.steps", "train.global_batch_size", "train.batch_ramp")
"""Those of ORDER_KEYS that change the order only if the number of epochs over a dataset changes, or
a stage begins at another sample."""
ORDER_KEYS_OF_DATASETS = ("data.split", *SIZE_KEYS)
"""Those of ORDER_KEYS that affect only indexed datasets (`data.prefix`), and no other source of
samples.
"""
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
    "extension.allow_shorter_context",
    "extension.allow_other_scaling",
    "train.evaluations",
    "train.hang_timeout",
    "train.profile",
    "train.device",
    "train.allow_slow_attention",
)
"""Settings, or prefixes of settings, that do not affect what a run computes."""


def check_same_model(path: Path, config: RunConfig) -> None:
    """Raise ConfigError if a run with this configuration cannot continue the checkpoint at `path`.

    The settings of the model must be equal, except CHANGEABLE_MODEL_KEYS, and the optimizer must be
    the same. If the checkpoint or the run extends the context of a model, both must extend the same
    model and train the same kinds of parameters.
    """
    state = read_state(path)
    sections = state["config"]
    # Checkpoints without `optimizer.kind` are from a time when AdamW was the only optimizer.
    saved_kind = sections.get("optimizer", {}).get("kind", "adamw")
    if state["optimizer_steps"] > 0 and saved_kind != config.optimizer.kind:
        raise ConfigError(
            ("optimizer.kind", "checkpoint.resume"),
            f"is {config.optimizer.kind}, but {path} has the optimizer state of {saved_kind}",
            f"set optimizer.kind: {saved_kind}, or start another run from these weights"
            " (pretrain.extend_context)",
        )

    saved_base = sections.get("extension", {}).get("from")
    extends = config.extension.from_ is not None
    if extends != (saved_base is not None):
        problem = "a checkpoint of pretrain.extend_context"
        fix = "continue it with pretrain.extend_context, or export and import it"
        if extends:
            problem = "not a checkpoint of pretrain.extend_context"
            fix = f"set extension.from to it instead, or {config.to_start_another_run}"
        keys = ("checkpoint.resume", "extension.from")
        raise ConfigError(keys, f"selects {path}, which is {problem}", fix)
    if extends:
        _check_same_extension(path, sections["extension"], config)

    saved = sections["model"]
    # Settings of another version of this project may be invalid in this one. `model_config` adds
    # the defaults of settings that are newer than the checkpoint.
    with suppress(ValueError):
        saved = as_dict(model_config(saved))
    differences = model_differences(saved, as_dict(config.model), CHANGEABLE_MODEL_KEYS)
    if differences:
        fix = "restore these settings"
        if (path / "model.yaml").is_file():
            fix = f"add --config {path / 'model.yaml'}"
        raise ConfigError(
            ("checkpoint.resume", "model"),
            f"selects {path}, which contains another model: {'; '.join(differences)}",
            f"{fix}, or {config.to_start_another_run}",
        )


def _check_same_extension(path: Path, saved: dict[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if a run extends another model than checkpoint `path`, or trains other
    parameters.

    `saved` is the section `extension` of the checkpoint's settings.
    """
    current = _as_json(config)["extension"]
    keys = ["trains"]
    # Without LoRA layers, their settings have no effect.
    if "lora" in saved["trains"] and "lora" in current["trains"]:
        keys += LORA_KEYS
    changed = [key for key in keys if _unordered(saved[key]) != _unordered(current[key])]

    # If the user names a run, its newest checkpoint is extended, and there may be a newer one now.
    # So two checkpoints in the same directory count as equal.
    before = Path(saved["from"]).resolve()
    now = Path(current["from"]).resolve()
    if before.name.startswith("step-"):
        before = before.parent
    if not now.is_relative_to(before):
        changed.insert(0, "from")

    if changed:
        values = "; ".join(
            change_sentence(f"extension.{key}", saved[key], current[key]) for key in changed
        )
        raise ConfigError(
            ("checkpoint.resume", *(f"extension.{key}" for key in changed)),
            f"selects {path}, which was trained with other settings ({values})",
            "restore the settings from config.yaml in its run's directory, or"
            f" {config.to_start_another_run}",
        )


def _unordered(value: Any) -> Any:
    """Return a setting's value for comparisons that ignore the order of lists."""
    if isinstance(value, list):
        return sorted(value)
    return value


def change_sentence(key: str, was: Any, now: Any) -> str:
    """Return `key: was X, is now Y`."""
    return f"{key}: was {format_value(was)}, is now {format_value(now)}"


def _as_json(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings by section, as a checkpoint's `state.json` contains them: with lists
    instead of tuples, for example.
    """
    return json.loads(json.dumps(config_dict(config)))


def checked_start_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint that a run will continue, or None if it starts without one.

    Compares only the sizes of files. Raises ConfigError if `checkpoint.resume` is not a complete
    checkpoint, or the run cannot continue the checkpoint (see `check_same_model`).
    """
    try:
        start = checkpoint_to_continue(config)
        if start is None:
            return None
        check_complete(start)
        if (start / STATE).is_file():
            check_same_model(start, config)
        return start
    except CheckpointError as error:
        raise ConfigError(error.subjects, error.problem, error.fix) from None


def changes(saved: dict[str, dict[str, Any]], config: RunConfig) -> list[str]:
    """Return a sentence for each setting that differs from the `saved` settings of a checkpoint.

    Settings that were not saved or do not affect the computation are skipped.
    """
    sentences = []
    # Of the settings of the model, report only those that may change. `check_same_model` has found
    # the others equal; if they differ here, one value is null, and the other is derived.
    for key, was, now in changed_values(saved, _as_json(config)):
        changeable = key.removeprefix("model.") in CHANGEABLE_MODEL_KEYS
        if not key.startswith(WITHOUT_EFFECT) and (changeable or not key.startswith("model.")):
            sentences.append(change_sentence(key, was, now))
    return sentences


def changed_order_keys(saved: dict[str, dict[str, Any]], config: RunConfig) -> list[str]:
    """Return the settings that differ from the `saved` ones of a checkpoint, and that may change
    the order of the run's data.

    They are in ORDER_KEYS, or within a section in ORDER_KEYS, such as `data.generator`.
    """
    keys = set(ORDER_KEYS)
    # The keys of datasets do not affect the order of generated data and of examples.
    if config.data.prefix is None:
        keys -= set(ORDER_KEYS_OF_DATASETS)
    changed = changed_values(saved, _as_json(config))
    return [key for key, *_ in changed if _is_in(key, keys)]


def only_size_changed(keys: Collection[str]) -> bool:
    """Return whether `keys`, a result of `changed_order_keys`, are all in SIZE_KEYS."""
    return all(_is_in(key, SIZE_KEYS) for key in keys)


def with_saved_size(saved: dict[str, dict[str, Any]], config: RunConfig) -> RunConfig:
    """Return `config` with the values of SIZE_KEYS from the `saved` settings of a checkpoint."""
    values = {}
    for key in SIZE_KEYS:
        section, _, name = key.partition(".")
        if name in saved.get(section, {}):
            values[key] = saved[section][name]
    return replace_settings(config, values)


def _is_in(key: str, keys: Collection[str]) -> bool:
    """Return whether `keys` contains the setting `key`, or a section that contains it."""
    # Because of the dots at the end, a section `data.split` does not contain a key `data.splits`.
    return any(f"{key}.".startswith(f"{section}.") for section in keys)


def changed_values(
    before: Mapping[str, Any], now: Mapping[str, Any], name: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value before, value now) for each setting that differs between two versions of
    the section `name`; the default is all sections.

    Settings that are missing in `before` are skipped. A section that is null in one version is
    yielded as a whole.
    """
    for setting, value in now.items():
        key = f"{name}.{setting}".removeprefix(".")
        if setting not in before or before[setting] == value:
            continue
        saved = before[setting]
        if key in _sections() and isinstance(saved, Mapping) and isinstance(value, Mapping):
            yield from changed_values(saved, value, key)
        else:
            yield key, saved, value


@functools.cache
def _sections() -> set[str]:
    """Return the keys of all sections of settings. Other mappings are values of a setting."""
    return {setting.key for setting in settings_of(RunConfig) if setting.sections}


def model_differences(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    free: Collection[str] = (),
    names: tuple[str, str] = ("checkpoint", "configuration"),
) -> list[str]:
    """Return a description of each setting that differs between the model settings `a` and `b`,
    such as `model.num_layers: checkpoint 2, configuration 4`.

    `names` are what the descriptions call `a` and `b`. Keys that are in only one of them or in
    `free` are skipped. A null equals the value that is derived from other settings.
    """
    # Report only keys that differ in `a` and `b` themselves. A derived value may also differ only
    # because another setting does.
    differing = {key for key, *_ in changed_values(a, b, "model")}
    reported = differing - {f"model.{key}" for key in free}
    name_a, name_b = names
    return [
        f"{key}: {name_a} {value_a}, {name_b} {value_b}"
        for key, value_a, value_b in changed_values(_derived(a), _derived(b), "model")
        if key in reported
    ]


def _derived(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's settings, with nulls replaced by the values that are derived from other
    settings.
    """
    heads = model.get("num_attention_heads")
    hidden = model.get("hidden_size")
    position = model.get("position")
    # A checkpoint of another version may have any values here, such as strings.
    are_ints = type(heads) is int and type(hidden) is int
    if not are_ints or heads <= 0 or not isinstance(position, Mapping):
        return dict(model)

    settings = dict(model)
    for key, value in (("num_query_groups", heads), ("kv_channels", hidden // heads)):
        if key in model and model[key] is None:
            settings[key] = value
    if position.get("mlp_size", 0) is None:
        settings["position"] = {**position, "mlp_size": 4 * heads}
    return settings
