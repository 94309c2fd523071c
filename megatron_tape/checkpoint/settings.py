"""Differences between a run's settings and those of the checkpoint that it continues. Imports no torch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import read_state
from megatron_tape.config.schema import BEFORE, ModelConfig, RunConfig, config_dict, key_of
from megatron_tape.errors import refuse

FREE_IN_A_MODEL = ("seq_length", "attention_backend", "position_state_precision")
"""Settings of a model that may change while its weights stay the same."""
ORDER_KEYS = (
    "data.prefix",
    "data.split",
    "data.long_documents",
    "train.seed",
    "train.steps",
    "train.global_batch_size",
    "model.seq_length",
)
"""Settings that determine the order of the tokens."""
WITHOUT_EFFECT = (
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

    Also raises it if it is of a context extension and the run is not, or the reverse.
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
    if reordered := [key for key, _ in found if key in ORDER_KEYS]:
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
