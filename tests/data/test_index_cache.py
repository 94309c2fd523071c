"""The cached index of the data is complete or absent, even if the job that builds it fails."""

import errno
import os
import pickle
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from datasets_for_tests import EOD, write_dataset
from models import small_model

from megatron_tape.config.data import DataConfig, LongDocumentSettings
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.train import TrainConfig
from megatron_tape.data import index_cache
from megatron_tape.data.batches import build_batches
from megatron_tape.data.index_cache import load_array
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.parallel import megatron_patches
from megatron_tape.parallel.layout import initialize_distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "a", seed=0)
    write_dataset(folder / "b", seed=1)
    return folder


def assert_loaded_all_of_megatron(loaded):
    (directory,) = {path.parent for path in loaded}
    # The project loads the arrays of these kinds without Megatron.
    own = ("Mixed", "DocumentWindows")
    assert loaded == {
        path for path in directory.glob("*.npy") if path.name.split("-")[1] not in own
    }


PLAIN = "plain"
BLEND = "blend"
MIX = "mix with long documents"


@pytest.fixture
def tokens(folder, tmp_path, monkeypatch):
    """Return a function that builds or loads a run's index and returns the tokens of its sequences.

    It checks that Megatron loads every array with the project's loader, which refuses pickles.
    """
    monkeypatch.setattr(index_cache, "sync_directory", lambda path: None)  # for speed
    loaded = set()

    def load(path, **options):
        loaded.add(Path(path))
        return load_array(path, **options)

    def read(kind, on_progress=lambda: None):
        prefix = {f"{folder}/a": 0.3, f"{folder}/b": 0.7}
        if kind == PLAIN:
            prefix = f"{folder}/a"
        long = None
        if kind == MIX:
            long = LongDocumentSettings(minimum=40, share=0.5)
        config = RunConfig(
            model=small_model(seq_length=16),
            data=DataConfig(
                prefix=prefix,
                split="900,100,0",
                cache_directory=str(tmp_path / "cache"),
                long_documents=long,
            ),
            train=TrainConfig(
                steps=10, global_batch_size=4, eval_interval=5, eval_steps=2, precision="fp32"
            ),
        )
        loaded.clear()
        built = build_batches(config, initialize_distributed(1), EOD, on_progress=on_progress)
        batches = [*built.training(), *built.evaluation()]
        assert_loaded_all_of_megatron(loaded)
        return [sequence for batch in batches for sequence in batch["tokens"].tolist()]

    read.cache = tmp_path / "cache"
    megatron_patches.load_cached_indices_with(load)
    yield read
    megatron_patches.load_cached_indices_with(load_array)


RUN: list[str] = []
"""What pickles have run."""


class _Attack:
    def __reduce__(self):
        return RUN.append, ("code",)


def write_pickle(path):
    # NumPy treats a file without a NumPy header as a pickle.
    path.write_bytes(pickle.dumps(_Attack()))


@pytest.mark.parametrize(
    "damage",
    [
        write_pickle,
        lambda path: path.write_bytes(b"cut"),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
@pytest.mark.parametrize(
    "array",
    [
        "dataset_index",
        "dataset_sample_index",
        "train-document_index",
        "train-sample_index",
        "train-shuffle_index",
    ],
)
def test_a_damaged_index_is_one_sentence_and_runs_no_code(tokens, array, damage):
    expected = tokens(BLEND)
    assert tokens(BLEND) == expected
    (path, *_) = tokens.cache.glob(f"*/*{array}.npy")
    damage(path)
    with pytest.raises(FileError) as error:
        tokens(BLEND)
    assert error.value.fix.startswith(f"remove {path.parent} and start the run again")
    assert not RUN


@pytest.mark.parametrize("kind", ["Mixed", "DocumentWindows"])
def test_an_incomplete_index_is_refused_and_no_rank_writes_into_it(tokens, kind):
    expected = tokens(MIX)
    (directory,) = tokens.cache.iterdir()
    for path in directory.glob(f"*-{kind}-*.npy"):
        path.unlink()
    left = sorted(directory.iterdir())
    with pytest.raises(FileError) as error:
        tokens(MIX)
    assert error.value.fix.startswith(f"remove {directory} and start the run again")
    assert sorted(directory.iterdir()) == left
    shutil.rmtree(directory)
    assert tokens(MIX) == expected


@pytest.mark.parametrize("kind, number", [(PLAIN, 2), (MIX, 4)])
def test_a_disk_that_fills_leaves_nothing_behind_and_is_one_sentence(
    tokens, kind, number, monkeypatch
):
    save = np.save
    calls = []

    def full(path, array, **options):
        calls.append(path)
        if len(calls) == number:
            with open(path, "wb") as file:
                file.write(b"cut")
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return save(path, array, **options)

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        with pytest.raises(ConfigError, match="No space left") as error:
            tokens(kind)
    assert error.value.key == "data.cache_directory"
    assert list(tokens.cache.iterdir()) == []
    assert len(tokens(kind)) == 48


def test_an_index_that_grows_is_progress(tokens, monkeypatch):
    monkeypatch.setattr(index_cache, "HEARTBEAT_SECONDS", 0.01)
    save = np.save
    moves = []

    def slow(path, array, **options):
        save(path, array, **options)
        time.sleep(0.1)

    monkeypatch.setattr(np, "save", slow)
    tokens(BLEND, on_progress=lambda: moves.append(time.monotonic()))
    assert len(moves) >= 6


def test_a_temporary_error_is_not_a_config_error(tokens, monkeypatch):
    def save(path, array, **options):
        raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(RuntimeError, match="could not index the data .*Stale file handle"):
        tokens(BLEND)
    assert list(tokens.cache.iterdir()) == []


def test_the_temporary_directory_of_a_killed_job_is_removed_after_a_day(tokens):
    left = tokens.cache / ".building-node-1"
    recent = tokens.cache / ".building-node-2"
    for path in (left, recent):
        path.mkdir(parents=True)
        (path / "x-GPTDataset-train-shuffle_index.npy").write_bytes(b"cut")
    os.utime(left, (time.time() - 90_000,) * 2)
    tokens(PLAIN)
    assert [path.name for path in tokens.cache.glob(".building-*")] == [recent.name]


def test_an_index_that_another_job_has_built_meanwhile_is_kept(tokens, monkeypatch, tmp_path):
    expected = tokens(PLAIN)
    (directory,) = tokens.cache.iterdir()
    other = directory.rename(tmp_path / "other")
    mkdtemp = tempfile.mkdtemp
    inode = other.stat().st_ino

    def meanwhile(**options):
        other.rename(directory)
        return mkdtemp(**options)

    monkeypatch.setattr(index_cache.tempfile, "mkdtemp", meanwhile)
    assert tokens(PLAIN) == expected
    assert [path.stat().st_ino for path in tokens.cache.iterdir()] == [inode]
