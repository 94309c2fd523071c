"""TAPE models in vLLM with the plug-in of transformers_tape: results and refusals."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from environments import ROOT, python_of, run_in
from exported_models import OWN_CLASSES, PLAIN_ROPE, changed_weights, make, write_no_bytes
from models import YARN, small_model

from megatron_tape.huggingface.export.to_transformers import huggingface_config

PACKAGE = ROOT / "transformers_tape" / "src" / "transformers_tape"
# The demo's model; SmolLM2-135M's sizes; the other settings of TAPE; a Llama with YaRN; windows.
DEMO = dict(num_layers=6, hidden_size=192, ffn_hidden_size=512, num_attention_heads=6)
DEMO |= dict(num_query_groups=6, seq_length=256)
SMOLLM2 = dict(num_layers=4, hidden_size=576, ffn_hidden_size=1536, num_attention_heads=9)
SMOLLM2 |= dict(num_query_groups=3, tie_embeddings=True, rope_theta=1e5, seq_length=1024)
SCALED = dict(rope_scaling_type="yarn", rope_scaling_factor=4.0, rope_original_seq_length=64)
OTHER = dict(kv_channels=16, qkv_bias=True, qk_norm=True, gate_input="attention")
OTHER |= dict(state_precision="bf16", seq_length=256)
SWAN = dict(sliding_window=20, full_attention_every=2, layers_without_positions=2)
MODELS = {
    "demo": (OWN_CLASSES, DEMO | dict(mlp_size=24)),
    "smollm2": (OWN_CLASSES, SMOLLM2 | dict(mlp_size=36)),
    "other_settings": (OWN_CLASSES, OTHER | SCALED),
    "rope": (PLAIN_ROPE, DEMO | SCALED | dict(rope_attention_factor=1.3)),
    "mistral": (PLAIN_ROPE, DEMO | SCALED | dict(sliding_window=20)),
    "qwen3": (PLAIN_ROPE, DEMO | dict(sliding_window=20, qk_norm=True)),
    "smollm3": (PLAIN_ROPE, DEMO | SWAN),
}

REFUSED = """
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
os.environ["VLLM_PLUGINS"] = ""
import vllm.plugins
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory

tape, *encoded = sys.argv[1:]


def refused(path, **options):
    try:
        LLM(path, enforce_eager=True, skip_tokenizer_init=True, **options)
    except NotImplementedError as error:
        print(error)
    cleanup_dist_env_and_memory()


for path in (tape, *encoded):
    refused(path, trust_remote_code=True)
