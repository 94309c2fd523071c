"""Differences between a run's settings and those of the checkpoint that it continues. Imports no torch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import (
    STATE,
    list_checkpoints,
    newest_whole,
    problems,
    read_state,
    what_to_resume,
)
from megatron_tape.config.schema import BEFORE, ModelConfig, RunConfig, config_dict, key_of
from megatron_tape.errors import CheckpointError, ConfigError, refuse

FREE_IN_A_MODEL = ("seq_length", "attention_backend", "position_state_precision")
"""Settings of a model that may change while its weights stay the same."""
ORDER_KEYS = (
    "data.prefix",
    "data.split",
    "data.long_documents",
    "data.generator",
    "data.examples",
    "train.seed",
    "train.steps",
    "train.global_batch_size",
    "model.seq_length",
)
"""Settings that determine the order of the tokens."""
ORDER_KEYS_OF_DATASETS = ("data.split", "train.steps")
"""Those of them that other sources of samples do not depend on."""
LORA_KEYS = ("lora_rank", "lora_alpha", "lora_targets")
"""Settings of a context extension that describe its LoRA layers."""
WITHOUT_EFFECT = (
    "evaluation.",
    "logging.",
    "checkpoint.",
    "model.attention_backend",
    "data.cache_directory",
    "data.num_workers",
    "train.hang_timeout",
)
"""Settings, or prefixes of settings, that do not affect what a run computes."""


def check_same_model(path: Path, config: RunConfig) -> None:
    """Raise `ConfigError` if the checkpoint at `path` is of another model; the settings FREE_IN_A_MODEL may differ.

    Also raises it if it is of a context extension and the run is not, or the reverse, or if it extends another model or
    trains other parameters.
    """
    sections = read_state(path)["config"]
    base, extends = sections.get("extension", {}).get("from"), config.extension.from_ is not None
    refuse(
        base is not None and not extends,
        f"checkpoint {path} extends the context of {base}; continue it with pretrain.extend_context, or export it and "
        "import the export",
    )
    refuse(
        base is None and extends,
        f"checkpoint {path} does not extend the context of another model; give it as extension.from in place of "
        "checkpoint.resume, or choose another checkpoint.directory",
    )
    if extends:
        _check_same_extension(path, sections["extension"], config)
    saved = sections["model"]
    now = dataclasses.asdict(config.model)
    # A model saved before a setting existed has that setting's default.
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.default is not dataclasses.MISSING}
    free = dict.fromkeys(FREE_IN_A_MODEL)
    differences = model_differences({**defaults, **saved, **free}, {**now, **free})
    settings = f"add --config {path / 'model.yaml'}" if (path / "model.yaml").is_file() else "restore these settings"
    refuse(
        bool(differences),
        f"checkpoint {path} is of another model: {'; '.join(differences)}; {settings}, or choose another "
        "checkpoint.directory",
    )


def _check_same_extension(path: Path, saved: dict[str, Any], config: RunConfig) -> None:
    now = json.loads(json.dumps(config_dict(config)["extension"]))
    defaults = {key_of(field.name): _default(field) for field in dataclasses.fields(config.extension)}
    before = {key: saved.get(key, defaults[key]) for key in now}
    keys = ["trains", *LORA_KEYS] if "lora" in before["trains"] and "lora" in now["trains"] else ["trains"]
    found = [key for key in keys if _in_order(before[key]) != _in_order(now[key])]
    # A run that is named as the model to extend stands for its newest checkpoint, which may be another one by now.
    a, b = (Path(value).resolve() for value in (before["from"], now["from"]))
    if a != b and not (a.parent == b.parent and a.name.startswith("step-") and b.name.startswith("step-")):
        found.insert(0, "from")
    shown = "; ".join(f"extension.{key}: was {_shown(before[key])}, is now {_shown(now[key])}" for key in found)
    without = "" if config.checkpoint.resume in ("auto", "none") else " and without checkpoint.resume"
    refuse(
        bool(found),
        f"checkpoint {path} was made with other settings ({shown}); restore them, as in config.yaml in its run's "
        f"directory, or begin another run with a new logging.directory{without}",
    )


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def check_start(config: RunConfig) -> Path | None:
    """Return the checkpoint that a run will continue, judged by the sizes of its files, or None.

    Raises ConfigError if one that is given is not whole, or if it is not of the same model (see `check_same_model`).
    """
    directory = config.checkpoint.directory
    resume = what_to_resume(config.checkpoint.resume, directory)
    try:
        start = newest_whole(directory, deep=False) if resume == "auto" else Path(resume)
        if resume == "none" or start is None:
            return None
        problem = None if resume == "auto" else problem_of_resume(start, deep=False)
        refuse(problem is not None, str(problem))
        if (start / STATE).is_file():
            check_same_model(start, config)
        return start
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def problem_of_resume(path: Path, deep: bool = True) -> str | None:
    """Return in one sentence why a path given as `checkpoint.resume` is not a whole checkpoint; None if it is one.

    Only `deep` reads the files' bytes.
    """
    found = problems(path, deep) if path.is_dir() else ["it is not a directory"]
    if not found:
        return None
    advice = "; import it first: tools/convert_checkpoint.py from-hf" if (path / "config.json").is_file() else ""
    inside = [path for folder in (path, path / "checkpoints") for _, path in list_checkpoints(folder)]
    if inside:
        return f"checkpoint.resume {path} is not a checkpoint, but holds some; give one of them, such as {inside[0]}"
    return f"checkpoint.resume {path} is not a whole checkpoint: {'; '.join(found)}{advice or '; give another'}"


def changes(saved: dict[str, dict[str, Any]], config: RunConfig) -> list[str]:
    """Return a sentence `key: was X, is now Y` for each setting that differs from those `saved` with a checkpoint.

    Settings that do not affect what is computed are left out. A setting that is newer than the checkpoint had its
    default then, or the value in `BEFORE`. If the order of the data has changed, the last sentence says so.
    """
    found = []
    for section, now in json.loads(json.dumps(config_dict(config))).items():
        defaults = {key_of(field.name): _default(field) for field in dataclasses.fields(getattr(config, section))}
        if saved.get("train", {}).get("precision", "bf16") == "bf16":
            defaults |= BEFORE.get(section, {})
        for name, value in now.items():
            key, before = f"{section}.{name}", saved.get(section, {}).get(name, defaults.get(name))
            same_model = section == "model" and name not in FREE_IN_A_MODEL
            if before != value and not same_model and not key.startswith(WITHOUT_EFFECT):
                found.append((key, f"{key}: was {_shown(before)}, is now {_shown(value)}"))
    sentences = [sentence for _, sentence in found]
    of_datasets = () if config.data.prefix is not None else ORDER_KEYS_OF_DATASETS
    if reordered := [key for key, _ in found if key in ORDER_KEYS and key not in of_datasets]:
        sentences.append(f"{', '.join(reordered)}: the data comes in another order than in an uninterrupted run")
    return sentences


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _shown(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."


def model_differences(
    a: dict[str, Any], b: dict[str, Any], names: tuple[str, str] = ("checkpoint", "configuration")
) -> list[str]:
    """List the model keys that differ between a checkpoint's settings `a` and a configuration's `b`, or others by name.

    A null that stands for a derived value counts as equal to that value.
    """

    def derived(model: dict[str, Any]) -> dict[str, Any]:
        heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
        if type(heads) is not int or type(hidden) is not int or heads < 1:
            return model
        defaults = {"num_query_groups": heads, "position_mlp_size": 4 * heads, "kv_channels": hidden // heads}
        return {key: defaults.get(key) if value is None else value for key, value in model.items()}

    open_in_both = {key for key in a if a[key] is None and b.get(key, "absent") is None}
    a, b = derived(a), derived(b)
    return [
        f"model.{key}: {names[0]} {a.get(key, 'absent')}, {names[1]} {b.get(key, 'absent')}"
        for key in {**a, **b}
        if a.get(key, "absent") != b.get(key, "absent") and key not in open_in_both
    ]
