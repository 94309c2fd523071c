import errno
import os
import stat

import pytest

from megatron_tape.errors import FileError
from megatron_tape.io.files import (
    PartialFile,
    atomic_directory,
    atomic_output,
    open_to_append,
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
    assert (tmp_path / "file").read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileError, match="is a directory"), atomic_output(tmp_path, overwrite=True):
        pass


def write_in_every_way(directory):
    with atomic_output(directory / "deep" / "output") as file:
        file.write(b"whole")
    with atomic_directory(directory / "directory") as partial:
        (partial / "file").write_text("whole")
    write_whole(directory / "record", [b"whole"])
    sync_directory(directory)
    sync_directory(directory / "record")


def fail_to_sync(monkeypatch, number, kind):
    """Make os.fsync fail for directories or regular files."""
    fsync = os.fsync

    def fails(descriptor):
        if stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)


CANNOT_SYNC = [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF]


@pytest.mark.parametrize("number", CANNOT_SYNC)
def test_a_file_system_may_be_unable_to_sync_directories(tmp_path, monkeypatch, number):
    fail_to_sync(monkeypatch, number, stat.S_IFDIR)
    write_in_every_way(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["deep", "directory", "record"]
    assert (
        (tmp_path / "directory" / "file").read_text()
        == (tmp_path / "deep" / "output").read_text()
        == "whole"
    )


def test_a_file_system_may_be_unable_to_open_directories_for_syncing(tmp_path, monkeypatch):
    def refuse(path, flags):
        raise OSError(errno.EINVAL, "Invalid argument", path)

    monkeypatch.setattr(os, "open", refuse)
    sync_directory(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync_directory(tmp_path / "missing")


@pytest.mark.parametrize(
    "number, kind",
    [
        (errno.EIO, stat.S_IFDIR),
        (errno.EACCES, stat.S_IFDIR),
        *((number, stat.S_IFREG) for number in CANNOT_SYNC),
    ],
)
def test_other_errors_of_syncing_are_raised(tmp_path, monkeypatch, number, kind):
    fail_to_sync(monkeypatch, number, kind)
    (tmp_path / "record").write_text("old")
    target = tmp_path if kind == stat.S_IFDIR else tmp_path / "record"
    with pytest.raises(OSError, match=os.strerror(number)):
        sync_directory(target)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(tmp_path / "record", [b"new"])


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
    assert os.listdir(path.parent) == ["out"] and os.listdir(path) == ["file"]


@pytest.mark.parametrize("writer", [atomic_output, atomic_directory])
def test_a_partial_output_that_is_a_link_is_refused_and_a_leftover_is_replaced(tmp_path, writer):
    thesis = tmp_path / "precious" / "thesis"
    partial = tmp_path / "out.partial"
    thesis.parent.mkdir()
    thesis.write_text("years of work")

    def refused(problem):
        with (
            pytest.raises(FileError, match=f"out.partial {problem}.*; remove it"),
            writer(tmp_path / "out"),
        ):
            raise AssertionError
        assert thesis.read_text() == "years of work" and not (tmp_path / "out").exists()
        partial.rmdir() if partial.is_dir() and not partial.is_symlink() else partial.unlink()

    for target in (thesis, thesis.parent, tmp_path / "nowhere"):
        partial.symlink_to(target)
        refused("is a link")
    assert not (tmp_path / "nowhere").exists()
    os.mkfifo(partial)
    refused("is not a")
    partial.touch() if writer is atomic_directory else partial.mkdir()
    refused("is not a")
    if writer is atomic_output:
        os.link(thesis, partial)
    else:
        partial.mkdir()
        os.link(thesis, partial / "thesis")
    left = os.open(partial, os.O_RDONLY)  # as whoever made it may still have it
    with writer(tmp_path / "out"):
        assert not os.path.samestat(os.fstat(left), partial.stat())
    os.close(left)
    assert thesis.read_text() == "years of work" and (tmp_path / "out").exists()


def test_appending_creates_a_file_and_follows_no_link(tmp_path):
    for line in (b"1\n", b"2\n"):
        with open_to_append(tmp_path / "log") as file:
            file.write(line)
    assert (tmp_path / "log").read_bytes() == b"1\n2\n"
    (tmp_path / "link").symlink_to("log")
    os.mkfifo(tmp_path / "fifo")
    for name, problem in (
        ("link", "is a link"),
        ("fifo", "is not a regular file"),
        (".", "is not a regular file"),
    ):
        with pytest.raises(FileError, match=problem):
            open_to_append(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_to_append(tmp_path / "absent" / "log")


def test_an_existing_directory_is_never_replaced_even_if_it_appears_meanwhile(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(FileError), atomic_directory(path):
        path.mkdir()
    with pytest.raises(FileError), atomic_directory(path):
        raise AssertionError
    assert os.listdir(tmp_path) == ["out"] and os.listdir(path) == []


def refuse_notes(path):
    if (path / "notes").exists():
        raise FileError(str(path), "has notes")


def test_a_directory_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(RuntimeError), atomic_directory(path, refuse_notes) as directory:
        (directory / "new").touch()
        raise RuntimeError
    assert os.listdir(tmp_path) == ["out"] and os.listdir(path) == ["old"]

    rename = os.rename

    def fail_to_publish(source, target):
        if str(source).endswith(".partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as broken, pytest.raises(OSError, match="Input/output"):
        broken.setattr(os, "rename", fail_to_publish)
        with atomic_directory(path, refuse_notes) as directory:
            (directory / "new").touch()
    assert os.listdir(tmp_path) == ["out"] and os.listdir(path) == ["old"]

    with atomic_directory(path, refuse_notes) as directory:
        (directory / "new").touch()
        assert os.listdir(path) == ["old"]
    assert os.listdir(tmp_path) == ["out"] and os.listdir(path) == ["new"]
    with atomic_directory(tmp_path / "first", refuse_notes):
        pass
    assert sorted(os.listdir(tmp_path)) == ["first", "out"]


def test_a_directory_that_may_not_be_replaced_is_left_alone(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    with pytest.raises(FileError, match="has notes"), atomic_directory(path, refuse_notes):
        (path / "notes").touch()  # appears while the new directory is written
    with pytest.raises(FileError, match="has notes"), atomic_directory(path, refuse_notes):
        raise AssertionError
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(path)
    for name in ("file", "link"):
        with (
            pytest.raises(FileError, match="is not a directory"),
            atomic_directory(tmp_path / name, refuse_notes),
        ):
            raise AssertionError
    (path / "notes").unlink()
    (tmp_path / "out.replaced").mkdir()
    with (
        pytest.raises(FileError, match="an interrupted run has left it"),
        atomic_directory(path, refuse_notes),
    ):
        raise AssertionError
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "out", "out.replaced"]


def test_a_full_disk_names_the_output(tmp_path):
    full = open("/dev/full", "wb", buffering=0)
    with pytest.raises(OSError, match="No space left") as error, atomic_output(tmp_path / "file"):
        full.write(b"x")
    assert error.value.filename == str(tmp_path / "file")
    with (
        pytest.raises(OSError, match="No space left") as error,
        atomic_directory(tmp_path / "directory"),
    ):
        full.write(b"x")
    assert error.value.filename == str(tmp_path / "directory") and os.listdir(tmp_path) == []


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
    assert path.read_bytes() == b"old" and os.listdir(staging) == []
    write_whole(path, [b"new"], staging=staging, durable=False)
    assert path.read_bytes() == b"new" and sorted(os.listdir(tmp_path)) == ["file", "staging"]
    staging.rmdir()
    with pytest.raises(FileNotFoundError):
        write_whole(path, [b"late"], staging=staging)
    assert path.read_bytes() == b"new"


def test_removing_does_not_follow_links(tmp_path):
    kept = tmp_path / "kept"
    (kept / "deep").mkdir(parents=True)
    for name, target in (("link", kept), ("dangling", tmp_path / "nowhere")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "link").symlink_to(kept)
    (tmp_path / "file").write_text("")
    for name in ("link", "dangling", "tree", "file", "absent"):
        remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"] and os.listdir(kept) == ["deep"]
