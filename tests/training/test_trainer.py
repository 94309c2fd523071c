"""What the Trainer trains, and what checkpoints hold of the rest; more layouts are in test_resuming.py."""

import json
import shutil

import pytest
import torch
from datasets_for_tests import write_all
from safetensors.torch import load_file
from training_cases import RECIPE, option

from megatron_tape.checkpoint.directories import list_checkpoints
from megatron_tape.data.samples import GeneratedSamples
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.model.names import kind_of
from pretrain import train


@pytest.fixture
def run(tmp_path):
    """Train in folder `name` what `trains` selects, and return the exit status."""
    data = write_all(tmp_path)

    def start(name, *overrides, trains=None, steps=2):
        prefix, folder = option("data.prefix", f"{data}/a"), f"--logging.directory={tmp_path / name}"
        settings = [f"--train.steps={steps}", "--train.eval_interval=null", "--schedule.warmup_steps=0"]
        return train.main(["--config", str(RECIPE), prefix, folder, *settings, *overrides], trains)

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
    before, after = tensors(begin), tensors(newest(run.folder / "part"))
    names = [key.removeprefix("weight/") for key in before if key.startswith("weight/")]
    for name in names:
        trained = kind_of(name) in ("position", "norms")
        assert torch.equal(before[f"weight/{name}"], after[f"weight/{name}"]) != trained
        assert (f"exp_avg/{name}" in after) == (f"exp_avg_sq/{name}" in after) == trained
    state = json.loads((newest(run.folder / "part") / "state.json").read_text())
    assert set(state["frozen"]) == {name for name in names if kind_of(name) not in ("position", "norms")}


@pytest.fixture
def alone(run):
    """A run from another's checkpoint that saves only the trained parameters; its second step is not done yet."""
    assert run("begin", steps=1) == 0
    run.begin, run.part = newest(run.folder / "begin"), run.folder / "part"

    def go_on(*overrides, trains=POSITION, steps=3):
        settings = [f"--checkpoint.resume={run.begin}", "--checkpoint.frozen=false", "--checkpoint.interval=1"]
        return run("part", *settings, *overrides, trains=trains, steps=steps)

    run.go_on = go_on
    assert go_on(steps=2) == 0
    return run


def refused(capfd, status, expected=1):
    error = capfd.readouterr().err.splitlines()
    assert status == expected and not any(line.startswith("Traceback") for line in error)
    (sentence,) = [line for line in error if line.startswith("error: ")]
    return sentence


def test_trained_parameters_alone_are_saved_and_an_export_joins_them_with_the_others(alone):
    held = tensors(newest(alone.part))
    assert held and all(kind_of(key.partition("/")[2]) == "position" for key in held)
    assert alone.go_on() == 0
    begin, joined = open_weights(alone.begin), open_weights(newest(alone.part))
    own = tensors(newest(alone.part))
    for name in begin.files[0]:
        expected = own[f"weight/gpt.{name}"] if kind_of(name) == "position" else begin.read(name)
        assert torch.equal(joined.read(name), expected)


def test_the_checkpoint_with_the_frozen_parameters_has_to_stay(alone, capfd):
    elsewhere = alone.folder / "elsewhere"
    alone.begin.rename(elsewhere)
    step = newest(alone.part)
    sentence = refused(capfd, alone.go_on("--checkpoint.resume=auto"))
    assert f"which are in checkpoint {alone.begin}, but that does not exist" in sentence
    with pytest.raises(ValueError, match="but that does not exist; restore the original"):
        open_weights(step)
    shutil.copytree(elsewhere, alone.begin)
    manifest = alone.begin / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"bytes"', ' "bytes"'))
    assert "but that has changed since then" in refused(capfd, alone.go_on())
    shutil.copy(elsewhere / "manifest.json", manifest)
    (damaged,) = alone.begin.glob("tensors-*")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert f"{alone.begin} has the frozen parameters of" in refused(capfd, alone.go_on())
    shutil.copy(elsewhere / damaged.name, damaged)
    assert alone.go_on() == 0


def test_what_was_left_out_of_checkpoints_cannot_be_trained_on(alone, capfd):
    assert "other frozen parameters" in refused(capfd, alone.go_on(trains=only("position", "norms")))
    everything = refused(capfd, alone.go_on("--checkpoint.frozen=true", trains=None))
    assert "has no moments of gpt.embedding.word_embeddings.weight" in everything


def test_leaving_frozen_parameters_out_needs_a_checkpoint_that_keeps_them(run, capfd):
    sentence = refused(capfd, run("part", "--checkpoint.frozen=false", trains=POSITION), expected=2)
    assert "start the run from a checkpoint with checkpoint.resume or extension.from" in sentence
    assert run("part", trains=POSITION, steps=1) == 0
    sentence = refused(capfd, run("part", "--checkpoint.frozen=false", trains=POSITION), expected=2)
    assert "outside of checkpoint.directory" in sentence
    assert run("all", "--checkpoint.frozen=false") == 0
    assert "weight/gpt.embedding.word_embeddings.weight" in tensors(newest(run.folder / "all"))


def test_a_run_that_goes_on_with_another_batch_size_neither_skips_nor_repeats_a_sequence(run, monkeypatch):
    seen, take = [], GeneratedSamples.__getitem__

    def watched(source, index):
        seen.append(index)
        return take(source, index)

    monkeypatch.setattr(GeneratedSamples, "__getitem__", watched)
    generated = [option("data.prefix", "null"), option("data.generator", "{task: addition, digits: 4}")]
    assert run("batches", *generated, steps=2) == 0
    smaller = option("train.global_batch_size", 2)
    assert run("batches", *generated, smaller, steps=5) == 0
    assert seen == list(range(2 * 4 + 3 * 2))
    state = json.loads((newest(run.folder / "batches") / "state.json").read_text())
    assert state["consumed_samples"] == 14
    rows = [json.loads(line) for line in (run.folder / "batches" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/tokens"] for row in rows] == [16 * samples for samples in (4, 8, 10, 12, 14)]
