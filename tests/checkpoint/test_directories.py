import errno
import json
import os
import shutil
import subprocess
import sys

import killed_save_cases
import pytest
from killed_save_cases import HOME, NAMES, save, value_of

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.locate import resolve_resume
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import digest
from megatron_tape.io.records import write_record

MANIFEST = "manifest.json"


def steps(root):
    return [step for step, _ in files.list_checkpoints(root)]


def test_a_path_outside_the_run_is_resumed_until_the_run_has_checkpoints(tmp_path):
    directory = tmp_path / "run"
    imported = str(tmp_path / "import")
    assert resolve_resume(imported, directory) == imported
    (directory / "step-00000001").mkdir(parents=True)
    assert resolve_resume(imported, directory) == "auto"
    for resume in ("none", "auto", str(directory / "step-00000001")):
        assert resolve_resume(resume, directory) == resume


def test_a_published_checkpoint_is_complete_even_with_additional_files(tmp_path):
    path = save(tmp_path, 100)
    assert path == tmp_path / "step-00000100"
    (path / "notes.txt").write_text("kept by hand")
    assert value_of(path) == 100.0
    assert files.read_manifest(path)["step"] == 100
    assert set(files.read_manifest(path)["files"]) == set(NAMES)
    assert sorted(os.listdir(tmp_path)) == [HOME, "step-00000100"]


def test_files_are_flushed_before_the_rename_and_the_rename_before_the_old_checkpoint_is_removed(
    tmp_path, monkeypatch
):
    save(tmp_path, 1)
    events = []
    fsync = os.fsync
    rename = os.rename
    rmtree = shutil.rmtree

    def recorded_fsync(descriptor):
        events.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(
        os, "rename", lambda a, b: (events.append(("rename", b.name)), rename(a, b))
    )
    monkeypatch.setattr(
        shutil, "rmtree", lambda path: (events.append(("remove", path.name)), rmtree(path))
    )
    save(tmp_path, 1)
    named = events.index(("rename", "step-00000001"))
    path = tmp_path / "step-00000001"
    assert {file.name for file in path.iterdir()} == {"model", "run.json", MANIFEST}
    written = {file.stat().st_ino for file in (path, *path.iterdir())}
    assert {inode for kind, inode in events[:named] if kind == "fsync"} == written
    assert events[named + 1] == ("fsync", tmp_path.stat().st_ino)
    assert events[-1] == ("remove", ".step-00000001.discarded.partial")


def test_checkpoints_are_listed_newest_first_by_number_and_other_names_are_ignored(tmp_path):
    for step in (5, 123456789, 99999999):
        save(tmp_path, step)
    for name in ("step-7", "step-0000000000005", "step-00000006.old", f"step-{'9' * 23}", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    assert steps(tmp_path) == [123456789, 99999999, 5]
    assert steps(tmp_path / "none") == []


@pytest.mark.parametrize("name", NAMES)
def test_problems_of_files_are_named(tmp_path, name):
    path = save(tmp_path, 1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert files.problems(path, deep=False) == []
    (problem,) = files.problems(path)
    assert problem.startswith(f"{name} has sha256 ")
    (path / name).write_bytes(content[:-1])
    shorter = f"{name} has {len(content) - 1} bytes instead of {len(content)}"
    assert files.problems(path) == files.problems(path, deep=False) == [shorter]
    (path / name).unlink()
    assert files.problems(path) == files.problems(path, deep=False) == [f"{name} is missing"]


def test_any_flipped_bit_and_any_truncation_of_the_manifest_are_detected(tmp_path):
    path = save(tmp_path, 1)
    manifest = path / "manifest.json"
    content = manifest.read_bytes()
    for position in range(len(content)):
        for bit in {position % 8, 5}:  # bit 5 changes the case of a letter
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            manifest.write_bytes(flipped)
            assert files.problems(path), f"bit {bit} of byte {position}"
    for length in range(len(content) - 1):
        manifest.write_bytes(content[:length])
        assert files.problems(path)
    manifest.unlink()
    assert files.problems(path) == ["manifest.json is missing"]


def change(path, name, **changes):
    """Rewrite a JSON file of a checkpoint with changed keys. A key whose new value is None is
    removed.
    """
    value = json.loads((path / name).read_text()) | changes
    write_record(
        path / name,
        {key: item for key, item in value.items() if item is not None},
    )
    if name != MANIFEST:
        entries = json.loads((path / MANIFEST).read_text())["files"]
        change(path, MANIFEST, files=entries | {name: digest(path / name)})


@pytest.mark.parametrize("more, words", [(1, "a newer version"), (-2, "an earlier version")])
def test_a_checkpoint_of_another_version_is_an_error_and_never_skipped(tmp_path, more, words):
    save(tmp_path, 1)
    other = save(tmp_path, 2)
    change(
        other,
        MANIFEST,
        format_version=files.FORMAT_VERSION + more,
        files=None,
        parts=["another layout"],
    )
    assert words in files.problems(other)[0]
    for search in (files.newest_complete, files.checkpointed_step):
        with pytest.raises(files.OtherFormat) as error:
            search(tmp_path)
        assert error.value.subject == str(other)
    shutil.rmtree(other)
    assert files.checkpointed_step(tmp_path) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": "1"},
        {"files": [1, 2]},
        {"files": {}},
        {"files": {"run.json": {"bytes": "5", "sha256": "0"}}},
    ],
)
def test_a_manifest_of_the_wrong_shape_is_a_problem_in_one_sentence(tmp_path, changes):
    path = save(tmp_path, 1)
    change(path, MANIFEST, **changes)
    (problem,) = files.problems(path)
    assert MANIFEST in problem
    assert "\n" not in problem
    assert files.newest_complete(tmp_path) is None


