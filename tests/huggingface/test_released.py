"""tools/convert_checkpoint.py from-released: imported models equal the TAPE authors' code."""

import json
import os

import pytest
import torch
from configurations import model_config
from models import build
from released import load
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_tape.checkpoint.directories import problems
from megatron_tape.checkpoint.index import read_index
from megatron_tape.errors import CheckpointError, FileError
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.huggingface.imports import new_checkpoint as imported
from megatron_tape.huggingface.imports.from_released import import_released
from megatron_tape.position import NoPosition


def write_released(folder, name):
    config, weights, _, rest = load(name)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors"
    )
    return config, weights, rest


def test_an_encoding_that_cannot_be_exported_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(NoPosition, "exports_to", None)
    write_released(tmp_path, "nope")
    import_released(tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "imported")
    with pytest.raises(CheckpointError, match="nope"):
        export(tmp_path / "imported", tmp_path / "out")


RELEASED = "adape adape_interp rope nope yarn alibi t5rb fire sincos xpos".split()


@pytest.mark.parametrize(
    "name, mixing", [*((name, "full") for name in RELEASED), ("adape", "per_head")]
)
def test_released_checkpoints_keep_their_logits_through_import_and_export(tmp_path, name, mixing):
    _, _, rest = write_released(tmp_path, name)
    import_released(
        tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "imported", 48, mixing
    )
    settings = json.loads((tmp_path / "imported" / "state.json").read_text())["config"]["model"]
    assert settings["vocab_size"] == 96
    # In float64, only the released code rounds; float32 rounding differs between CPUs.
    built, _ = build(model_config(**settings), randomize=False, dtype=torch.float64)
    weights = load_file(tmp_path / "imported" / "tensors-tp00-dp00000.safetensors")
    export(tmp_path / "imported", tmp_path / "exported", tokenizer="none")
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", trust_remote_code=True, dtype=torch.float64
    )
    with torch.no_grad():
        for key, parameter in built.named_parameters():
            parameter.copy_(weights.pop(f"weight/{key}"))
        assert not weights
        for logits in (built(rest["input_ids"])[..., :64], exported(rest["input_ids"]).logits):
            torch.testing.assert_close(
                logits,
                rest["logits"].double(),
                atol=1e-5,
                rtol=0,
            )


def test_a_large_import_is_split_into_files_with_the_same_weights(tmp_path, monkeypatch):
    write_released(tmp_path, "nope")
    given = tmp_path / "model.safetensors", tmp_path / "config.json"
    import_released(*given, tmp_path / "one")
    monkeypatch.setattr(imported, "FILE_BYTES", 5000)
    import_released(*given, tmp_path / "several")
    assert problems(tmp_path / "several") == []
    one = open_weights(tmp_path / "one")
    several = open_weights(tmp_path / "several")
    assert len({path for path, _ in several.files[0].values()}) > 3
    assert read_index(tmp_path / "several", 1).keys() == {
        path.name for path, _ in several.files[0].values()
    }
    assert all(
        torch.equal(several.read_parameter(name), one.read_parameter(name)) for name in one.files[0]
    )


def test_a_released_fire_with_another_threshold_is_refused(tmp_path):
    _, weights, _ = write_released(tmp_path, "fire")
    weights["model.layers.1.self_attn.rotary_emb.init_L"] = torch.tensor(256.0)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="init_L 256, which cannot be imported"):
        import_released(
            tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "imported"
        )


@pytest.mark.parametrize(
    "change, refusal",
    [
        ({"rpe_type": "randrope"}, "rpe_type"),
        (
            {"rpe_type": "t5rb", "relative_attention_num_buckets": 32},
            "relative_attention_max_distance is None",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"num_hidden_layers": 3}, "lacks the parameter model.layers.2"),
        ({"vocab_size": 60}, "settings require"),
    ],
)
def test_unsupported_released_checkpoints_are_refused(tmp_path, change, refusal):
    config, _, _ = write_released(tmp_path, "adape")
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=refusal):
        import_released(tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


def test_an_unknown_weight_of_the_released_code_is_refused_by_name(tmp_path):
    _, weights, _ = write_released(tmp_path, "adape")
    unknown = {"model.layers.0.self_attn.rotary_emb.other": torch.ones(3)}
    save_file(weights | unknown, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="rotary_emb.other"):
        import_released(tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "out")
