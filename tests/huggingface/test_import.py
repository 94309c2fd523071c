"""tools/convert_checkpoint.py from-hf: imported models keep their logits, and export unchanged."""

import functools
import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from conversions import change_config, convert, refused
from datasets_for_tests import write_tokenizer
from models import build
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.errors import FileError, UserError
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.huggingface.imports import config_json, from_transformers, new_checkpoint
from megatron_tape.huggingface.imports.from_transformers import import_model
from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
# A head size with frequencies in every range of the scaling.
LLAMA3_2 = LLAMA3 | dict(rope_theta=500000.0, factor=32.0, original_max_position_embeddings=8192)
ORIGINAL = "original_max_position_embeddings"
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
PLAIN = dict(rope_type="default", rope_theta=1e4)
LINEAR = dict(rope_type="linear", rope_theta=200.0, factor=3.0)
# Of the 8 elements of a head, 6 are rotated.
PARTIAL = dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75)
OLDER = dict(type="linear", factor=3.0)
LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 4,
    long_factor=[2.0] * 4,
)
WIDE = {"use_sliding_window": True, "sliding_window": 16}
NO_LIST = {"no_rope_layers": None, "layer_types": None}
FAMILY = {
    "llama1": dict(num_key_value_heads=4),
    "llama2_gqa": dict(num_key_value_heads=1, rms_norm_eps=1e-5),
    "llama3_tied": dict(rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama_linear": dict(rope_parameters=LINEAR),
    "llama_yarn": dict(rope_parameters=YARN),
    "llama_share": dict(
        rope_parameters=dict(
            rope_type="proportional", partial_rotary_factor=0.5, factor=2.0, rope_theta=1e6
        )
    ),
    "smollm3": dict(no_rope_layer_interval=2, pad_token_id=0),
    "llama3_2": dict(
        rope_parameters=LLAMA3_2, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=2
    ),
    "mistral": dict(sliding_window=None, head_dim=12),
    "mistral_of_width_34": dict(sliding_window=None, hidden_size=34, initializer_range=0.1),
    "qwen2": dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "qwen3": dict(head_dim=128, tie_word_embeddings=True),
    "phi3": dict(pad_token_id=0, rms_norm_eps=1e-6),
    "phi3_partial": dict(pad_token_id=0, rope_parameters=PARTIAL, tie_word_embeddings=True),
}
SLIDING, FULL = "sliding_attention", "full_attention"
# transformers writes layer_types into config.json, except for Mistral and Phi-3.
WINDOWED = {
    "mistral_window": dict(sliding_window=7),
    "mistral_long": dict(sliding_window=99),
    "qwen2_window": dict(use_sliding_window=True, sliding_window=7, max_window_layers=0),
    "qwen3_window": dict(
        use_sliding_window=True, sliding_window=7, layer_types=[SLIDING, FULL, SLIDING], head_dim=8
    ),
    "smollm3_window": dict(
        use_sliding_window=True,
        sliding_window=7,
        layer_types=[SLIDING, SLIDING, FULL],
        no_rope_layers=[1, 1, 0],
        pad_token_id=0,
    ),
    "smollm3_rope": dict(
        use_sliding_window=True,
        sliding_window=7,
        layer_types=[SLIDING, FULL, SLIDING],
        no_rope_layers=[1, 1, 1],
        pad_token_id=0,
    ),
    "phi3_window": dict(sliding_window=7, pad_token_id=0),
}
IDS = torch.randint(
    90,
    (2, 60),
    generator=torch.Generator().manual_seed(5),
)


@functools.cache
def made_source(kind, dtype, vocab_size, max_shard_size):
    family = "llama" if kind.startswith("llama") else kind.split("_")[0]
    settings = SIZES | (FAMILY | WINDOWED)[kind] | {"vocab_size": vocab_size}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tempfile.TemporaryDirectory()
    model.to(dtype).save_pretrained(folder.name, max_shard_size=max_shard_size)
    return folder, loaded_logits(folder.name)


def write_source(
    folder, kind="llama3_tied", dtype=torch.float32, vocab_size=90, max_shard_size="1GB"
):
    """Write a model of transformers with random weights, biases and norms, and return its
    logits.
    """
    made, logits = made_source(kind, dtype, vocab_size, max_shard_size)
    shutil.copytree(made.name, folder)
    return logits


def loaded_logits(folder, dtype="float32"):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)(
            IDS
        ).logits


