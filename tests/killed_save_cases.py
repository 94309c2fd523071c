"""Saves that are killed before each of their file operations in turn; see
checkpoint/test_directories.py.

Files of a few bytes stand for tensors, so that torch, which makes forking slow, is not imported.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from megatron_tape.checkpoint import directories as files
from megatron_tape.io.files import digest, sync_directory

HOME = ".attempt-000001"
NAMES = ("model", "run.json")
# The checkpoints before the save, its step, and the number of checkpoints to keep.
SCENARIOS = {
    "the first checkpoint": ([], 100, 1),
    "one more": ([100, 200], 300, 2),
    "the same step, broken": ([100, "200 broken"], 200, 1),
    "one more among leftovers": ([100, 200, "partial"], 300, 1),
}


def save(root, step, value=None, keep=None):
    """Save a checkpoint whose files all hold ``value`` (default: the step), and prune."""
    home = root / HOME
    home.mkdir(parents=True, exist_ok=True)
    staging = files.staging_directory(home, step)
    for name in NAMES:
        (staging / name).write_text(json.dumps({"value": step if value is None else value}))
        sync_directory(staging / name)
    named = {path.name: digest(path) for path in staging.iterdir()}
    path = files.publish(staging, root, step, named)
    if keep is not None:
        files.prune(root, keep)
    return path


def value_of(path):
    """Return the value that every file of a complete checkpoint contains."""
    assert files.problems(path) == []
    values = {json.loads((path / name).read_text())["value"] for name in NAMES}
    assert len(values) == 1
    return values.pop()


def kill_at_every_operation(directory, before, step, keep):
    """Kill a save before its first operation, its second, and so on; return the number of
    operations.
    """
    directory.mkdir()
    template = directory / "template"
    root = directory / "root"
    build(template, before)
    newest_before = newest_step(template)
    broken_before = broken(template)
    for operation in range(1, 1000):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        killed = save_and_die(root, step, keep, operation)
        survivor = files.newest_complete(root, warn=lambda _: None)
        assert newest_step(root) >= newest_before, (
            f"{before}: operation {operation} lost a checkpoint"
        )
        assert broken(root) <= broken_before, (
            f"{before}: operation {operation} left half a checkpoint under its name"
        )
        if survivor:
            assert value_of(survivor) in (newest_step(root), 1 + step)
        if not killed:
            assert value_of(survivor) == 1 + step
        assert value_of(save(root, step + 100, keep=keep)) == step + 100
        assert len(files.list_checkpoints(root)) <= keep
        assert not list(root.glob(".step*"))
        if not killed:
            return operation - 1
    raise AssertionError("the save never ends")


def broken(root):
    return {path.name for _, path in files.list_checkpoints(root) if files.problems(path)}


def newest_step(root):
    path = files.newest_complete(root, warn=lambda _: None)
    if path:
        return files.read_manifest(path)["step"]
    return 0


def build(root, before):
    root.mkdir()
    for item in before:
        if isinstance(item, int):
            save(root, item)
        elif item == "200 broken":
            os.truncate(save(root, 200) / "run.json", 3)
        else:
            for name in ("00000300", "00000050.discarded", "00000100.discarded"):
                shutil.copytree(root / "step-00000100", root / f".step-{name}.partial")


def save_and_die(root, step, keep, operation):
    """Save in a child that kills itself before its n-th file operation; return whether it got that
    far.
    """
    child = os.fork()
    if child == 0:
        try:
            count_operations(operation)
            save(root, step, value=1 + step, keep=keep)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def count_operations(last):
    """Die before the ``last``-th file operation; if that is a flush, the file loses its second
    half.
    """
    counted = {
        "open",
        "os.rename",
        "os.mkdir",
        "os.remove",
        "os.rmdir",
        "os.scandir",
        "shutil.rmtree",
    }
    done = 0

    def operation(die=lambda: None):
        nonlocal done
        done += 1
        if done == last:
            die()
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(descriptor, real=os.fsync):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        operation(lambda: path.is_file() and os.truncate(path, path.stat().st_size // 2))
        real(descriptor)

    os.fsync = fsync
    sys.addaudithook(lambda event, _: operation() if event in counted else None)


if __name__ == "__main__":
    # No power is cut here, so a file system in memory, if there is one, saves waiting for a disk.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as root:
        found = {
            name: kill_at_every_operation(Path(root) / str(number), *scenario)
            for number, (name, scenario) in enumerate(SCENARIOS.items())
        }
    assert "torch" not in sys.modules
    print(json.dumps(found))
