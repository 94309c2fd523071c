import errno
import os
import stat
from contextlib import nullcontext

import pytest

from megatron_tape.errors import FileError
from megatron_tape.io.files import (
    PartialFile,
    atomic_directory,
    atomic_output,
    remove,
    sync_directory,
    write_whole,
)


def test_output_appears_only_when_the_block_succeeds(tmp_path):
    path = tmp_path / "deep" / "file"
    with pytest.raises(RuntimeError), atomic_output(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert os.listdir(path.parent) == []

    with atomic_output(path, "w") as file:
        file.write("é\r\n")
        assert not path.exists()
    assert path.read_bytes() == "é\r\n".encode()
    assert os.listdir(path.parent) == ["file"]


def test_existing_output_is_refused_or_kept_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(FileError, match="--overwrite"), atomic_output(path):
        pass

    with pytest.raises(RuntimeError), atomic_output(path, overwrite=True) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_text() == "old"

    with atomic_output(path, overwrite=True) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_output_of_a_running_process_is_refused_and_of_a_killed_process_replaced(tmp_path):
    first = PartialFile(tmp_path / "file")
    with pytest.raises(FileError, match="another process"):
        PartialFile(tmp_path / "file")
    first.discard()

    (tmp_path / "file.partial").write_bytes(b"a long leftover")
    with atomic_output(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("writer", [atomic_output, atomic_directory])
def test_no_link_is_followed_to_a_partial_output(tmp_path, writer):
    target = tmp_path / "target"
    target.mkdir() if writer is atomic_directory else target.touch()
    (tmp_path / "out.partial").symlink_to(target)
    with pytest.raises(OSError, match="out.partial"), writer(tmp_path / "out"):
        raise AssertionError


CANNOT_SYNC = [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF]


@pytest.mark.parametrize(
    "number, kind, raises",
    [
        (errno.EIO, stat.S_IFDIR, True),
        *((number, stat.S_IFDIR, False) for number in CANNOT_SYNC),
        (errno.EINVAL, stat.S_IFREG, True),
    ],
)
def test_a_file_system_may_be_unable_to_sync_directories(
    tmp_path, monkeypatch, number, kind, raises
):
    fsync = os.fsync

    def fail_to_sync(descriptor):
        if stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_to_sync)
    with pytest.raises(OSError, match=os.strerror(number)) if raises else nullcontext():
        write_whole(tmp_path / "record", [b"whole"])
        sync_directory(tmp_path)
        with atomic_directory(tmp_path / "directory"):
            pass


def test_a_directory_appears_only_when_the_block_succeeds(tmp_path):
    path = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError), atomic_directory(path) as directory:
        (directory / "file").write_text("half")
        raise RuntimeError
    assert os.listdir(path.parent) == []

    (path.parent / "out.partial" / "leftover").mkdir(parents=True)
    with atomic_directory(path) as directory:
        (directory / "file").write_text("whole")
        assert not path.exists()
        with pytest.raises(FileError, match="another process"), atomic_directory(path):
            pass
    assert os.listdir(path.parent) == ["out"]
    assert os.listdir(path) == ["file"]


def test_an_existing_directory_is_never_replaced_even_if_it_appears_meanwhile(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(FileError), atomic_directory(path):
        path.mkdir()
    with pytest.raises(FileError), atomic_directory(path):
        raise AssertionError
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(path) == []


def refuse_notes(path):
    if (path / "notes").exists():
        raise FileError(str(path), "has notes")


def test_a_directory_is_replaced_when_the_new_one_is_complete(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(RuntimeError), atomic_directory(path, refuse_notes) as directory:
        (directory / "new").touch()
        raise RuntimeError
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(path) == ["old"]

    with atomic_directory(path, refuse_notes) as directory:
        (directory / "new").touch()
        assert os.listdir(path) == ["old"]
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(path) == ["new"]

    with atomic_directory(tmp_path / "first", refuse_notes):
        pass
    assert sorted(os.listdir(tmp_path)) == ["first", "out"]


def test_the_old_directory_is_restored_if_the_new_one_cannot_be_renamed(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").touch()
    rename = os.rename

    def fail_for_the_new_one(source, target):
        if source.suffix == ".partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), atomic_directory(path, refuse_notes):
        pass
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(path) == ["old"]


def test_a_directory_that_may_not_be_replaced_is_left_alone(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    with pytest.raises(FileError, match="has notes"), atomic_directory(path, refuse_notes):
        (path / "notes").touch()  # appears while the new directory is written
    (path / "notes").unlink()

    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "out.replaced").mkdir()
    for name in ("file", "link", "out"):
        with pytest.raises(FileError), atomic_directory(tmp_path / name, refuse_notes):
            raise AssertionError
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "out", "out.replaced"]


@pytest.mark.parametrize("writer", [atomic_output, atomic_directory])
def test_a_full_disk_names_the_output(tmp_path, writer):
    full = open("/dev/full", "wb", buffering=0)
    with pytest.raises(OSError, match="No space left") as error, writer(tmp_path / "out"):
        full.write(b"x")
    assert error.value.filename == str(tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_small_file_is_replaced_atomically_and_a_failure_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "file"
    staging = tmp_path / "staging"
    staging.mkdir()
    write_whole(path, [b"o", b"ld"])

    def half():
        yield b"new"
        assert len(os.listdir(staging)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, half(), staging=staging)
    assert path.read_bytes() == b"old"
    assert os.listdir(staging) == []

    write_whole(path, [b"new"], staging=staging, durable=False)
    assert path.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["file", "staging"]

    staging.rmdir()
    with pytest.raises(FileNotFoundError):
        write_whole(path, [b"late"], staging=staging)
    assert path.read_bytes() == b"new"


def test_removing_does_not_follow_links(tmp_path):
    kept = tmp_path / "kept"
    (kept / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "link").symlink_to(kept)
    (tmp_path / "file").write_text("")
    for name in ("link", "tree", "file", "absent"):
        remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(kept) == ["deep"]