def training_logits(checkpoint):
    """Return the logits of this project's model, from which a run would start."""
    saved = open_weights(checkpoint)
    built, _ = build(saved.model, randomize=False)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(saved.read_parameter(name))
        return built(IDS)[..., :90]


def by_llamas_names(weights, kind):
    """Return the weights of a family by Llama's names: Phi-3's 4 query and 2 key heads of 8
    elements are split.
    """
    order = [0, 1, 2, 6, 3, 4, 5, 7] if kind == "phi3_partial" else range(8)
    rows = [8 * head + element for head in range(4) for element in order]
    found = {}
    for name, weight in weights.items():
        if name.endswith("qkv_proj.weight"):
            found[name.replace("qkv", "q")] = weight[rows]
            found[name.replace("qkv", "k")] = weight[32:48][rows[:16]]
            found[name.replace("qkv", "v")] = weight[48:]
        elif name.endswith("gate_up_proj.weight"):
            found[name.replace("gate_up", "gate")] = weight[:48]
            found[name.replace("gate_up", "up")] = weight[48:]
        else:
            found[name] = weight
    return found


@pytest.mark.parametrize("encoding", ["tape", "rope"])
@pytest.mark.parametrize("kind", FAMILY)
def test_an_imported_model_keeps_its_logits_and_exports_unchanged(tmp_path, kind, encoding):
    expected = write_source(tmp_path / "source", kind)
    import_model(tmp_path / "source", tmp_path / "imported", encoding, vocab_multiple=64)
    saved = open_weights(tmp_path / "imported")
    assert (saved.model.vocab_size, saved.model.unpadded_vocab_size) == (128, 90)
    torch.testing.assert_close(training_logits(tmp_path / "imported"), expected, atol=1e-5, rtol=0)

    export(tmp_path / "imported", tmp_path / "exported", tokenizer="none")
    torch.testing.assert_close(loaded_logits(tmp_path / "exported"), expected, atol=1e-5, rtol=0)
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("source", "exported")
    )
    before = by_llamas_names(before, kind)
    added = {name for name in after if ".position." in name}
    assert set(after) - added == set(before)
    assert bool(added) == (encoding == "tape")
    assert all(torch.equal(before[name], after[name]) for name in before)
    import_model(tmp_path / "exported", tmp_path / "again", encoding)
    torch.testing.assert_close(training_logits(tmp_path / "again"), expected, atol=1e-5, rtol=0)
    if encoding == "rope":
        assert not list((tmp_path / "exported").glob("*.py"))
        architecture = json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"]
        others = {
            "qwen2": "qwen2",
            "qwen3": "qwen3",
            "smollm3": "smollm3",
            "mistral_of_width_34": "mistral",
        }
        assert architecture == others.get(kind, "llama")


@pytest.mark.parametrize("encoding", ["tape", "rope"])
@pytest.mark.parametrize("kind", WINDOWED)
def test_an_imported_model_keeps_its_window(tmp_path, kind, encoding):
    expected = write_source(tmp_path / "source", kind)
    import_model(tmp_path / "source", tmp_path / "imported", encoding)
    model = open_weights(tmp_path / "imported").model
    assert model.sliding_window == WINDOWED[kind]["sliding_window"]
    torch.testing.assert_close(
        training_logits(tmp_path / "imported"), expected, atol=1e-5, rtol=1e-5
    )

    if encoding == "rope":
        export(tmp_path / "imported", tmp_path / "exported", tokenizer="none")
        found = loaded_logits(tmp_path / "exported")
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        exported = json.loads((tmp_path / "exported" / "config.json").read_text())
        # Phi-3 is a Mistral with fused weights.
        assert exported["model_type"] == kind.split("_")[0].replace("phi3", "mistral")


