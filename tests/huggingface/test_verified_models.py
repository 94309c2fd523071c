"""tape-verify passes for models of all importable families and all export formats, with the pinned
and the oldest supported transformers.
"""

import json
import sysconfig

import pytest
import torch
from environments import ROOT, run_in
from exported_models import OWN_CLASSES, PLAIN_ROPE, make
from models import INCREMENTS, LLAMA3, SOME_LAYERS, WINDOWS, YARN
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from megatron_tape.position import BUILT_IN

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    initializer_range=0.2,
    pad_token_id=0,
)
ROTARY = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    },
    "partial": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
WINDOW = {"sliding_window": 7}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, rope_parameters=ROTARY["default"]),
    "llama_linear": LlamaConfig(**SIZES, rope_parameters=ROTARY["linear"]),
    "llama_3": LlamaConfig(**SIZES, rope_parameters=ROTARY["llama3"], tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, **WINDOW, rope_parameters=ROTARY["default"]),
    "mistral_yarn": MistralConfig(**SIZES, sliding_window=None, rope_parameters=ROTARY["yarn"]),
    "qwen2": Qwen2Config(**SIZES, rope_parameters=ROTARY["default"]),
    "qwen2_windows": Qwen2Config(
        **SIZES,
        **WINDOW,
        use_sliding_window=True,
        max_window_layers=0,
        rope_parameters=ROTARY["default"],
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, rope_parameters=ROTARY["default"]),
    "qwen3_yarn": Qwen3Config(**SIZES, head_dim=8, rope_parameters=ROTARY["yarn"]),
    "smollm3": SmolLM3Config(**SIZES, rope_parameters=ROTARY["default"]),
    "smollm3_windows": SmolLM3Config(
        **SIZES,
        **WINDOW,
        use_sliding_window=True,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters=ROTARY["default"],
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=None, rope_parameters=ROTARY["default"]),
    "phi3_partial": Phi3Config(**SIZES, **WINDOW, rope_parameters=ROTARY["partial"]),
}
PLAIN = {
    "rope": {},
    "rope_llama3": LLAMA3,
    "rope_yarn": YARN,
    "rope_linear": {"rope_scaling_factor": 2.0},
    "rope_share": {"rope_share": 0.5},
    "mistral": {"sliding_window": 5},
    "qwen2": {"qkv_bias": True},
    "qwen3_windows": {"qk_norm": True, "sliding_window": 5, "full_attention_every": 2},
    "smollm3": {"sliding_window": 5, "full_attention_every": 2},
    "swan": {
        "num_layers": 4,
        "layers_without_positions": 2,
        "sliding_window": 5,
        "full_attention_every": 2,
    },
}
TAPE = {"tape": {}, "tape_yarn": YARN, "tape_norms": {"qk_norm": True, "qkv_bias": True}}
WITH_CODE = {
    **{encoding.name: {} for encoding in BUILT_IN},
    **INCREMENTS,
    **SOME_LAYERS,
    **WINDOWS,
}
SCRIPT = """
import contextlib, io, json, site, sys

packages, root, *models = sys.argv[1:]
# After the packages of this environment.
site.addsitedir(packages)
sys.path[:0] = [root, f"{root}/tools"]
import torch, transformers
import verify

torch.set_num_threads(1)
found = {"version": transformers.__version__}
for arguments in map(json.loads, models):
    sys.argv = ["verify.py", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            status = verify.main()
        except ValueError as error:
            status = 2
            print(error)
    found[arguments[0]] = status, out.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the arguments of tape-verify by the name of the model."""
    folder = tmp_path_factory.mktemp("verified")
    arguments = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        arguments[name] = [name]

    def add(name, kind, **settings):
        """Export a random model, whose checkpoint is what it is compared with."""
        made = make(folder, kind, label=name, **settings)
        arguments[name] = [name, "--against", f"checkpoints/{name}"]
        assert made.directory == folder / name

    for name, settings in PLAIN.items():
        add(f"plain_{name}", PLAIN_ROPE, **settings)
    for name, settings in TAPE.items():
        add(f"own_{name}", OWN_CLASSES, **settings)
    for name, settings in WITH_CODE.items():
        settings = dict(settings)
        kind = settings.pop("position_encoding", None)
        if kind is None:
            kind = name if name in {encoding.name for encoding in BUILT_IN} else "tape"
        add(f"code_{name}", kind, **settings)
    return folder, arguments


@pytest.mark.parametrize("which", ["pinned", "transformers"])
def test_all_models_are_equal(models, which):
    folder, arguments = models[0], dict(models[1])
    script = folder / "script.py"
    script.write_text(SCRIPT)
    packages = sysconfig.get_path("purelib")
    listed = [json.dumps(words) for words in arguments.values()]
    done = run_in(which, folder, script, packages, ROOT, *listed)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    version = found.pop("version")
    assert (version == "5.0.0") == (which == "transformers")
    if version == "5.0.0":
        status, problem = found.pop("plain_rope_share")
        assert status == 2
        assert "proportional" in problem  # a type that this version does not have
        del arguments["plain_rope_share"]
    different = [report for status, report in found.values() if status != 0]
    assert not different, "\n".join(different)
    assert found.keys() == arguments.keys()
    for _, report in found.values():
        assert f"transformers {version}" in report
        assert "with a cache, in chunks, bf16" in report
