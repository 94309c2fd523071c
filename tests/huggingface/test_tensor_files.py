"""Safetensors files of an export: written one tensor at a time, of the type asked for."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conversions import TOOL, convert, limited_files
from tool_runs import ROOT

from megatron_tape.checkpoint.directories import digest
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import model_config


def test_a_full_disk_is_one_sentence_and_leaves_nothing(exports, tmp_path):
    folder = exports["tape"].directory.parent
    arguments = ["to-hf", "--checkpoint", folder / "checkpoints" / "tape", "--output", tmp_path / "out"]
    arguments += ["--tokenizer", folder / "tokenizer.model"]
    largest = max(path.stat().st_size for path in exports["tape"].directory.iterdir())
    for size in (0, 300, 1000, 4000, 12000, largest - 1):
        with limited_files(size):
            done = convert(*arguments)
        assert done.returncode == 1 and os.listdir(tmp_path) == []
        assert done.stderr.splitlines()[-1] == f"error: File too large: {tmp_path / 'out'}", (size, done.stderr)
    assert convert(*arguments).returncode == 0


BIG = {
    "position_encoding": "tape",
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "seq_length": 1024,
    "vocab_size": 32000,
    "tie_embeddings": False,
}


def write_synthetic(step, size):
    """A checkpoint of zeros, without Adam's state, whose files have holes for their contents."""
    from megatron_tape.model.shapes import parameter_shapes

    model = model_config(**BIG)
    assert parameter_count(model) > 1e9
    cut = {"linear_qkv": (0, 1), "linear_proj": (1, 1), "linear_fc1": (0, 2), "linear_fc2": (1, 1)}
    cut |= {"word_embeddings": (0, 1), "output_layer": (0, 1)}
    shapes = {f"gpt.{name}": shape for name, shape in parameter_shapes(model).items()}
    sharded = {
        name: {"dim": dim, "stride": stride} for name in shapes for part, (dim, stride) in cut.items() if part in name
    }
    step.mkdir(parents=True)
    files = {}
    for rank in range(size):
        header, end = {}, 0
        for name, whole in shapes.items():
            shape = list(whole)
            if name in sharded:
                shape[sharded[name]["dim"]] //= size
            start, end = end, end + 4 * int(torch.tensor(shape).prod())
            header[f"weight/{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        encoded = json.dumps(header).encode()
        path = step / f"tensors-tp{rank:02d}-dp00000.safetensors"
        with open(path, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + end)
        files[path.name] = path
    state = {"step": 1, "optimizer_steps": 1, "consumed_samples": 1, "progress": {}}
    state |= {"tensor_model_parallel_size": size, "data_parallel_size": 1, "sharded": sharded, "config": {"model": BIG}}
    (step / "state.json").write_text(json.dumps(state))
    files["state.json"] = step / "state.json"
    entries = {name: digest(path) for name, path in files.items()}
    (step / "manifest.json").write_text(json.dumps({"format_version": 2, "step": 1, "files": entries}))
    return model


@pytest.mark.slow
def test_a_billion_parameters_stream_through_little_memory(tmp_path):
    model = write_synthetic(tmp_path / "step-00000001", 2)
    program = (
        "import resource, runpy, sys; sys.argv[:] = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    arguments = [TOOL, "to-hf", "--checkpoint", tmp_path / "step-00000001", "--output", tmp_path / "out"]
    arguments += ["--tokenizer", "none", "--dtype", "bf16", "--max-shard-size", "1.5GB"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    largest = 4 * model.hidden_size * max(model.vocab_size, 3 * model.ffn_hidden_size)
    peak = 1024 * int(done.stdout)
    assert peak < 3 * largest + 2e9
    # That bound would hold most of this model; what streams stays far below.
    assert peak < 1.5e9
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written > 2 * parameter_count(model)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    shutil.rmtree(tmp_path)