def test_sharded_bf16_weights_and_older_settings_can_be_imported(tmp_path):
    expected = write_source(tmp_path / "source", dtype=torch.bfloat16, max_shard_size="20KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").is_file()
    rope = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    older = {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": rope, "torch_dtype": "bfloat16"}
    change_config(tmp_path / "source", older, without=["rope_parameters"])
    done = convert("from-hf", "--model", tmp_path / "source", "--output", tmp_path / "imported")
    assert done.returncode == 0, done.stderr
    export(tmp_path / "imported", tmp_path / "exported", "bf16", tokenizer="none")
    torch.testing.assert_close(loaded_logits(tmp_path / "exported"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ["tape", "rope"])
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_an_import_ends_with_commands_that_train_and_extend_the_model(
    tmp_path, monkeypatch, encoding, has_tokenizer
):
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path / "my model")
    if has_tokenizer:
        write_tokenizer(tmp_path / "my model" / "tokenizer.json")
    options = ["--model", "my model", "--output", "an import", "--position-encoding", encoding]
    done = convert("from-hf", *options)
    assert done.returncode == 0, done.stderr
    tokenizer = "an import/tokenizer" if has_tokenizer else "TOKENIZER"
    commands = {}
    for line in done.stderr.splitlines():
        _, found, command = line.partition(": python -m ")
        if found:
            program, *arguments = shlex.split(command)
            recipe = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
            commands[program] = parse_run_config(
                [recipe if word == "RECIPE" else word for word in arguments]
            )
    assert list(commands) == ["pretrain.train", "pretrain.extend_context"]
    assert all(config.data.tokenizer == tokenizer for config in commands.values())
    model = commands["pretrain.train"].model
    assert (model.position_encoding, model.hidden_size, model.seq_length) == (encoding, 32, 64)
    longer = commands["pretrain.extend_context"].model
    assert (longer.position_encoding, longer.seq_length, longer.position.rope_scaling_factor) == (
        "tape",
        128,
        16.0,
    )


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"beta_fast": 8, "beta_slow": 2.0, "truncate": False}, None),
        ({"factor": None}, None),
        ({"attention_factor": 1.05}, 1.05),
        ({"mscale": 0.7, "mscale_all_dim": 1.0}, 0.9634748719862186),
    ],
)
def test_every_yarn_setting_is_read_as_in_transformers(tmp_path, changes, expected):
    write_source(tmp_path / "source", "llama_yarn")
    change_config(tmp_path / "source", {"rope_parameters": YARN | changes})
    import_model(tmp_path / "source", tmp_path / "imported")
    attention = open_weights(tmp_path / "imported").model.position.rope_attention_factor
    assert attention == (expected if expected is None else pytest.approx(expected))
    export(tmp_path / "imported", tmp_path / "exported", tokenizer="none")
    logits = loaded_logits(tmp_path / "source")
    torch.testing.assert_close(training_logits(tmp_path / "imported"), logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded_logits(tmp_path / "exported"), logits, atol=1e-5, rtol=0)


def test_an_exported_tape_model_can_be_reimported(tmp_path):
    write_source(tmp_path / "source", "qwen3")
    import_model(tmp_path / "source", tmp_path / "first")
    export(tmp_path / "first", tmp_path / "exported", tokenizer="none")
    path = tmp_path / "exported" / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if ".position." in name:
            weights[name] = torch.randn_like(weights[name]) * 0.3
    save_file(weights, path)
    import_model(tmp_path / "exported", tmp_path / "second", vocab_multiple=16)
    torch.testing.assert_close(
        training_logits(tmp_path / "second"),
        loaded_logits(tmp_path / "exported"),
        atol=1e-4,
        rtol=1e-4,
    )
    export(tmp_path / "second", tmp_path / "again", tokenizer="none")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(weights)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    with pytest.raises(FileError, match="cannot become rope"):
        import_model(tmp_path / "exported", tmp_path / "no", "rope")