del os.environ["VLLM_PLUGINS"]
vllm.plugins.plugins_loaded = False
refused(tape, pipeline_parallel_size=2)
refused(tape, kv_cache_dtype="fp8")
layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
refused(tape, speculative_config=method | {"draft_model_config": layers})
"""


@pytest.fixture(scope="module")
def plugin():
    """Load the plug-in's file, which imports vLLM only to register with it."""
    spec = importlib.util.spec_from_file_location(
        "transformers_tape.vllm_plugin", PACKAGE / "vllm_plugin.py"
    )
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def settings(stages=1, cache="auto", method=None):
    """Return the part of vLLM's settings that the plug-in reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(head_dim=48),
            model_arch_config=SimpleNamespace(),
            dtype=torch.bfloat16,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        cache_config=SimpleNamespace(cache_dtype=cache),
        speculative_config=method and SimpleNamespace(method=method),
    )


@pytest.mark.parametrize(
    "given",
    [{}, {"cache": "bfloat16"}, {"method": "draft_model"}],
)
def test_the_cache_has_twice_the_head_size(plugin, given):
    for_vllm = settings(**given)
    for _ in range(2):  # vLLM calls it at start, and the model again
        plugin.double_head_size(for_vllm)
        assert for_vllm.model_config.model_arch_config.head_size == 96


@pytest.mark.parametrize(
    "given, names",
    [
        ({"stages": 2}, "pipeline parallelism.*set pipeline_parallel_size to 1"),
        ({"cache": "float32"}, "kv_cache_dtype float32 with weights in torch.bfloat16"),
        ({"method": "eagle"}, "speculative method eagle.*ngram"),
    ],
)
def test_unsupported_vllm_settings_are_refused_by_name(plugin, given, names):
    with pytest.raises(NotImplementedError, match=f"^TAPE models in vLLM do not support .*{names}"):
        plugin.double_head_size(settings(**given))


def test_an_incompatible_vllm_gives_a_warning_instead_of_an_error(plugin, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    with pytest.warns(RuntimeWarning, match="could not add TAPE models to vLLM .*0.32.0"):
        plugin.register()


@pytest.mark.parametrize(
    "encoding, seq_length, context",
    [
        ("rope", 48, 48),
        ("rope", 64, 64),
        ("rope", 80, 64),
        ("tape", 80, 80),
    ],
)
def test_vllm_serves_no_position_beyond_those_that_yarn_scales_to(encoding, seq_length, context):
    """vLLM's sines and cosines end there; those of TAPE models are computed for any position."""
    model = small_model(position_encoding=encoding, seq_length=seq_length, **YARN)
    config = huggingface_config(model, model.vocab_size, "fp32")
    assert config["max_position_embeddings"] == context


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with an installed transformers-tape, including its entry point."""
    folder = tmp_path_factory.mktemp("site")
    pip = [
        python_of("vllm"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
        "--target",
        folder,
    ]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
    subprocess.run([*pip, *options, ROOT / "transformers_tape"], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_equals_transformers_in_tokens_and_logprobs(site, code_tokenizer, tmp_path):
    directories = []
    for name, (kind, sizes) in MODELS.items():
        sizes = dict(vocab_size=400, unpadded_vocab_size=400, init_std=0.06) | sizes
        directory = make(
            tmp_path, kind, label=name, tokenizer=str(code_tokenizer), **sizes
        ).directory
        with changed_weights(directory) as weights:
            for key in weights:
                # Far from RoPE, but not so far that every layer amplifies rounding errors.
                weights[key] *= 0.3 if ".position." in key else 1.0
        directories.append(directory)
    write_no_bytes(directories[0])  # its responses are streamed
    script = ROOT / "tests" / "huggingface" / "equality_vllm.py"
    command = [script, *directories, "--json", tmp_path / "rows.json"]
    # Inductor itself would take minutes.
    done = run_in("vllm", tmp_path, *command, PYTHONPATH=str(site), VLLM_CPU_CI_ENV="1")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    (alone,) = (found for what, found in rows.items() if what.startswith("one request"))
    served_by = {name: found["module"] for name, found in alone.items()}
    ours = "transformers_tape.vllm_model"
    vllms = "vllm.model_executor.models"
    assert served_by == {
        "demo": ours,
        "smollm2": ours,
        "other_settings": ours,
        "rope": f"{vllms}.llama",
        "mistral": f"{vllms}.mistral",
        "qwen3": f"{vllms}.qwen3",
        # vLLM has no class of its own for it, and uses that of transformers.
        "smollm3": f"{vllms}.transformers",
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_refuses_unsupported_settings_before_loading_a_model(
    site, exports, exported, tmp_path
):
    directories = [
        exports["tape"].directory,
        *(exported(name).directory for name in ("t5", "tape_learned")),
    ]
    done = run_in("vllm", tmp_path, "-c", REFUSED, *directories, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr[-3000:]
    *refused, pipeline, cache, speculation = done.stdout.splitlines()
    assert len(refused) == len(directories)
    assert all("no position state" in line for line in refused)
    named = (pipeline, cache, speculation)
    for line, name in zip(
        named, ("pipeline parallelism", "kv_cache_dtype fp8", "extract_hidden_states"), strict=True
    ):
        assert line.startswith("TAPE models in vLLM do not support")
        assert name in line
