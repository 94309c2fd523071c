"""Tests of reading complete and damaged checkpoints in one process; tests of continued runs are in
test_resuming.py.
"""

import errno
import json
import shutil
import threading

import pytest
import torch
from configurations import make_alone
from models import build, random_tokens, small_model
from safetensors.torch import load, load_file, save_file
from safetensors.torch import save as safetensors_bytes

from megatron_tape.checkpoint import directories, reading, writing
from megatron_tape.checkpoint import random_state as random_states
from megatron_tape.checkpoint.index import INDEX, read_index
from megatron_tape.checkpoint.opening import open_to_resume
from megatron_tape.checkpoint.reading import Checkpoint
from megatron_tape.checkpoint.restoring import load_training_state, load_weights
from megatron_tape.checkpoint.writing import Writer
from megatron_tape.errors import CheckpointError, FileError
from megatron_tape.io.files import digest
from megatron_tape.io.records import write_record
from megatron_tape.run.attempts import Attempt
from megatron_tape.training.engine import Engine


def summed_gradient(precision, stage, micro_batches=64):
    """Return Adam's first moment after one step, which is a tenth of the gradient."""
    changes = {
        "deepspeed__zero_stage": stage,
        "optimizer__clip_grad": 0.0,
        "train__global_batch_size": micro_batches,
    }
    config = make_alone(small_model(num_layers=1), train__precision=precision, **changes)
    model, layout = build(
        config.model, dtype=torch.bfloat16 if precision == "bf16" else torch.float32
    )
    engine = Engine(model, config, layout)
    tokens = [random_tokens(batch=1, length=17, seed=seed) for seed in range(micro_batches)]
    engine.train_step(
        ({"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens),
        lr=0.0,
    )
    state = engine.training_state()
    return torch.cat(
        [value.flatten() for key, value in state.items() if key.startswith("exp_avg/")]
    )


def test_bf16_adds_up_micro_batches_in_fp32_at_every_stage():
    """In stage 1, DeepSpeed itself accumulates in bf16, with an error that is a fifth larger."""
    exact = summed_gradient("fp32", 1)
    errors = [(summed_gradient("bf16", stage) - exact).norm() / exact.norm() for stage in (1, 2, 3)]
    assert max(errors) < 1.05 * min(errors)


TENSORS = "tensors-tp00-dp00000.safetensors"
RANDOM = "random.safetensors"
NAME = "weight/output.weight"


def config_in(folder):
    return make_alone(small_model(), checkpoint__directory=str(folder / "checkpoints"))


def writer_in(engine, folder):
    return Writer(engine, config_in(folder), Attempt.claim(folder, folder / "checkpoints", {}))


def save(engine, folder, step=1):
    return writer_in(engine, folder).save(step, 4, {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An engine after one step, and its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    config = config_in(folder)
    model, layout = build(config.model)
    engine = Engine(model, config, layout)
    tokens = random_tokens(batch=1, length=17, seed=0)
    engine.train_step(
        [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}],
        lr=0.0,
    )
    return engine, save(engine, folder)


@pytest.fixture
def damaged(saved, tmp_path):
    """Return a function that changes a file of a copied checkpoint, updates the manifest, and opens
    the copy.
    """
    path = tmp_path / "step-00000001"
    shutil.copytree(saved[1], path)

    def rewrite(name, change=lambda content: None):
        if name == INDEX:
            index = read_index(path, 1)
            change(index[TENSORS])
            write_record(path / INDEX, {"files": index})
        else:
            tensors = load_file(path / name)
            change(tensors)
            save_file(tensors, path / name)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = digest(path / name)
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert directories.problems(path) == []
        return Checkpoint(path, directories.read_state(path))

    return rewrite


@pytest.mark.parametrize("module, function", [(reading, "digest"), (directories, "read_record")])
def test_a_disk_error_at_the_start_is_an_error_and_skips_no_checkpoint(
    saved, tmp_path, monkeypatch, module, function
):
    def fail(*arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    config = config_in(tmp_path)
    shutil.copytree(saved[1], tmp_path / "checkpoints" / saved[1].name)
    error = "Stale file handle.*; start the run again"
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=error):
        patched.setattr(module, function, fail)
        open_to_resume(config, saved[0].layout)
    assert open_to_resume(config, saved[0].layout).step == 1


def test_a_checkpoint_with_a_wrong_checksum_is_skipped_and_set_aside_by_the_next_save(
    saved, tmp_path, caplog
):
    engine = saved[0]
    paths = [save(engine, tmp_path, step) for step in (1, 3)]
    content = bytearray((paths[1] / TENSORS).read_bytes())
    content[-1] ^= 1
    (paths[1] / TENSORS).write_bytes(content)
    checkpoint = open_to_resume(config_in(tmp_path), engine.layout)
    assert checkpoint.path == paths[0]
    assert f"checkpoint {paths[1]} is skipped: {TENSORS} has sha256 " in caplog.text
    save(engine, tmp_path, 2)
    assert [step for step, _ in directories.list_checkpoints(tmp_path / "checkpoints")] == [2, 1]
    assert open_to_resume(config_in(tmp_path), engine.layout).step == 2


def test_a_background_save_contains_the_step_at_which_it_started(saved, tmp_path, monkeypatch):
    engine = saved[0]
    written = threading.Event()
    before = engine.training_state()
    write = writing.write_safetensors
    monkeypatch.setattr(
        writing, "write_safetensors", lambda *arguments: written.wait(60) and write(*arguments)
    )
    save = writing.Save(writer_in(engine, tmp_path), 1, 4, {}, in_thread=True)
    tokens = random_tokens(batch=1, length=17, seed=1)
    engine.train_step(
        [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}],
        lr=0.1,
    )
    assert save.is_busy
    assert directories.list_checkpoints(tmp_path / "checkpoints") == []
    written.set()
    assert save.advance() is None
    path = save.advance()
    assert directories.problems(path) == []
    assert directories.read_state(path)["optimizer_steps"] == 1
    saved_tensors = load_file(path / TENSORS)
    assert saved_tensors.keys() == before.keys()
    assert all(torch.equal(saved_tensors[key], before[key]) for key in before)
    assert not torch.equal(engine.training_state()[NAME], saved_tensors[NAME])
    checkpoint = Checkpoint(path, directories.read_state(path))
    load_training_state(checkpoint, engine)
    again = engine.training_state()
    assert all(torch.equal(again[key], before[key]) for key in before)


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda places: places[NAME].update(shape=[32, 64]), f"has {NAME} of shape [32, 64]"),
        (lambda places: places[NAME].update(offset=10**9), "ends within the tensor"),
        (lambda places: places.pop(NAME), f"has no {NAME}"),
        (lambda places: places.pop(NAME.replace("weight/", "exp_avg/", 1)), "has no exp_avg/"),
    ],
)
def test_an_index_that_does_not_fit_is_refused_even_if_the_manifest_is_right(
    saved, damaged, change, problem
):
    checkpoint = damaged(INDEX, change)
    with pytest.raises(FileError) as error:
        load_weights(checkpoint, saved[0].module, saved[0].layout)
        load_training_state(checkpoint, saved[0])
    assert problem in error.value.problem
    assert error.value.subject.startswith(str(checkpoint.path))


