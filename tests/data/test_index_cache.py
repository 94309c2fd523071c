"""The cached index of the data: whole or absent, whatever becomes of the job that builds it."""

import errno
import itertools
import os
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_for_tests import EOD, write_dataset
from models import small_model

from megatron_tape.config.data import DataConfig, LongDocumentSettings
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.train import TrainConfig
from megatron_tape.data import batches, index_cache
from megatron_tape.data.batches import build_batches
from megatron_tape.errors import ConfigError, FileError
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
def tokens(folder, tmp_path, monkeypatch):
    """Return the tokens of a run's sequences, from an index that is built or in the cache."""
    monkeypatch.setattr(index_cache, "sync_directory", lambda path: None)  # for speed

    def read(kind, moved=lambda: None):
        prefix = f"{folder}/a" if kind == PLAIN else {f"{folder}/a": 0.3, f"{folder}/b": 0.7}
        long = LongDocumentSettings(minimum=40, share=0.5) if kind == MIX else None
        data = {"prefix": prefix, "split": "900,100,0", "cache_directory": str(tmp_path / "cache")}
        data |= {"num_workers": 0}
        train = TrainConfig(steps=10, global_batch_size=4, eval_interval=5, eval_steps=2, precision="fp32")
        data = DataConfig(**data, long_documents=long)
        config = RunConfig(model=small_model(seq_length=16), data=data, train=train)
        built = build_batches(config, initialize_distributed(1), EOD, moved=moved)
        loaded = [*built.training(), *built.evaluation()]
        return [sequence for batch in loaded for sequence in batch["tokens"].tolist()]

    read.cache = tmp_path / "cache"
    return read


RUN: list[str] = []
"""What pickles have run."""


class _Attack:
    def __reduce__(self):
        return RUN.append, ("code",)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-8])


def _pickle(path):
    path.write_bytes(pickle.dumps(_Attack()))  # NumPy takes a file without its own header for one


def _reshape(path):
    np.save(path, np.load(path)[None])


def _zero(path):
    np.save(path, np.zeros_like(np.load(path)))


def _fraction(path):
    np.save(path, np.load(path).astype(float))


def _change(path):
    np.save(path, np.load(path) + 1)


@KINDS
def test_a_damaged_array_is_named_and_built_again(tokens, kind, caplog):
    expected = tokens(kind)
    arrays = sorted(tokens.cache.glob("*/*.npy"))
    assert len(arrays) >= 3 and not list(tokens.cache.glob(".building-*"))
    damages = itertools.cycle((_truncate, _pickle, _reshape, _fraction, _zero, _change))
    for path in itertools.islice(itertools.cycle(arrays), max(6, len(arrays))):
        whole = path.read_bytes()
        next(damages)(path)
        caplog.clear()
        assert tokens(kind) == expected and path.read_bytes() == whole
        (warning,) = [record.message for record in caplog.records if "is damaged" in record.message]
        assert str(path) in warning
    assert not RUN
    caplog.clear()
    assert tokens(kind) == expected and "is damaged" not in caplog.text


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
    assert len(tokens(kind)) == 48


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


