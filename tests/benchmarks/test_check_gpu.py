"""`benchmarks.check_gpu`: which slices run, what is kept of them, and what the table says."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import check_gpu, slices
from benchmarks.slices import Machine, Slice

ROOT = Path(__file__).resolve().parents[2]
H100 = Machine(
    gpus=("NVIDIA H100 80GB HBM3",),
    python="3.12.3",
    torch="2.13.0",
    packages=frozenset({"megatron.core", "deepspeed", "transformers"}),
    memory_gib=79.2,
    capability=(9, 0),
    triton="3.7.1",
    cuda="13.0",
)
FIRST, SECOND = Slice("first", "works", "first"), Slice("second", "works", "second")
WRITE = "import json, sys; json.dump({'found': 1}, open(sys.argv[1], 'w')); print('measured')"


@pytest.fixture
def check(monkeypatch, tmp_path, capsys):
    """Return a function that runs the check on a pretended GPU, where `programs` are the slices' code."""
    programs = {"first": WRITE, "second": WRITE}
    monkeypatch.setattr(check_gpu, "SLICES", (FIRST, SECOND))
    monkeypatch.setattr(check_gpu, "look_at_machine", lambda *_: H100)
    monkeypatch.setattr(check_gpu, "table", lambda *_: ["the table"])
    monkeypatch.setattr(check_gpu._Check, "update_measured", lambda self: None)
    monkeypatch.setattr(check_gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        check_gpu, "command", lambda part, _, record, *__: [sys.executable, "-c", programs[part.name], str(record)]
    )

    def run(*options, **changed):
        programs.update(changed)
        status = check_gpu.main(["--output", str(tmp_path), *options])
        return status, capsys.readouterr().out

    return run


def outcome(directory, name):
    return json.loads((directory / f"{name}.json").read_text())["outcome"]


def test_slices_that_are_done_are_not_run_again_unless_they_are_named(check, tmp_path):
    status, out = check()
    assert status == 0 and out.count("    measured\n") == 2 and "the table" in out
    record = json.loads((tmp_path / "first.json").read_text())
    assert record["found"] == 1 and record["outcome"]["status"] == "done"
    assert (tmp_path / "goals.md").read_text() == "the table\n" and "measured" in (tmp_path / "first.log").read_text()
    status, out = check()
    assert status == 0 and "    measured\n" not in out and out.count("[done before]") == 2
    status, out = check("--slice", "2")
    assert status == 0 and out.count("    measured\n") == 1 and (tmp_path / "second.previous.json").exists()


def test_slices_run_again_when_the_code_or_the_gpus_have_changed(check, tmp_path, monkeypatch):
    check()
    monkeypatch.setattr(check_gpu, "digest", lambda: "other code")
    assert check()[1].count("    measured\n") == 2
    monkeypatch.setattr(check_gpu, "look_at_machine", lambda *_: Machine(**vars(H100) | {"gpus": H100.gpus * 2}))
    assert check()[1].count("    measured\n") == 2


def test_a_slice_that_fails_leaves_its_results_and_its_last_lines_and_the_others_run(check, tmp_path):
    status, out = check(first=f"{WRITE}; sys.exit('the kernel does not compile')")
    assert status == 1 and outcome(tmp_path, "second")["status"] == "done"
    record = json.loads((tmp_path / "first.json").read_text())
    assert record["found"] == 1 and record["outcome"]["status"] == "failed"
    assert record["outcome"]["last_lines"][-1] == "the kernel does not compile"
    status, out = check(first="print('nothing written')")
    assert status == 1 and outcome(tmp_path, "first")["reason"] == "wrote no results"


