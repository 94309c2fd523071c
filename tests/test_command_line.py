"""megatron_tape.command_line: exit status, error messages and escaping, including streams that
fail.
"""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tape import command_line

ROOT = Path(__file__).resolve().parents[1]
TOOL = """
import os, sys
from megatron_tape import command_line

def main():
    command_line.log("a message")
    command_line.Progress(10).update(1, lambda seconds: "progress")
    with open(sys.argv[1], "w") as file:
        os.write(2, b"a library's warning")
        file.write("whole")
    print("the result")

command_line.run(main)
"""


def run(redirections, tmp_path):
    """Run a tool that writes to all streams and to a file under a shell's redirections."""
    command = f'"$0" -c "$1" "$2" {redirections}'
    arguments = [sys.executable, TOOL, str(tmp_path / "file")]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run(
        ["bash", "-c", command, *arguments],
        cwd=ROOT,
        env=buffered,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_full_disk_behind_stdout_is_reported_in_one_sentence(tmp_path):
    done = run(">/dev/full", tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1] == "a library's warningerror: No space left on device: stdout"
    )


def test_a_closed_pipe_ends_the_tool_silently(tmp_path):
    done = run("| true; exit ${PIPESTATUS[0]}", tmp_path)
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


PROGRAMS = [
    ["-m", "pretrain.train"],
    ["-m", "pretrain.evaluate"],
    ["-c", "from pretrain.console_scripts import *; status()"],
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_during_the_imports_ends_with_one_sentence(program, tmp_path):
    (tmp_path / "yaml.py").write_text("raise KeyboardInterrupt")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, *program],
        env=os.environ | path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "error: ended by Ctrl-C\n")


EVIL = "evil\x1b]0;title\x07\x1b[2J\x9b2J\u202etxt.\x7f\u2028"
SHOWN = r"evil\x1b]0;title\x07\x1b[2J\x9b2J\u202etxt.\x7f\u2028"


@pytest.mark.parametrize(
    "shared", ["command_line.run(main)", "with command_line.exit_on_user_error(): main()"]
)
@pytest.mark.parametrize("encoding, accent", [("utf-8", "\xef"), ("ascii", r"\xef")])
def test_control_characters_and_those_that_cannot_be_encoded_are_escaped(shared, encoding, accent):
    program = (
        "from megatron_tape import command_line\n"
        "from megatron_tape.errors import FileError\n"
        f"text = {EVIL!r}\n"
        "def main():\n"
        "    print('na\\xefve', text)\n"
        "    command_line.log(text)\n"
        "    raise FileError(text + chr(10), 'has problem\\r', 'fix')\n"
        f"{shared}"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=60
    )
    printed = done.stderr.decode()
    assert done.stdout.decode(encoding) == f"na{accent}ve {SHOWN}\n"
    assert done.returncode == 2
    assert printed == f"{SHOWN}\nerror: {SHOWN}\\n has problem\\r; fix\n"


def test_progress_on_a_terminal_clears_its_line_and_escapes_control_characters(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    command_line.escape_unprintable()
    progress = command_line.Progress(10)
    progress._interval = 0
    progress.update(1, lambda seconds: EVIL)
    progress.end()
    stream.write("\n\x1b[A")  # as tqdm does
    stream.write("\x1b[93m[WARNING]\x1b[0m")  # as DeepSpeed does
    stream.flush()
    assert (
        stream.buffer.getvalue().decode()
        == f"\r\033[K{SHOWN}, 10.0%, 0:00:00 left\r\033[K\n\x1b[A[WARNING]"
    )


def test_the_progress_of_a_continued_run_counts_earlier_work_but_not_as_time(monkeypatch, capsys):
    seconds = iter([0, 20])
    monkeypatch.setattr(command_line.time, "monotonic", lambda: next(seconds))
    progress = command_line.Progress(100, start=50)
    progress.update(60, lambda seconds: f"{seconds} s")
    assert capsys.readouterr().err.endswith("20 s, 60.0%, 0:01:20 left\n")


@pytest.mark.parametrize(
    "error, sentence",
    [
        (MemoryError("Unable to allocate\n8 TiB"), "memory ran out (Unable to allocate 8 TiB); "),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "memory ran out ([enf",
        ),
    ],
)
def test_running_out_of_memory_is_reported_in_one_sentence(error, sentence, capsys):
    def main():
        raise error

    assert command_line.status_of(main, unavailable=75) == 1
    with pytest.raises(SystemExit, match="1"), command_line.exit_on_user_error():
        main()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {sentence}") for line in lines)
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        command_line.status_of(main)


@pytest.mark.parametrize(
    "number, expected",
    [
        (errno.ENOSPC, 1),
        (errno.EDQUOT, 1),
        (errno.EIO, 75),
    ],
)
def test_only_errors_of_a_file_system_that_does_not_respond_may_pass(number, expected, capsys):
    def main():
        raise OSError(number, os.strerror(number), "a/file")

    assert command_line.status_of(main, unavailable=75) == expected
    assert capsys.readouterr().err == f"error: {os.strerror(number)}: a/file\n"
