"""tools/convert_checkpoint.py, run in this process."""

import json
import resource
import shutil
from contextlib import contextmanager

from tool_runs import run_here

from megatron_tape.checkpoint.directories import digest


def convert(*arguments):
    """Run the tool in this process, which has imported torch already."""
    return run_here("convert_checkpoint", *arguments)


def refused(tmp_path, part, *arguments):
    """Check that the tool prints one sentence with `part`, exits with 2, and does not change
    `tmp_path`.
    """
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = convert(*arguments)
    errors = [
        line for line in done.stderr.splitlines() if not line.startswith(("checking", "comparing"))
    ]
    assert done.returncode == 2, done.stderr
    assert len(errors) == 1 and errors[0].startswith("error: ") and part in errors[0], done.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def change_config(folder, change, without=()):
    """Change the config.json of a Hugging Face model."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | change
    path.write_text(
        json.dumps({key: value for key, value in settings.items() if key not in without})
    )


@contextmanager
def changed_state(source, folder):
    """Copy the checkpoint `source` into `folder`; yield the copy and its state, and write the
    changed state to it.
    """
    step = folder / source.name
    shutil.copytree(source, step)
    state, manifest = (
        json.loads((step / name).read_text()) for name in ("state.json", "manifest.json")
    )
    yield step, state
    (step / "state.json").write_text(json.dumps(state))
    manifest["files"]["state.json"] = digest(step / "state.json")
    (step / "manifest.json").write_text(json.dumps(manifest))


@contextmanager
def limited_files(size):
    """Limit the size of files to `size` bytes, to imitate a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
