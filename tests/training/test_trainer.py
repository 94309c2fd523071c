"""Tests of which parameters the Trainer trains and saves; test_resuming.py has tests of more
layouts.
"""

import json
import shutil

import pytest
import torch
from datasets_for_tests import write_all
from safetensors.torch import load_file
from training_cases import RECIPE, generated, option, rows

from megatron_tape.checkpoint.directories import list_checkpoints
from megatron_tape.data.samples import GeneratedSamples
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.model.names import kind_of
from pretrain import train


@pytest.fixture
def run(tmp_path):
    """Return a function that trains the parameters selected by `trains`, and returns the exit
    status.
    """
    data = write_all(tmp_path)

    def start(name, *overrides, trains=None, steps=2):
        prefix = option("data.prefix", f"{data}/a")
        folder = f"--logging.directory={tmp_path / name}"
        settings = [
            f"--train.steps={steps}",
            "--train.eval_interval=0",
            "--schedule.warmup_steps=0",
        ]
        return train.main(
            ["--config", str(RECIPE), prefix, folder, *settings, *overrides],
            trains,
        )

    start.folder = tmp_path
    return start


def only(*kinds):
    return lambda name, parameter: kind_of(name) in kinds


POSITION = only("position")


def tensors(checkpoint):
    (path,) = checkpoint.glob("tensors-*")
    return load_file(path)


def newest(folder):
    return list_checkpoints(folder / "checkpoints")[0][1]


def test_frozen_parameters_are_saved_and_stay_as_they_are(run):
    assert run("begin", steps=1) == 0
    begin = newest(run.folder / "begin")
    resume = f"--checkpoint.resume={begin}"
    assert run("part", resume, trains=only("position", "norms"), steps=3) == 0
    before = tensors(begin)
    after = tensors(newest(run.folder / "part"))
    frozen = json.loads((newest(run.folder / "part") / "state.json").read_text())["frozen"]
    for key, weight in before.items():
        kind, _, name = key.partition("/")
        if kind == "weight":
            trained = kind_of(name) in ("position", "norms")
            assert torch.equal(weight, after[key]) != trained
            assert (f"exp_avg/{name}" in after) == (name not in frozen) == trained


@pytest.fixture
def lean_run(run):
    """A run that continued another run's checkpoint to step 2, and saves only the trained
    parameters.

    `go_on` continues it to step 3.
    """
    assert run("begin", steps=1) == 0
    run.begin = newest(run.folder / "begin")
    run.part = run.folder / "part"

    def go_on(*overrides, trains=POSITION, steps=3):
        settings = [
            f"--checkpoint.resume={run.begin}",
            "--checkpoint.frozen=false",
            "--checkpoint.interval=1",
        ]
        return run("part", *settings, *overrides, trains=trains, steps=steps)

    run.go_on = go_on
    assert go_on(steps=2) == 0
    return run


def refused(capfd, status, expected=1):
    error = capfd.readouterr().err.splitlines()
    assert status == expected
    assert not any(line.startswith("Traceback") for line in error)
    (sentence,) = [line for line in error if line.startswith("error: ")]
    return sentence


def test_only_trained_parameters_are_saved_and_an_export_merges_them_with_the_frozen_ones(lean_run):
    saved = tensors(newest(lean_run.part))
    assert saved
    assert all(kind_of(key.partition("/")[2]) == "position" for key in saved)
    assert lean_run.go_on() == 0
    begin = open_weights(lean_run.begin)
    merged = open_weights(newest(lean_run.part))
    saved = tensors(newest(lean_run.part))
    for name in begin.files[0]:
        expected = begin.read_parameter(name)
        if kind_of(name) == "position":
            expected = saved[f"weight/{name}"]
        assert torch.equal(merged.read_parameter(name), expected)


def test_a_missing_or_changed_checkpoint_with_the_frozen_parameters_is_refused(lean_run, capfd):
    elsewhere = lean_run.folder / "elsewhere"
    lean_run.begin.rename(elsewhere)
    step = newest(lean_run.part)
    sentence = refused(capfd, lean_run.go_on("--checkpoint.resume=auto"))
    assert f"which are in checkpoint {lean_run.begin}, but that does not exist" in sentence
    with pytest.raises(ValueError, match="but that does not exist"):
        open_weights(step)
    shutil.copytree(elsewhere, lean_run.begin)
    manifest = lean_run.begin / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"bytes"', ' "bytes"'))
    assert "has changed since then" in refused(capfd, lean_run.go_on())
    shutil.copy(elsewhere / "manifest.json", manifest)
    (damaged,) = lean_run.begin.glob("tensors-*")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert f"{lean_run.begin} has the frozen parameters of" in refused(capfd, lean_run.go_on())
    shutil.copy(elsewhere / damaged.name, damaged)
    assert lean_run.go_on() == 0


def test_training_parameters_that_the_checkpoints_omit_is_refused(lean_run, capfd):
    assert "other frozen parameters" in refused(
        capfd, lean_run.go_on(trains=only("position", "norms"))
    )
    sentence = refused(capfd, lean_run.go_on("--checkpoint.frozen=true", trains=None))
    assert "has no moments of embedding.weight" in sentence


def test_omitting_frozen_parameters_requires_a_checkpoint_that_contains_them(run, capfd):
    sentence = refused(capfd, run("part", "--checkpoint.frozen=false", trains=POSITION), expected=2)
    assert "start the run from a checkpoint with checkpoint.resume or extension.from" in sentence
    assert run("part", trains=POSITION, steps=1) == 0
    sentence = refused(capfd, run("part", "--checkpoint.frozen=false", trains=POSITION), expected=2)
    assert "outside of checkpoint.directory" in sentence
    assert run("all", "--checkpoint.frozen=false") == 0
    assert "weight/embedding.weight" in tensors(newest(run.folder / "all"))


def test_a_run_that_continues_with_another_batch_size_neither_skips_nor_repeats_a_sequence(
    run, monkeypatch
):
    indices = []
    take = GeneratedSamples.__getitem__

    def watched(source, index):
        indices.append(index)
        return take(source, index)

    monkeypatch.setattr(GeneratedSamples, "__getitem__", watched)
    assert run("batches", *generated(), steps=2) == 0
    smaller = option("train.global_batch_size", 2)
    assert run("batches", *generated(), smaller, steps=5) == 0
    assert indices == list(range(2 * 4 + 3 * 2))
    state = json.loads((newest(run.folder / "batches") / "state.json").read_text())
    assert state["consumed_samples"] == 14
    logged = rows(run.folder / "batches")
    assert [row["train/tokens"] for row in logged] == [
        16 * samples for samples in (4, 8, 10, 12, 14)
    ]
