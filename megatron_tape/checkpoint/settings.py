"""How a run's settings differ from those of the checkpoint that it continues. Imports no torch."""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import read_state
from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.errors import refuse


def check_same_model(path: Path, config: RunConfig) -> None:
    """Raise `ConfigError` where the checkpoint at `path` is of another model; lengths and backends may differ."""
    saved = read_state(path)["config"]["model"]
    now = dataclasses.asdict(config.model)
    # A checkpoint from before a setting existed is of a model with its default.
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.default is not dataclasses.MISSING}
    free = {"seq_length": None, "attention_backend": None, "position_state_precision": None}
    differences = model_differences({**defaults, **saved, **free}, {**now, **free})
    settings = f"add --config {path / 'model.yaml'}" if (path / "model.yaml").is_file() else "restore these settings"
    refuse(
        bool(differences),
        f"checkpoint {path} is of another model: {'; '.join(differences)}; {settings}, or choose another "
        "checkpoint.directory",
    )


def model_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """List the model keys that differ between a checkpoint's settings `a` and a configuration's `b`.

    A null that stands for a derived value equals that value spelled out.
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
        f"model.{key}: checkpoint {a.get(key, 'absent')}, configuration {b.get(key, 'absent')}"
        for key in {**a, **b}
        if a.get(key, "absent") != b.get(key, "absent") and key not in open_in_both
    ]
