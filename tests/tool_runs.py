import io
import json
import runpy
import signal
import sys
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from megatron_tape.data import preprocessing

ROOT = Path(__file__).resolve().parents[1]


def command(tool, *arguments):
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]


class InThisProcess:
    """Stands in for a worker process, which must be forked from a process without threads."""

    def __init__(self, workers, context, initializer, initargs):
        assert workers == 1
        (preprocessing._encoding,) = initargs

    def submit(self, call, *arguments):
        future = Future()
        future.set_result(call(*arguments))
        return future

    def shutdown(self, cancel_futures):
        pass


@mock.patch.object(preprocessing, "ProcessPoolExecutor", InThisProcess)
def run_here(tool, *arguments):
    """Run a tool in this process, which has imported its libraries already."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    output = io.StringIO()
    messages = io.StringIO()
    argv = sys.argv
    sys.argv = command(tool, *arguments)[1:]
    try:
        with redirect_stdout(output), redirect_stderr(messages):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        return CompletedProcess(sys.argv, stop.code, output.getvalue(), messages.getvalue())
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)


def write_lines(path, texts):
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts),
        encoding="utf-8",
    )


def read_pair(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