@pytest.mark.parametrize("kind", ["llama3_tied", "phi3_partial"])
def test_pickles_need_permission_and_give_the_same_weights(tmp_path, kind):
    write_source(tmp_path / "source", kind)
    import_model(tmp_path / "source", tmp_path / "expected")
    safe = tmp_path / "source" / "model.safetensors"
    torch.save(load_file(safe), tmp_path / "source" / "pytorch_model.bin")
    safe.unlink()
    arguments = ["from-hf", "--model", tmp_path / "source", "--output", tmp_path / "imported"]
    refused(tmp_path, "--allow-pickle", *arguments)
    done = convert(*arguments, "--allow-pickle")
    assert done.returncode == 0, done.stderr
    imported, expected = (
        tmp_path / name / "tensors-tp00-dp00000.safetensors" for name in ("imported", "expected")
    )
    assert imported.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    "kind, change, named",
    [
        ("llama1", {"model_type": "gemma3_text"}, "model_type"),
        ("llama1", {"model_type": ["olmo2"]}, "model_type"),
        ("llama1", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama1", {"attention_bias": True}, "attention_bias"),
        ("llama1", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("mistral", {"sliding_window": "63"}, "model.sliding_window"),
        ("mistral", {"sliding_window": 0}, "model.sliding_window"),
        ("mistral", {"layer_types": [SLIDING] * 3}, "no size of a window"),
        ("qwen2", NO_LIST | WIDE | {"max_window_layers": 1}, "max_window_layers.*every n-th"),
        ("qwen3", {"layer_types": [SLIDING, FULL]}, "layer_types"),
        ("qwen3", {"layer_types": [SLIDING] * 3}, "no size of a window"),
        ("qwen3", WIDE | {"layer_types": [SLIDING, "chunked_attention", SLIDING]}, "layer_types"),
        # As in CWM, and as in OLMo 3, whose last layer always attends to all tokens.
        ("qwen3", WIDE | {"layer_types": [FULL, SLIDING, SLIDING]}, "layer_types.*every n-th"),
        ("qwen3", WIDE | {"layer_types": [SLIDING, FULL, FULL]}, "layer_types.*every n-th"),
        ("llama1", {"model_type": "cwm"}, "model_type.*layers 1, 5, 9"),
        ("llama1", {"model_type": "tape", "sliding_window": 7}, "sliding_window.*another type"),
        # By default, SmolLM3 has the window in the layers without RoPE.
        ("smollm3", WIDE | {"layer_types": None}, "layer_types.*every n-th"),
        ("smollm3", {"sliding_window": 7, "layer_types": [SLIDING] * 3}, "no size of a window"),
        ("llama1", {"num_attention_heads": "four"}, "num_attention_heads"),
        ("llama1", {"head_dim": 8.0}, "model.kv_channels"),
        ("llama1", {"num_hidden_layers": 4}, "lacks the parameter model.layers.3"),
        ("llama1", {"num_hidden_layers": 2}, "contains model.layers.2"),
        ("llama1", {"vocab_size": 80}, "embed_tokens.weight"),
        ("llama1", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("qwen2", {"model_type": "llama"}, "k_proj.bias"),
        ("llama1", {"rope_parameters": LONG}, "rope_parameters.rope_type"),
        ("llama1", {"rope_parameters": {"rope_type": "linear"}}, "has no factor"),
        ("llama1", {"rope_parameters": YARN | {"factor": None, ORIGINAL: 0}}, "impossible number"),
        ("llama1", {"rope_parameters": LINEAR | {"low_freq_factor": 1.0}}, "low_freq_factor"),
        ("llama1", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("llama1", {"rope_parameters": [PLAIN]}, "wrong type"),
        ("llama1", {"rope_parameters": {"full_attention": LINEAR}}, "full_attention"),
        ("llama1", {"rope_scaling": LINEAR}, "rope_scaling and rope_parameters differ"),
        ("llama1", {"rope_parameters": PLAIN, "rope_theta": 5e5}, "rope_theta"),
        # transformers uses rope_scaling, and its default theta.
        (
            "llama1",
            {
                "rope_parameters": PLAIN | {"rope_theta": 5e5},
                "rope_scaling": {"rope_type": "default"},
            },
            "rope_theta",
        ),
        ("phi3", {"sliding_window": 63, "layer_types": [SLIDING, FULL, SLIDING]}, "layer_types"),
        ("phi3", {"rope_parameters": YARN}, "rope_parameters.rope_type"),
        ("phi3", {"rope_parameters": PARTIAL | {"partial_rotary_factor": 0.4}}, "partial_rotary"),
        ("phi3", {"rope_parameters": PARTIAL | {"partial_rotary_factor": 1.5}}, "partial_rotary"),
        ("phi3", {"num_key_value_heads": 4}, "qkv_proj.weight another shape"),
        ("phi3", {"num_hidden_layers": 4}, "lacks the parameter model.layers.3"),
        ("phi3", {"num_hidden_layers": 2}, "contains model.layers.2"),
        ("phi3", {"model_type": "llama"}, "gate_up_proj.weight"),
        ("smollm3", NO_LIST | {"no_rope_layer_interval": 2.5}, "layers_without_positions"),
        ("smollm3", NO_LIST | {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}, "no_rope_layers"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, kind, change, named):
    write_source(tmp_path / "source", kind)
    change_config(tmp_path / "source", change)
    with pytest.raises(UserError, match=named):
        import_model(tmp_path / "source", tmp_path / "imported")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    "kind, change",
    [
        ("llama_linear", {"rope_parameters": LINEAR, "rope_scaling": OLDER, "rope_theta": 200.0}),
        ("llama_linear", {"rope_parameters": OLDER, "rope_scaling": OLDER}),
        ("llama3_tied", {ORIGINAL: 32}),
        (
            "phi3",
            {
                "rope_parameters": None,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                ORIGINAL: 32,
            },
        ),
        # A sliding window that holds the whole context.
        ("mistral", {"sliding_window": 4096, "layer_types": [SLIDING] * 3}),
        # transformers reads this as a Ministral.
        ("mistral", {"sliding_window": 16, "layer_types": [SLIDING, FULL, SLIDING]}),
        ("mistral", {"sliding_window": 16, "layer_types": [FULL] * 3}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
        ("qwen2", WIDE | {"max_window_layers": 1}),
        ("qwen2", NO_LIST | WIDE),
        ("qwen3", NO_LIST | WIDE | {"max_window_layers": 0}),
        ("smollm3", WIDE),
        ("smollm3", NO_LIST | WIDE | {"no_rope_layer_interval": 5}),
    ],
)
def test_settings_are_read_from_the_same_keys_as_in_transformers(tmp_path, kind, change):
    write_source(tmp_path / "source", kind)
    change_config(tmp_path / "source", change)
    import_model(tmp_path / "source", tmp_path / "imported")
    expected = loaded_logits(tmp_path / "source")
    torch.testing.assert_close(training_logits(tmp_path / "imported"), expected, atol=1e-5, rtol=0)


def test_defaults_equal_those_of_transformers():
    for name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "tape"):
        config = TapeConfig() if name == "tape" else AutoConfig.for_model(name)
        for key, value in config_json.DEFAULTS[name].items():
            if key == "sliding_window" and name != "mistral":
                # Without this flag, the window of Qwen's models is null.
                config = AutoConfig.for_model(name, use_sliding_window=True)
            assert getattr(config, key) == value, (name, key)
        assert (config.initializer_range, config.tie_word_embeddings) == (0.02, False)
        assert config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    "name, change",
    [
        ("model.layers.0.self_attn.q_proj.weight", lambda x: x.to(torch.int8)),
        ("model.layers.0.self_attn.k_proj.weight", lambda x: x.repeat(2, 1)),
        ("model.norm.weight", lambda x: x * float("nan")),
    ],
)
def test_weights_of_wrong_shape_or_dtype_or_with_nan_are_named(tmp_path, name, change):
    write_source(tmp_path / "source", "llama1")
    path = tmp_path / "source" / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {name: change(weights[name])}, path)
    with pytest.raises(FileError, match=name):
        import_model(tmp_path / "source", tmp_path / "imported")
    assert os.listdir(tmp_path) == ["source"]


def test_a_malicious_pickle_does_not_run_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    write_source(tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap()}, tmp_path / "source" / "pytorch_model.bin")
    with pytest.raises(FileError, match="never loaded"):
        import_model(tmp_path / "source", tmp_path / "imported", allow_pickle=True)
    assert os.listdir(tmp_path) == ["source"]


def test_incomplete_and_damaged_models_are_refused(tmp_path):
    write_source(tmp_path / "source", max_shard_size="20KB")
    shards = sorted((tmp_path / "source").glob("*.safetensors"))
    index = "model.safetensors.index.json"

    def is_refused(part, damage):
        damaged = tmp_path / "damaged"
        shutil.copytree(tmp_path / "source", damaged)
        damage(damaged)
        with pytest.raises(FileError, match=part):
            import_model(damaged, tmp_path / "imported")
        shutil.rmtree(damaged)
        assert os.listdir(tmp_path) == ["source"]

    def place(name):
        return lambda folder: (folder / index).write_text(json.dumps({"weight_map": {"a": name}}))

    is_refused("is incomplete", lambda folder: (folder / shards[1].name).unlink())
    is_refused("not a complete", lambda folder: os.truncate(folder / shards[0].name, 5000))
    is_refused("not JSON", lambda folder: (folder / "config.json").write_text("{"))
    is_refused("config.json is not a file", lambda folder: (folder / "config.json").unlink())
    is_refused("in none of its files", lambda folder: save_file({}, folder / shards[1].name))
    is_refused("contains none of", lambda folder: [path.unlink() for path in folder.glob("model*")])
    for name in ("../../secret", "..", "a/b", "", "\0", "/etc/passwd"):
        is_refused("not an index", place(name))
    with pytest.raises(FileError, match="hf download"):
        import_model(tmp_path / "nowhere", tmp_path / "imported")
    import_model(tmp_path / "source", tmp_path / "imported")
    with pytest.raises(FileError, match="imported exists"):
        import_model(tmp_path / "source", tmp_path / "imported")


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_a_chat_model_keeps_its_tokenizer_stop_ids_settings_and_templates(tmp_path, place):
    source = tmp_path / "source"
    write_source(source)
    write_tokenizer(source / "tokenizer.json")
    (source / "generation_config.json").unlink()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    generation = {"eos_token_id": [63, 57], "bos_token_id": 5}
    if place == "generation_config.json":
        generation |= {
            "temperature": 0.6,
            "top_p": 0.9,
            "do_sample": True,
            "repetition_penalty": 1.1,
        }
        (source / place).write_text(json.dumps(generation))
    change_config(source, {key: generation[key] for key in ("eos_token_id", "bos_token_id")})
    import_model(source, tmp_path / "imported")
    export(tmp_path / "imported", tmp_path / "exported")
    exported = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert {key: exported.get(key) for key in generation} == generation
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["eos_token_id"] == [
        63,
        57,
    ]
    for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "exported" / name).read_bytes() == (source / name).read_bytes()
    assert (
        "split_special_tokens" not in (tmp_path / "exported" / "tokenizer_config.json").read_text()
    )