def test_a_slice_that_takes_too_long_is_ended_with_all_its_children(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check_gpu, "LIMIT", 3 / 60)
    monkeypatch.setattr(check_gpu, "SHORTEST", 0)
    child = "import time; open(sys.argv[1] + '.pid', 'w').write(str(__import__('os').getpid())); time.sleep(99)"
    start = f"subprocess.run([sys.executable, '-c', 'import sys; ' + {child!r}, sys.argv[1]])"
    first = f"{WRITE}; import subprocess; {start}"
    status, out = check(first=first)
    assert status == 1 and outcome(tmp_path, "first")["status"] == "stopped" and "took more than" in out
    assert outcome(tmp_path, "second")["status"] == "done"
    pid = int((tmp_path / "first.json.pid").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_when_the_time_is_used_up_the_next_call_continues(check, tmp_path):
    status, out = check("--minutes", "0.5")
    assert status == 1 and "still to do: first, second" in out and not (tmp_path / "first.json").exists()
    assert check()[0] == 0


def test_a_slice_that_might_not_end_in_time_is_left_to_the_next_call(check, tmp_path, monkeypatch):
    long = [dataclasses.replace(part, minutes=8.0) for part in (FIRST, SECOND)]
    monkeypatch.setattr(check_gpu, "SLICES", tuple(long))
    status, out = check("--minutes", "7")  # the first one starts all the same, or it never would
    assert status == 1 and "still to do: second" in out and outcome(tmp_path, "first")["status"] == "done"
    assert check("--minutes", "7")[0] == 0 and outcome(tmp_path, "second")["status"] == "done"


def test_the_goals_are_written_after_every_slice(check, tmp_path):
    seen = "import os, sys; assert os.path.exists(os.path.dirname(sys.argv[1]) + '/goals.md')"
    assert check(second=f"{seen}; {WRITE}")[0] == 0
    assert outcome(tmp_path, "second")["status"] == "done"


def test_damaged_results_count_as_none(check, tmp_path):
    check()
    (tmp_path / "first.json").write_text("{")
    status, out = check()
    assert status == 0 and out.count("    measured\n") == 1


def test_an_interrupted_repetition_does_not_replace_results_that_were_complete(check, tmp_path, monkeypatch):
    check()
    whole = (tmp_path / "first.json").read_text()

    def interrupted(*_):
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(check_gpu, "run", interrupted)
            assert check("--slice", "first")[0] == 130
        assert (tmp_path / "first.previous.json").read_text() == whole
        assert outcome(tmp_path, "first")["reason"] == "interrupted"
    status, out = check()
    assert status == 0 and out.count("    measured\n") == 1


def test_an_unusable_output_and_time_are_refused(check, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert check_gpu.main(["--output", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be made (Not a directory)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check_gpu.main(["--minutes", "0"])
    assert "0 is not a number of minutes above zero" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--slice", "third"], ["--slice", "0"]])
def test_an_unknown_slice_is_refused(check, options, capsys):
    assert check_gpu.main(options) == 2
    assert f"--slice {options[1]} is none of: 1 first, 2 second" in capsys.readouterr().err


def test_what_a_slice_needs_decides_whether_it_runs():
    stack = Slice("step", "", "train_step", packages=("megatron.core", "deepspeed"))
    assert stack.why_not(H100) is None
    assert "needs megatron.core and deepspeed" in stack.why_not(Machine(**vars(H100) | {"packages": frozenset()}))
    together = Slice("all", "", "train_step", every_gpu=True)
    assert together.why_not(H100) == "needs two or more GPUs"
    assert together.why_not(Machine(**vars(H100) | {"gpus": H100.gpus * 4})) is None


def test_every_gpu_gets_a_process_and_a_trace_is_asked_for_where_there_is_one():
    four = Machine(**vars(H100) | {"gpus": H100.gpus * 4})
    together = next(part for part in slices.SLICES if part.every_gpu)
    arguments = slices.command(together, four, Path("x.json"), "abc", True)
    assert arguments[arguments.index("--nproc-per-node") + 1] == "4" and arguments[-1] == "--profile"
    assert arguments[-5:-1] == ["--output", "x.json", "--commit", "abc"]


def test_ending_the_check_ends_the_program(tmp_path):
    """A launcher that ends this command must not leave a program on the GPU."""
    program = f"""
import sys
from pathlib import Path
from benchmarks import check_gpu
from benchmarks.slices import Machine, Slice
check_gpu.SLICES = (Slice("only", "waits", "only"),)
check_gpu.look_at_machine = lambda *_: Machine(("A",), "3", "2", frozenset(), 1.0, (9, 0))
wait = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
check_gpu.command = lambda *_: [sys.executable, "-c", wait]
sys.exit(check_gpu.main(["--output", {str(tmp_path)!r}]))
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    check = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=variables)
    pid = next(int(line) for line in check.stdout if line.strip().isdigit())
    check.send_signal(signal.SIGTERM)
    assert check.wait(30) == 143
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_without_a_gpu_every_slice_runs_at_toy_size(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.check_gpu", "--toy", "--output", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "No GPU can be used here." in done.stdout
    table = (tmp_path / "goals.md").read_text()
    assert "Toy size on a CPU" in table
    for part in slices.SLICES:
        assert outcome(tmp_path, part.name)["status"] == "done", part.name
    assert "| every fused kernel compiles and is exact | kernels | all | yes |" in table
    assert "| 20 steps of TAPE and RoPE agree with the CPU's | training | all | yes |" in table