def test_a_whole_cache_need_not_be_writable_and_a_damaged_one_is_refused(tokens, monkeypatch):
    expected = tokens(BLEND)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert tokens(BLEND) == expected
    path = next(tokens.cache.glob("*/*shuffle_index.npy"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"shuffle_index.npy is damaged, and it is not writable"):
        tokens(BLEND)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_another_job_has_built_meanwhile_is_kept(tokens, monkeypatch, tmp_path, damaged):
    expected = tokens(PLAIN)
    (directory,) = tokens.cache.iterdir()
    write, other = index_cache.write_record, directory.rename(tmp_path / "other")
    if damaged:
        shutil.copytree(other, directory)
        _truncate(next(directory.glob("*.npy")))

    def meanwhile(*arguments, **options):
        write(*arguments, **options)
        shutil.rmtree(directory, ignore_errors=True)
        other.rename(directory)

    monkeypatch.setattr(index_cache, "write_record", meanwhile)
    inode = other.stat().st_ino
    assert tokens(PLAIN) == expected and [path.stat().st_ino for path in tokens.cache.iterdir()] == [inode]


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
    (directory,) = tokens.cache.iterdir()
    parts = index_cache.cached(directory, "Mixed", ("counts", "dataset"), [[0.5, 0.5], 40], pytest.fail)
    assert all(isinstance(array, np.memmap) for array in parts.values()) and parts["counts"].tolist() == [20, 20]


@KINDS
def test_a_pickle_that_replaces_an_array_after_the_check_is_not_loaded(tokens, kind, monkeypatch):
    expected = tokens(kind)
    build = index_cache._build_aside

    def replaced_meanwhile(staging, cache, build_index):
        def attacked(directory):
            for path in arrays:
                _pickle(path)
            build_index(directory)

        build(staging, cache, attacked)

    def replaced_later(*arguments):
        build(*arguments)
        for path in arrays:
            _pickle(path)

    for attack in (replaced_meanwhile, replaced_later):
        for path in sorted(tokens.cache.glob("*/*.npy")):
            arrays, whole = [path], path.read_bytes()
            monkeypatch.setattr(index_cache, "_build_aside", attack)
            try:
                assert tokens(kind) == expected and attack is replaced_meanwhile  # it is built again
            except index_cache.DamagedIndex as error:
                assert f"{path.name} cannot be used" in error.problem and "remove that directory" in error.fix
            path.write_bytes(whole)
    assert not RUN


@pytest.fixture
def replaced_later(tokens, monkeypatch):
    """Return a function that makes `change` to an array of the cache after rank 0 has checked it, before it is used."""

    def read(kind, path, change):
        build, whole = index_cache._build_aside, path.read_bytes()

        def changed(*arguments):
            build(*arguments)
            change(path)

        try:
            with monkeypatch.context() as patched:
                patched.setattr(index_cache, "_build_aside", changed)
                return tokens(kind)
        finally:
            path.write_bytes(whole)

    return read


@KINDS
@pytest.mark.parametrize("value", [-1, 0, 2**60, None])
def test_an_array_of_wrong_numbers_says_to_remove_the_cache(tokens, replaced_later, kind, value):
    expected = tokens(kind)
    refusals = 0

    def fill(path):
        array = np.load(path)
        np.save(path, array[:1] if value is None else np.full(array.shape, value, dtype=np.int64))

    for path in sorted(tokens.cache.glob("*/*.npy")):
        try:
            found = replaced_later(kind, path, fill)
        except index_cache.DamagedIndex as error:
            refusals += 1
            assert error.subject.startswith(str(tokens.cache)) and "remove that directory" in str(error)
        else:  # other samples of the same data cannot be told from the right ones
            assert [len(sample) for sample in found] == [16] * 48
            assert not path.name.endswith("-sample_index.npy"), "it is padded"
    assert refusals and tokens(kind) == expected


def test_an_index_of_more_documents_than_tokens_is_refused_before_they_are_read(tokens, replaced_later):
    """A sparse file of gigabytes costs nothing to make."""
    tokens(PLAIN)
    starts = next(path for path in tokens.cache.glob("*/*train-sample_index.npy"))

    def stretch(path):
        array = np.load(path)
        array[::2, 0], array[1::2, 0] = 0, 2**31 - 1
        np.save(path, array)

    with pytest.raises(index_cache.DamagedIndex, match="sample 0 cannot be read .it would have -?2147483647 documents"):
        replaced_later(PLAIN, starts, stretch)


@pytest.mark.parametrize("content", [b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((((", b"PK\x03\x04aaaaaaa", None])
def test_what_is_no_array_at_all_is_built_again(tokens, content):
    expected = tokens(PLAIN)
    path = next(tokens.cache.glob("*/*document_index.npy"))
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(index_cache.DamagedIndex):
        index_cache.load_array(path)
    assert tokens(PLAIN) == expected


def test_an_error_in_a_loader_process_arrives_as_it_was_raised():
    class Samples(torch.utils.data.Dataset):
        def __getitem__(self, index):
            raise FileError("a file", "is missing", "make one") if index else ValueError

    loaded = torch.utils.data.DataLoader(
        batches._ErrorsAsSamples(Samples()), batch_sampler=[[1, 1]], num_workers=1, collate_fn=batches._collate
    )
    (error,) = loaded
    assert isinstance(error, FileError) and str(error) == "a file is missing; make one"


def test_arrays_that_vanish_are_no_mistake_in_the_settings_and_built_again(tokens, monkeypatch):
    """A node may not see yet what another has moved there."""
    expected = tokens(PLAIN)
    build = index_cache._build_aside

    def removed(*arguments):
        build(*arguments)
        for path in tokens.cache.glob("*/*.npy"):
            path.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(index_cache, "_build_aside", removed)
        with pytest.raises(index_cache.DamagedIndex, match="No such file"):
            tokens(PLAIN)
    assert tokens(PLAIN) == expected


def test_an_error_that_is_not_the_caches_is_raised_as_it_is(tokens, monkeypatch):
    def broken(*arguments, **options):
        raise IndexError("a bug")

    monkeypatch.setattr(batches, "open_split", broken)
    with pytest.raises(RuntimeError, match="could not index the data .IndexError: a bug"):
        tokens(PLAIN)


def test_a_cache_that_others_can_write_is_a_warning(tokens, caplog, monkeypatch):
    tokens(PLAIN)
    for path in (tokens.cache, *tokens.cache.iterdir()):
        path.chmod(path.stat().st_mode & ~0o022)  # which the umask may allow
    assert "others can change" not in caplog.text
    array, uid = next(tokens.cache.glob("*/*.npy")), os.geteuid()
    for path, mode in ((tokens.cache, 0o777), (array, 0o666)):
        before = path.stat().st_mode
        path.chmod(mode)
        caplog.clear()
        tokens(PLAIN)
        assert f"{path} can be written by every user" in caplog.text
        path.chmod(before)
    directory = array.parent
    assert index_cache._who_else_writes(directory) is None
    status = os.stat_result((*tokens.cache.stat()[:4], uid + 1, *tokens.cache.stat()[5:]))
    monkeypatch.setattr(Path, "stat", lambda path: status)
    assert f"{tokens.cache} belongs to another user" in index_cache._who_else_writes(directory)
