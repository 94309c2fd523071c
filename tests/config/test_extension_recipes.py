"""Recipes of context extensions are valid with a base model, and recipes of two methods differ only
in the method.
"""

import dataclasses
import json
import math

import pytest
from configurations import model_config, with_values
from plans import RECIPES, recipe

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.combinations import validate
from megatron_tape.config.schema import ENCODINGS, config_dict
from megatron_tape.extension.base_checks import check_base
from megatron_tape.huggingface.export.to_transformers import huggingface_config
from megatron_tape.model.shapes import hugging_face_shapes

LLAMA2_7B = model_config(
    position_encoding="rope",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    seq_length=4096,
    vocab_size=32000,
)
LLAMA3_8B = with_values(
    LLAMA2_7B,
    ffn_hidden_size=14336,
    num_query_groups=8,
    vocab_size=128256,
    seq_length=8192,
    rope_theta=500000.0,
)
METHODS = {
    "tape": {
        "model.position_encoding": "tape",
        "extension.trains": ["position", "embeddings", "norms"],
    },
    "lora": {},
    "longlora": {"extension.attention": "shifted_sparse"},
    "theta": {"model.position.rope_theta": 1e6},
    "theta_only": {"model.position.rope_theta": 1e6, "model.position.rope_scaling_factor": 1.0},
    "pi": {"extension.trains": ["embeddings", "norms"]},
    "yarn": {
        "model.position.rope_scaling_type": "yarn",
        "model.position.rope_original_seq_length": 4096,
    },
    "swa": {
        "model.sliding_window": 2048,
        "model.full_attention_every": 4,
        "model.position.rope_scaling_type": "yarn",
        "model.position.rope_scaling_layers": "full",
        "model.position.rope_original_seq_length": 4096,
    },
    "full": {"extension.trains": ["all"]},
    "tape_lora": {
        "model.position_encoding": "tape",
        "extension.trains": ["position", "lora", "embeddings", "norms"],
    },
}
"""Settings in which each recipe of the paper's experiment differs from lora.yaml."""
FOR_CPUS = {"tiny_tape", "tiny_rope", "smollm2_tape", "smollm2_lora"}
"""Recipes of the two demos, which also run on a CPU."""
OTHERS = {
    "prolong_llama3_8b_64k": LLAMA3_8B,
    "olmo_like_8k_64k_yarn": LLAMA3_8B,
    "drope_llama3_8b": LLAMA3_8B,
}


@pytest.fixture(scope="module")
def extend(tmp_path_factory):
    """Return a function that reads a recipe with a Hugging Face model as base, whose weight file
    contains no data.
    """

    def read(name, base):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(
            json.dumps(huggingface_config(base, base.vocab_size, "bf16"))
        )
        write_sparse_weights(folder / "model.safetensors", base)
        path = RECIPES / "extend" / f"{name}.yaml"
        config = parse_run_config(["--config", str(path), f"--extension.from={folder}"])
        # The tokenizers of the recipes do not exist here: the demo writes its own, and others are
        # downloaded.
        check_base(
            dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=None))
        )
        return config

    return read


def write_sparse_weights(path, model):
    """Write a safetensors file with the tensors of a model as a sparse file, which takes no space
    on the disk.
    """
    header = {}
    end = 0
    for name, shape in hugging_face_shapes(model).items():
        size = 2 * math.prod(shape)
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def methods(extend):
    return {name: extend(name, LLAMA2_7B) for name in METHODS}


def by_dotted_key(settings, prefix=""):
    """Return nested settings by dotted key."""
    result = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            result |= by_dotted_key(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def flat(config):
    """Return the settings by dotted key, except those that differ between all recipes."""
    ignored = ("extension.from", "logging.directory", "checkpoint.directory")
    return {
        key: value
        for key, value in by_dotted_key(config_dict(config)).items()
        if key not in ignored
    }


def test_every_recipe_is_tested():
    assert {
        path.stem for path in (RECIPES / "extend").glob("*.yaml")
    } == METHODS.keys() | OTHERS.keys() | FOR_CPUS


@pytest.mark.parametrize("name", METHODS)
def test_recipes_of_two_methods_differ_only_in_the_method(methods, name):
    tape, rope = (
        {item.name for item in dataclasses.fields(ENCODINGS[encoding].Settings)}
        for encoding in ("tape", "rope")
    )
    only_tape = {f"model.position.{key}" for key in tape - rope}
    settings = {key: value for key, value in flat(methods[name]).items() if key not in only_tape}
    assert settings == flat(methods["lora"]) | METHODS[name]
    for world_size in (8, 1, 64):
        validate(methods[name], world_size)


def test_the_recipes_have_the_settings_of_the_paper(methods):
    config = methods["lora"]
    train = config.train
    assert (train.steps, train.global_batch_size, config.model.seq_length) == (1000, 64, 8192)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-5, 0.0)
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("constant", 50)
    assert config.model.position.rope_scaling_factor == 2.0
    assert config.extension.trains == ["lora", "embeddings", "norms"]
    assert (config.extension.lora_rank, config.extension.lora_alpha) == (8, 16.0)


@pytest.mark.parametrize("name", OTHERS)
def test_recipes_of_other_papers_are_valid_for_their_numbers_of_gpus(extend, name):
    config = extend(name, OTHERS[name])
    for world_size in (8, 16, 512):
        validate(config, world_size)
    assert config.train.global_batch_size * config.model.seq_length == 2**22


def test_the_demo_extends_tape_and_rope_with_the_same_settings(extend):
    tape, rope = (extend(f"tiny_{name}", recipe(f"{name}_demo").model) for name in ("tape", "rope"))
    for config in (tape, rope):
        for world_size in (1, 2):
            validate(config, world_size)
        assert config.model.seq_length == 4 * 256 == config.model.position.rope_scaling_factor * 256
    of_tape = flat(tape)
    different = {key for key, value in flat(rope).items() if of_tape[key] != value}
    assert different == {"model.position_encoding", "extension.trains"}