STATE = {
    "step": 1,
    "optimizer_steps": 1,
    "consumed_samples": 4,
    "progress": {},
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "sharded": {"weight": {"dim": 0, "stride": 1}},
    "config": {"model": {"hidden_size": 8}},
}


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({}, None),
        ({"step": 2}, "state.json says step 2, but manifest.json says 1"),
        ({"config": {"model": [8]}}, "config.model is a list"),
        ({"sharded": {"weight": 0}}, "sharded.weight is 0"),
        ({"optimizer_steps": 2}, "optimizer_steps 2 exceeds step 1"),
        ({"progress": None}, "progress is missing"),
    ],
)
def test_a_state_of_the_wrong_shape_or_step_is_a_problem_even_if_the_manifest_is_right(
    tmp_path, changes, problem
):
    path = save(tmp_path, 1)
    write_record(path / "state.json", {})
    change(path, "state.json", **STATE)
    change(path, "state.json", **changes)
    for deep in (False, True):
        problems = files.problems(path, deep)
        assert len(problems) == (problem is not None)
        assert (problem or "") in "".join(problems)


def test_the_newest_complete_checkpoint_is_found_and_broken_ones_are_named(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    os.truncate(tmp_path / "step-00000003" / "run.json", 0)
    (tmp_path / "step-00000002" / "model").unlink()
    warnings = []
    assert files.newest_complete(tmp_path, warnings.append) == tmp_path / "step-00000001"
    assert "step-00000003" in warnings[0]
    assert "run.json has 0 bytes" in warnings[0]
    assert "step-00000002" in warnings[1]
    assert "model is missing" in warnings[1]


def test_a_disk_error_is_not_damage_and_no_older_checkpoint_is_chosen(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    read_record = files.read_record

    def fail(path, shape):
        if "step-00000002" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_record(path, shape)

    monkeypatch.setattr(files, "read_record", fail)
    # An OSError rather than a CheckpointError, after which a Slurm job would not be tried again.
    with pytest.raises(OSError, match="step-00000002"):
        files.checkpointed_step(tmp_path)


def test_checkpoints_of_keep_every_are_never_removed(tmp_path):
    for step in (2, 3, 4, 6, 7, 8, 9):
        save(tmp_path, step)
    os.truncate(tmp_path / "step-00000008" / "run.json", 0)
    (tmp_path / "notes").mkdir()
    files.prune(tmp_path, keep=2, keep_every=4)
    assert steps(tmp_path) == [9, 8, 7, 4]
    assert (tmp_path / "notes").is_dir()
    files.prune(tmp_path, keep=1)
    assert steps(tmp_path) == [9]


def test_a_checkpoint_with_missing_files_is_not_published(tmp_path):
    save(tmp_path, 1)
    staging = files.staging_directory(tmp_path / HOME, 2)
    (staging / "tensors").write_bytes(b"of this node")
    entry_of_file = digest(staging / "tensors")
    for name, entry in {
        "elsewhere": entry_of_file,
        "tensors": {**entry_of_file, "bytes": entry_of_file["bytes"] + 1},
    }.items():
        with pytest.raises(CheckpointError, match=f"{name} (is missing|has 12 bytes)"):
            files.publish(staging, tmp_path, 2, {name: entry})
    assert steps(tmp_path) == [1]


def test_skipped_later_checkpoints_are_set_aside_after_a_save(tmp_path):
    def save_and_prune(step):
        save(tmp_path, step)
        files.prune(tmp_path, keep=2, keep_every=10, published=step)
        return sorted(os.listdir(tmp_path))[1:]

    for step in (50, 58, 59):
        save(tmp_path, step)
    aside = ["step-00000058.abandoned", "step-00000059.abandoned"]
    assert save_and_prune(51) == ["step-00000050", "step-00000051", *aside]
    assert files.checkpointed_step(tmp_path) == 51
    assert save_and_prune(58)[2:] == ["step-00000058", aside[1]]
    assert save_and_prune(60) == ["step-00000050", "step-00000058", "step-00000060"]


def test_a_kill_at_any_file_operation_costs_at_most_the_save_it_interrupts():
    # A separate process without threads or torch can be forked quickly and safely.
    command = [sys.executable, killed_save_cases.__file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    operations = json.loads(result.stdout)
    assert operations.keys() == killed_save_cases.SCENARIOS.keys()
    assert min(operations.values()) > 10
