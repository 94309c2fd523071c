"""Checkpoints of format 3, whose parameters had other names, can still be used.

`format_3` next to this file is the checkpoint of step 2 of a run with GENERATOR and SETTINGS, which
the last version that wrote this format trained to step 4. The predicate `is_trained` froze the
embedding.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import small_model
from safetensors.torch import load_file

from megatron_tape.checkpoint.directories import FORMAT_VERSION, read_manifest
from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.model.names import current_name, seed_name
from megatron_tape.model.shapes import parameter_shapes
from pretrain import train

SAVED = Path(__file__).with_name("format_3")
SETTINGS = """
--model.position_encoding=tape --model.num_layers=2 --model.hidden_size=16
--model.ffn_hidden_size=24
--model.num_attention_heads=2 --model.num_query_groups=1 --model.seq_length=24 --model.vocab_size=16
--model.qk_norm=true --train.precision=fp32 --train.micro_batch_size=2 --train.global_batch_size=2
--train.eval_interval=0 --train.steps=4 --train.average.kind=ema --train.average.decay=0.9
--schedule.warmup_steps=0 --logging.interval=1 --checkpoint.interval=2
""".split()
GENERATOR = "--data.generator={task: addition, digits: 4}"
EXPECTED = {
    3: {"train/loss": 2.760002374649048, "train/grad_norm": 1.2215076684951782},
    4: {"train/loss": 2.7719335556030273, "train/grad_norm": 1.3161967992782593},
}
"""The metrics of the run that made the checkpoint."""


def is_trained(name, parameter):
    return "embedding" not in name


def test_a_run_continues_a_checkpoint_of_format_3_and_saves_the_current_format(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(SAVED, checkpoints / "step-00000002")
    assert (
        train.main([GENERATOR, f"--logging.directory={tmp_path / 'run'}", *SETTINGS], is_trained)
        == 0
    )

    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    found = {row["step"]: row for row in rows if "train/loss" in row}
    assert found.keys() == EXPECTED.keys()
    for step, expected in EXPECTED.items():
        assert {key: found[step][key] for key in expected} == pytest.approx(expected, rel=1e-5)

    new = checkpoints / "step-00000004"
    assert read_manifest(new)["format_version"] == FORMAT_VERSION == 4
    assert json.loads((new / "state.json").read_text())["frozen"] == ["embedding.weight"]
    assert load_file(next(new.glob("tensors-*"))).keys() == {
        key for name in parameter_shapes(open_weights(new).model) for key in keys_of(name)
    }


def keys_of(name):
    frozen = name == "embedding.weight"
    return [f"weight/{name}"] + [
        f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq", "average") if not frozen
    ]


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_format_3_are_read_by_their_current_names(average):
    tensors = load_file(next(SAVED.glob("tensors-*")))
    saved = open_weights(SAVED, average)
    kind = "average" if average else "weight"
    names = {
        "layers.1.mlp.linear_fc2.weight": f"{kind}/gpt.decoder.layers.1.mlp.linear_fc2.weight",
        "norm.weight": f"{kind}/gpt.decoder.final_layernorm.weight",
        "output.weight": f"{kind}/gpt.output_layer.weight",
        "embedding.weight": "weight/gpt.embedding.word_embeddings.weight",
    }
    for name, key in names.items():
        assert torch.equal(saved.read_parameter(name), tensors[key])
    assert saved.trained == [
        name for name in parameter_shapes(saved.model) if name != "embedding.weight"
    ]


def test_every_name_has_its_own_name_in_format_3():
    lora = ExtensionConfig(trains=["lora"], lora_rank=2)
    names = parameter_shapes(
        small_model(qk_norm=True, qkv_bias=True, attention_output_gate=True), lora
    )
    assert [current_name(f"gpt.{seed_name(name)}") for name in names] == list(names)
    assert [current_name(name) for name in names] == list(names)
