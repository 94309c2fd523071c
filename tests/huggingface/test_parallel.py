"""Tensor parallelism by transformers: two processes with half of the heads each compute what one does."""

import huggingface_parallel_cases
import pytest
import torch
from launch import run_group
from safetensors.torch import load_file
from small_models import build
from transformers.distributed import DistributedConfig

from megatron_tape.huggingface.export.remote_code import AUTO_MAP, write_code
from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM


def export(directory, groups):
    torch.manual_seed(0)
    options = dict(tie_word_embeddings=True, qk_norm=True, auto_map=AUTO_MAP, num_key_value_heads=groups)
    build(**options).save_pretrained(directory)
    write_code(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return export(tmp_path_factory.mktemp("whole") / "two", 2)


@pytest.fixture(scope="module")
def result(directory, tmp_path_factory):
    return run_group("huggingface_parallel_cases", 2, directory, export(tmp_path_factory.mktemp("one"), 1))


def test_two_processes_give_the_logits_and_tokens_of_one(result):
    for name in ("logits", "tp_plan"):
        torch.testing.assert_close(*result["kept"][name], rtol=1e-5, atol=1e-4)
    for way in ("batched", *huggingface_parallel_cases.WAYS):
        cut, whole = result["kept"][way]
        assert torch.equal(cut, whole), way
    assert len(whole[:, 13:].unique()) > 5, "too few different tokens to compare"


def test_two_processes_give_the_gradients_of_one(result):
    names = [name for name in result["kept"] if name.startswith("gradient of ")]
    assert sum(".position." in name for name in names) == 8
    for name in names:
        cut, whole = result["kept"][name]
        scale = whole.abs().max()
        assert scale > 0 and (cut - whole).abs().max() < 1e-4 * scale, name


def test_each_process_has_half_of_the_heads_and_token_mixings_columns(result):
    local = result["local"]
    layer = "model.layers.0."
    assert local[f"{layer}self_attn.q_proj.weight"] == (16, 32) and local[f"{layer}self_attn.k_proj.weight"] == (8, 32)
    assert local[f"{layer}position.token_mixing.weight"] == (2, 2)
    assert not any("position" in name for name in local if "token_mixing" not in name)


def test_a_cut_model_is_saved_whole(result, directory):
    expected = load_file(directory / "model.safetensors")
    # Of a cut model, transformers also writes the head that shares the embeddings' matrix.
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert result["saved"].keys() == expected.keys()
    assert all(torch.equal(result["saved"][name], expected[name]) for name in expected)


def test_more_processes_than_groups_are_refused_in_one_sentence(result):
    assert "num_key_value_heads 1 is not a multiple of 2 tensor-parallel processes" in result["refused"]


@pytest.mark.parametrize("given", [dict(pp_size=2), DistributedConfig(pp_size=2)], ids=["dict", "object"])
def test_pipeline_parallelism_is_refused_before_anything_is_loaded(given):
    with pytest.raises(NotImplementedError, match="do not support transformers' pipeline parallelism"):
        TapeForCausalLM.from_pretrained("nowhere", distributed_config=given)
    assert not build().supports_pp_plan