def test_an_index_that_names_another_file_is_refused(damaged):
    checkpoint = damaged(INDEX)
    index = read_index(checkpoint.path, 1)
    write_record(checkpoint.path / INDEX, {"files": {"../x": index[TENSORS]}})
    with pytest.raises(CheckpointError, match="lists ../x"):
        read_index(checkpoint.path, 1)


def rank_0s(change):
    """Return a function that applies `change` to the texts in the random states of a checkpoint
    with one rank.
    """

    def changed(table):
        tensors = load(table["states"][0, : table["lengths"][0]].numpy().tobytes())
        text = json.loads(tensors["text"].numpy().tobytes())
        change(tensors, text)
        tensors["text"] = torch.frombuffer(
            bytearray(json.dumps(text).encode()),
            dtype=torch.uint8,
        )
        table.update(random_states.pack_states([safetensors_bytes(tensors)]))

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("lengths"),
        rank_0s(lambda tensors, text: tensors.update(torch=tensors["torch"][:-1].clone())),
        rank_0s(lambda tensors, text: text.update(python="[3, [1, 2], null]")),
    ],
)
def test_random_states_that_cannot_be_restored_are_refused(saved, damaged, change):
    checkpoint = damaged(RANDOM, change)
    with pytest.raises(CheckpointError) as error:
        load_training_state(checkpoint, saved[0])
    assert error.value.subject == str(checkpoint.path / RANDOM)
    assert "\n" not in str(error.value)


def state_of_a_gpu(seed, offset=4):
    """Return a CUDA generator's state: the seed and the offset in Philox's sequence, 8 bytes
    each.
    """
    return torch.tensor([seed, offset]).view(torch.uint8)


def test_a_run_that_moves_from_a_gpu_to_a_cpu_continues_the_generator_of_the_cpu(saved, damaged):
    expected = {}

    def from_a_gpu(tensors, text):
        tensors["cuda"] = state_of_a_gpu(5678)
        expected.update(tensors)

    checkpoint = damaged(RANDOM, rank_0s(from_a_gpu))
    torch.rand(1)
    load_training_state(checkpoint, saved[0])
    assert torch.equal(torch.get_rng_state(), expected["torch"])
