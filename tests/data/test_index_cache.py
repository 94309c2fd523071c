"""The cached index of the data: whole or absent, whatever becomes of the job that builds it."""

import errno
import os
import time

import numpy as np
import pytest
from datasets_for_tests import EOD, write_dataset
from models import small_model

from megatron_tape.config.schema import DataConfig, RunConfig, TrainConfig
from megatron_tape.data import index_cache
from megatron_tape.data.batches import build_batches
from megatron_tape.errors import ConfigError
from megatron_tape.parallel.layout import initialize_distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "a", seed=0)
    write_dataset(folder / "b", seed=1)
    return folder


PLAIN, BLEND, MIX = "plain", "blend", "mix with long documents"
KINDS = pytest.mark.parametrize("kind", [PLAIN, BLEND, MIX])


@pytest.fixture
def tokens(folder, tmp_path):
    """Return the first tokens of training sequences, from an index that is built or in the cache."""

    def read(kind, moved=lambda: None):
        prefix = f"{folder}/a" if kind == PLAIN else {f"{folder}/a": 0.3, f"{folder}/b": 0.7}
        long = {"minimum": 40, "share": 0.5} if kind == MIX else None
        data = {"prefix": prefix, "split": "900,100,0", "cache_directory": str(tmp_path / "cache")}
        train = TrainConfig(steps=10, global_batch_size=4, eval_interval=5, eval_steps=2, precision="fp32")
        data = DataConfig(**data, long_documents=long)
        config = RunConfig(model=small_model(seq_length=16), data=data, train=train)
        built = build_batches(config, initialize_distributed(1), EOD, moved=moved)
        return [built.train[i]["tokens"].tolist() for i in range(40)]

    read.cache = tmp_path / "cache"
    return read


@KINDS
def test_an_array_that_is_cut_is_named_and_built_again(tokens, kind, caplog):
    expected = tokens(kind)
    arrays = sorted(tokens.cache.glob("*.npy"))
    assert len(arrays) >= 3 and not list(tokens.cache.glob(".building-*"))
    for path in arrays:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - 8])
        caplog.clear()
        assert tokens(kind) == expected and path.read_bytes() == whole
        (warning,) = [record.message for record in caplog.records if "is cut short" in record.message]
        assert str(path) in warning
    caplog.clear()
    assert tokens(kind) == expected and "is cut short" not in caplog.text


@KINDS
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_disk_that_fills_leaves_nothing_behind_and_is_one_sentence(tokens, kind, number, monkeypatch):
    save, calls = np.save, []

    def full(path, array, **options):
        calls.append(path)
        if len(calls) == number:
            with open(path, "wb") as file:
                file.write(b"cut")
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return save(path, array, **options)

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        with pytest.raises(ConfigError, match=r"data.cache_directory is .*cache, where .*No space left.*; make room"):
            tokens(kind)
    assert list(tokens.cache.iterdir()) == []
    assert len(tokens(kind)) == 40


def test_an_index_that_grows_is_progress(tokens, monkeypatch):
    monkeypatch.setattr(index_cache, "HEARTBEAT_SECONDS", 0.01)
    save, moves = np.save, []

    def slow(path, array, **options):
        save(path, array, **options)
        time.sleep(0.1)

    monkeypatch.setattr(np, "save", slow)
    tokens(BLEND, moved=lambda: moves.append(time.monotonic()))
    assert len(moves) >= 6
    moves.clear()
    tokens(BLEND, moved=lambda: moves.append(time.monotonic()))
    assert moves == []


def test_a_whole_cache_need_not_be_writable_and_a_cut_one_is_refused(tokens, monkeypatch):
    expected = tokens(BLEND)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert tokens(BLEND) == expected
    path = next(tokens.cache.glob("*shuffle_index.npy"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"shuffle_index.npy is cut short, and it is not writable"):
        tokens(BLEND)
    # Another run's index does not matter.
    path.with_name(path.name.replace("shuffle_index.npy", "description.txt")).rename(tokens.cache / "x-GPTDataset-d")
    monkeypatch.undo()
    assert tokens(PLAIN)


def test_an_error_that_may_pass_is_no_mistake_in_the_settings(tokens, monkeypatch):
    def save(path, array, **options):
        raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(RuntimeError, match="could not index the data .*Stale file handle") as error:
        tokens(BLEND)
    assert not isinstance(error.value, ConfigError) and list(tokens.cache.iterdir()) == []


def test_what_a_killed_job_left_is_removed_after_a_day(tokens):
    left, recent = tokens.cache / ".building-node-1", tokens.cache / ".building-node-2"
    for path in (left, recent):
        path.mkdir(parents=True)
        (path / "x-GPTDataset-train-shuffle_index.npy").write_bytes(b"cut")
    os.utime(left, (time.time() - 90_000,) * 2)
    tokens(PLAIN)
    assert [path.name for path in tokens.cache.glob(".building-*")] == [recent.name]


def test_every_rank_maps_a_mixture_and_holds_none_of_it(tokens, folder):
    tokens(MIX)
    (parts,) = [index_cache.cached(str(tokens.cache), "Mixed", {"shares": [0.5, 0.5], "size": 40}, pytest.fail)]
    assert all(isinstance(array, np.memmap) for array in parts.values()) and parts["counts"].tolist() == [20, 20]