def test_links_out_of_a_model_directory_are_refused_first(tmp_path, monkeypatch):
    source = tmp_path / "source"
    write_source(source)
    write_tokenizer(tmp_path / "tokenizer.json")
    (source / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    monkeypatch.setattr(
        from_transformers, "open_model", lambda *_: pytest.fail("the weights were opened")
    )
    with pytest.raises(FileError, match="tokenizer.json is a link to a file elsewhere"):
        import_model(source, tmp_path / "imported")


def test_a_tokenizer_with_more_ids_than_the_model_is_not_imported(tmp_path, capsys):
    write_source(tmp_path / "source")
    write_tokenizer(path := tmp_path / "source" / "tokenizer.json")
    path.write_text(
        path.read_text().replace('"w1": 1,', '"w1": 99,').replace('"w1":1,', '"w1":99,')
    )
    import_model(tmp_path / "source", tmp_path / "imported")
    assert "has a tokenizer of 100 ids for only 90 rows" in capsys.readouterr().err


def test_shapes_are_checked_before_anything_is_allocated_or_written(tmp_path, monkeypatch):
    write_source(tmp_path / "source", "llama1")
    huge = 2**16
    sizes = {"num_attention_heads": huge, "num_key_value_heads": huge, "head_dim": huge}
    change_config(tmp_path / "source", sizes)
    monkeypatch.setattr(
        new_checkpoint, "atomic_directory", lambda *_: pytest.fail("it began to write")
    )
    with pytest.raises(FileError, match="q_proj.weight the shape"):
        import_model(tmp_path / "source", tmp_path / "imported")
