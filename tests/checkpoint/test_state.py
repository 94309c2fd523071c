"""Saves that fail on one rank, and sums of many micro-batches; continued runs are in test_resuming.py."""

import errno
import json
import shutil
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from launch import run_group
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from models import build, random_tokens, small_model

from megatron_tape.checkpoint import directories, reading, saving, tensors
from megatron_tape.checkpoint import random_state as random_states
from megatron_tape.checkpoint.opening import Checkpoint, find_checkpoint
from megatron_tape.checkpoint.saving import save_checkpoint
from megatron_tape.checkpoint.state import load_training_state, load_weights
from megatron_tape.checkpoint.tensors import read_metadata, read_tensors
from megatron_tape.config.schema import (
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import digest
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.parallel.layout import seed_everything
from megatron_tape.run.attempts import Attempt
from megatron_tape.training.engine import Engine


@pytest.fixture(scope="module")
def two_ranks():
    return run_group("full_disk_cases", 2)


def test_resuming_reads_each_file_once_by_the_rank_that_the_plan_says(two_ranks):
    result = two_ranks["resumed"]
    assert result["same"] and result["changed"]
    assert result["opened"] == result["planned"]
    assert sorted(sum(result["opened"], [])) == [f"tensors-tp00-dp0000{number}.safetensors" for number in (0, 1)]
    assert all(result["opened"])


def test_a_file_that_one_rank_cannot_read_any_more_is_reported_on_all(two_ranks):
    assert len(set(two_ranks["unreadable"])) == 1
    message = two_ranks["unreadable"][0]
    assert "(rank 1): " in message and ".safetensors cannot be read ([Errno 5]" in message


def test_a_full_disk_on_one_rank_is_reported_on_all_and_costs_no_checkpoint(two_ranks):
    result = two_ranks
    assert len(set(result["messages"])) == 1
    assert "checkpoint 2" in result["messages"][0] and "rank 1" in result["messages"][0]
    assert result["after_failure"] == "step-00000001"
    assert result["after_retry"] == "step-00000003"
    assert result["unfinished"] == []
    assert result["left"] == [".attempt-000001", "step-00000001", "step-00000003"]


def summed_gradient(precision, stage, micro_batches=64):
    """Return Adam's first moment after one step, which is a tenth of the gradient."""
    config = RunConfig(
        model=small_model(),
        data=DataConfig(prefix="unused"),
        optimizer=OptimizerConfig(clip_grad=0.0),
        deepspeed=DeepSpeedConfig(zero_stage=stage),
        train=TrainConfig(steps=1, micro_batch_size=1, global_batch_size=micro_batches, precision=precision),
    )
    model, layout = build(config.model, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    engine = Engine(model, config, layout)
    tokens = [random_tokens(batch=1, length=17, seed=seed) for seed in range(micro_batches)]
    engine.train_step(({"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens), lr=0.0)
    state = engine.training_state(lambda key: True)
    return torch.cat([value.flatten() for key, value in state.items() if key.startswith("exp_avg/")])


def test_bf16_adds_up_micro_batches_in_fp32_at_every_stage():
    """DeepSpeed's own sums at stage 1 are in bf16, and their error is a fifth larger."""
    exact = summed_gradient("fp32", 1)
    errors = [(summed_gradient("bf16", stage) - exact).norm() / exact.norm() for stage in (1, 2, 3)]
    assert max(errors) < 1.05 * min(errors)


TENSORS, RANDOM = "tensors-tp00-dp00000.safetensors", "random.safetensors"
EARLIER_RANDOM = "random-00000.safetensors"
NAME = "weight/gpt.output_layer.weight"


def config_in(folder):
    return RunConfig(
        model=small_model(),
        data=DataConfig(prefix="unused"),
        train=TrainConfig(steps=2, global_batch_size=1, precision="fp32"),
        checkpoint=CheckpointConfig(directory=str(folder / "checkpoints")),
    )


def save(engine, folder, step=1):
    return save_checkpoint(engine, config_in(folder), step, {}, Attempt.claim(folder, folder / "checkpoints", {}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An engine after one step, and its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    config = config_in(folder)
    model, layout = build(config.model)
    engine = Engine(model, config, layout)
    tokens = random_tokens(batch=1, length=17, seed=0)
    engine.train_step([{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}], lr=0.0)
    return engine, save(engine, folder)


@pytest.fixture
def damaged(saved, tmp_path):
    """Return a function that rewrites a tensor file of a copy of the checkpoint, and its manifest, and opens it."""
    path = tmp_path / "step-00000001"
    shutil.copytree(saved[1], path)

    def rewrite(name, change=lambda tensors: None, metadata=None, content=None):
        if name == EARLIER_RANDOM:
            as_version_1_wrote_them(path)
        tensors, kept = read_tensors(path / name), read_metadata(path / name)
        change(tensors)
        (path / name).write_bytes(content or safetensors.torch.save(tensors, kept | (metadata or {})))
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = digest(path / name)
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert directories.problems(path) == []
        return Checkpoint(path, directories.read_state(path))

    return rewrite


def as_version_1_wrote_them(path):
    """Put the random states into a file of this rank's own, and leave out the index."""
    state, text = random_states.random_state()
    entry, _ = write_safetensors(path / EARLIER_RANDOM, state, metadata=text)
    manifest = json.loads((path / "manifest.json").read_text()) | {"format_version": 1}
    for name in (RANDOM, "index.json"):
        (path / name).unlink()
        del manifest["files"][name]
    manifest["files"][EARLIER_RANDOM] = entry
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_that_is_left_alone_loads(saved, damaged):
    for name in (TENSORS, EARLIER_RANDOM):
        checkpoint = damaged(name)
        load_weights(checkpoint, saved[0].module, saved[0].layout)
        load_training_state(checkpoint, saved[0])


@pytest.mark.parametrize("share, holds", [(reading.HELD_SHARE, [TENSORS]), (2**60, [])])
def test_tensors_that_were_checked_are_held_as_far_as_memory_allows(saved, damaged, monkeypatch, share, holds):
    monkeypatch.setattr(reading, "HELD_SHARE", share)
    checkpoint = damaged(TENSORS)
    held, problems = reading.check_files(checkpoint.path, checkpoint.files, checkpoint.files)
    assert list(held) == holds and problems == []
    checkpoint.held.update(held)
    expected = saved[0].training_state(lambda key: True)
    read = checkpoint.reader(saved[0].names, saved[0].layout)
    assert all(torch.equal(read(key), expected[key]) for key in expected)
    content = bytearray((checkpoint.path / TENSORS).read_bytes())
    content[-1] ^= 1
    (checkpoint.path / TENSORS).write_bytes(content)
    _, (problem,) = reading.check_files(checkpoint.path, checkpoint.files, checkpoint.files)
    assert problem.startswith(f"{TENSORS} has sha256 ")


def test_what_is_held_does_not_live_on_in_forked_data_loaders(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    sha256, content = tensors.read_whole(path, keep=True)
    assert sha256 == digest(path)["sha256"] and bytes(content) == path.read_bytes()
    address = torch.frombuffer(content, dtype=torch.uint8).data_ptr()
    mappings = Path("/proc/self/smaps").read_text()
    start = mappings.index(f"\n{address:x}-")
    flags = next(line for line in mappings[start:].splitlines() if line.startswith("VmFlags:"))
    assert "dc" in flags.split()  # "do not copy on fork"
    path.write_bytes(b"")
    assert tensors.read_whole(path, keep=True) == (digest(path)["sha256"], b"")


def test_where_there_is_no_memory_files_are_checked_without_being_held(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def fail(*arguments, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(tensors.mmap, "mmap", fail)
    assert tensors.read_whole(path, keep=True) == (digest(path)["sha256"], None)


@pytest.mark.parametrize("module, function", [(reading, "read_whole"), (directories, "read_record")])
def test_a_disk_that_fails_while_a_run_starts_ends_the_start_and_skips_no_checkpoint(
    saved, tmp_path, monkeypatch, module, function
):
    def fail(*arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    config = config_in(tmp_path)
    shutil.copytree(saved[1], tmp_path / "checkpoints" / saved[1].name)
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="Stale file handle.*; start again"):
        patched.setattr(module, function, fail)
        find_checkpoint(config, saved[0].layout)
    assert find_checkpoint(config, saved[0].layout).step == 1


def test_a_checkpoint_with_a_wrong_checksum_is_skipped_and_set_aside_by_the_next_save(saved, tmp_path, caplog):
    engine = saved[0]
    paths = [save(engine, tmp_path, step) for step in (1, 3)]
    content = bytearray((paths[1] / TENSORS).read_bytes())
    content[-1] ^= 1
    (paths[1] / TENSORS).write_bytes(content)
    checkpoint = find_checkpoint(config_in(tmp_path), engine.layout)
    assert checkpoint.path == paths[0] and list(checkpoint.held) == [TENSORS]
    assert f"checkpoint {paths[1]} is skipped: {TENSORS} has sha256 " in caplog.text
    save(engine, tmp_path, 2)
    assert [step for step, _ in directories.list_checkpoints(tmp_path / "checkpoints")] == [2, 1]
    assert find_checkpoint(config_in(tmp_path), engine.layout).step == 2


def test_random_states_continue_where_they_were_saved(saved, tmp_path):
    torch.manual_seed(11)
    path = save(saved[0], tmp_path)
    expected = torch.rand(3)
    load_training_state(Checkpoint(path, directories.read_state(path)), saved[0])
    assert torch.equal(torch.rand(3), expected)


def test_a_save_in_the_background_is_of_the_step_at_which_it_began(saved, tmp_path, monkeypatch):
    engine, written = saved[0], threading.Event()
    before = engine.training_state(lambda key: True)
    write = saving.write_safetensors
    monkeypatch.setattr(saving, "write_safetensors", lambda *arguments: written.wait(60) and write(*arguments))
    attempt = Attempt.claim(tmp_path, tmp_path / "checkpoints", {})
    save = saving.Save(engine, config_in(tmp_path), 1, {}, attempt, in_thread=True)
    tokens = random_tokens(batch=1, length=17, seed=1)
    engine.train_step([{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}], lr=0.1)
    assert save.busy and directories.list_checkpoints(tmp_path / "checkpoints") == []
    written.set()
    assert save.advance() is None
    path = save.advance()
    assert directories.problems(path) == [] and directories.read_state(path)["optimizer_steps"] == 1
    held = read_tensors(path / TENSORS)
    assert held.keys() == before.keys() and all(torch.equal(held[key], before[key]) for key in before)
    assert not torch.equal(engine.training_state(lambda key: True)[NAME], held[NAME])
    checkpoint = Checkpoint(path, directories.read_state(path))
    load_training_state(checkpoint, engine)
    again = engine.training_state(lambda key: True)
    assert all(torch.equal(again[key], before[key]) for key in before)


def test_a_save_in_the_background_that_gets_no_thread_is_written_at_once(saved, tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    attempt = Attempt.claim(tmp_path, tmp_path / "checkpoints", {})
    monkeypatch.setattr(threading.Thread, "start", start)
    save = saving.Save(saved[0], config_in(tmp_path), 1, {}, attempt, in_thread=True)
    assert not save.busy and save.advance() is None
    assert directories.problems(save.advance()) == []


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.update({NAME: t[NAME].T.contiguous()}), r"holds {} as F32 of shape \[32, 64\], and the model's"),
        (lambda t: t.update({NAME: t[NAME][:1].clone()}), r"holds {} as F32 of shape \[1, 32\], and the model's"),
        (lambda t: t.update({NAME: t[NAME].bfloat16()}), r"holds {} as BF16 of shape \[64, 32\], and the model's"),
        (lambda t: t.pop(NAME), "holds no {}; choose another"),
        (lambda t: t.pop(NAME.replace("weight/", "exp_avg/", 1)), "holds no exp_avg/"),
    ],
)
def test_tensors_of_a_wrong_shape_or_type_are_refused_despite_a_right_manifest(saved, damaged, change, sentence):
    checkpoint = damaged(TENSORS, change)
    with pytest.raises(CheckpointError, match=sentence.format(NAME)) as caught:
        load_weights(checkpoint, saved[0].module, saved[0].layout)
        load_training_state(checkpoint, saved[0])
    assert "\n" not in str(caught.value) and str(checkpoint.path) in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff" * 64, (100).to_bytes(8, "little") + b"[" * 100, b"x"])
def test_a_file_that_is_not_safetensors_is_refused_despite_a_right_manifest(saved, damaged, content):
    checkpoint = damaged(TENSORS, content=content)
    with pytest.raises(CheckpointError, match=f"{TENSORS} is not a safetensors file"):
        load_weights(checkpoint, saved[0].module, saved[0].layout)


@pytest.mark.parametrize(
    "change, metadata",
    [
        (lambda t: t.pop("torch"), None),
        (lambda t: t.update(torch=t["torch"][:-1].clone()), None),
        (lambda t: t.update(numpy=t["numpy"][:3].clone()), None),
        (lambda t: None, {"python": "[]"}),
        (lambda t: None, {"python": "[3, [1, 2], null]"}),
        (lambda t: None, {"python": "[" * 100_000}),
        (lambda t: None, {"numpy": '{"kind": 1}'}),
    ],
)
def test_random_states_that_cannot_be_restored_are_refused_in_one_sentence(saved, damaged, change, metadata):
    checkpoint = damaged(EARLIER_RANDOM, change, metadata)
    with pytest.raises(
        CheckpointError, match=f"{EARLIER_RANDOM} holds no random states that can be restored"
    ) as caught:
        load_training_state(checkpoint, saved[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("lengths"),
        lambda t: t.update(lengths=t["lengths"] - 1),
        lambda t: t.update(lengths=t["lengths"] * 0 - 3),
        lambda t: t.update(states=torch.zeros_like(t["states"])),
        lambda t: t.update(states=t["states"][0].clone()),
        lambda t: t.update(states=t["states"][:0].clone()),
    ],
)
def test_a_damaged_table_of_random_states_is_refused_in_one_sentence(saved, damaged, change):
    checkpoint = damaged(RANDOM, change)
    with pytest.raises(CheckpointError, match=f"{RANDOM} holds no random states that can be restored") as caught:
        load_training_state(checkpoint, saved[0])
    assert "\n" not in str(caught.value)


def state_of_a_gpu(seed, offset=4):
    """A CUDA generator's state: its seed and how far it has come in Philox's sequence, 8 bytes each."""
    return torch.tensor([seed, offset]).view(torch.uint8)


def test_random_streams_that_a_gpu_wrote_begin_anew_on_a_cpu_and_the_others_go_on(saved, damaged, caplog):
    def from_a_gpu(tensors):
        for name in [name for name in tensors if name.startswith("tracker/")]:
            tensors[name] = state_of_a_gpu(1234)
        tensors["cuda"] = state_of_a_gpu(5678)

    checkpoint = damaged(EARLIER_RANDOM, from_a_gpu)
    seed_everything(7, saved[0].layout)
    streams = get_cuda_rng_tracker().get_states()
    before = torch.get_rng_state()
    with caplog.at_level("INFO"):
        load_training_state(checkpoint, saved[0])
    after = get_cuda_rng_tracker().get_states()
    assert after.keys() == streams.keys() and all(torch.equal(after[name], streams[name]) for name in streams)
    assert not torch.equal(torch.get_rng_state(), before)
    assert "model-parallel-rng were saved on another kind of device" in caplog.text
    with get_cuda_rng_tracker().fork():
        torch.rand(1)


def test_random_streams_that_a_cpu_wrote_begin_anew_on_a_gpu(saved, monkeypatch, caplog):
    tensors, text = random_states.random_state()
    streams = {name: state_of_a_gpu(seed) for seed, name in enumerate(get_cuda_rng_tracker().get_states())}
    tracker = CudaRNGStatesTracker()
    tracker.set_states(dict(streams))
    monkeypatch.setattr(random_states, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level("INFO"):
        random_states.set_random_state(tensors, text)
    assert tracker.get_states() == streams
    assert "model-parallel-rng were saved on another kind of device" in caplog.text
