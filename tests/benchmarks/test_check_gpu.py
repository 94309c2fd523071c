"""`benchmarks.check_gpu`: which slices run, what is kept of them, and what the table of goals says."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import check_gpu, environment, machine, report
from benchmarks.goals import PYTEST, SLICES, Slice
from benchmarks.machine import DONE, Machine, Outcome

ROOT = Path(__file__).resolve().parents[2]
H100 = Machine(
    gpus=("NVIDIA H100 80GB HBM3",),
    python="3.12.3",
    packages={"torch": "2.11.0+cu130", "megatron-core": "0.16.1", "deepspeed": "0.19.8"},
    gpu_memory_gib=79.2,
    capability="9.0",
)
# Their output is `--output FILE`.
WRITE = "import json, sys; json.dump({'found': 1}, open(sys.argv[2], 'w')); print('measured')"
FIRST, SECOND = (Slice(name, "works", (name,)) for name in ("first", "second"))


@pytest.fixture
def check(monkeypatch, tmp_path, capsys):
    """Return a function that runs the check on a pretended GPU, where `programs` are the slices' code."""
    programs = {"first": WRITE, "second": WRITE}
    command = check_gpu.Check.command

    def of_program(self, part, seconds):
        whole = command(self, part, seconds)
        return [sys.executable, "-c", programs[part.name], *whole[3:]]

    monkeypatch.setattr(check_gpu, "SLICES", (FIRST, SECOND))
    monkeypatch.setattr(check_gpu, "look_at_machine", lambda *_: H100)
    monkeypatch.setattr(check_gpu.Check, "command", of_program)
    monkeypatch.setattr(check_gpu.signal, "signal", lambda *_: None)

    def run(*options, **changed):
        programs.update(changed)
        status = check_gpu.main(["--output", str(tmp_path), *options])
        return status, capsys.readouterr().out

    return run


def outcome(directory, name):
    return json.loads((directory / "slices.json").read_text())[name]


def test_slices_that_are_done_are_not_run_again_unless_they_are_named(check, tmp_path):
    status, out = check()
    assert status == 0 and out.count("    measured\n") == 2 and "| goal | of the slice |" in out
    assert json.loads((tmp_path / "first.json").read_text()) == {"found": 1}
    assert outcome(tmp_path, "first")["status"] == "done" and "measured" in (tmp_path / "first.log").read_text()
    assert "| goal |" in (tmp_path / "goals.md").read_text()
    status, out = check()
    assert status == 0 and "    measured\n" not in out and out.count("[done before]") == 2
    status, out = check("--slice", "2")
    assert status == 0 and out.count("    measured\n") == 1


def test_slices_run_again_when_the_code_or_the_gpus_have_changed(check, tmp_path, monkeypatch):
    check()
    monkeypatch.setattr(check_gpu, "code_digest", lambda _: "other code")
    assert check()[1].count("    measured\n") == 2
    monkeypatch.setattr(check_gpu, "look_at_machine", lambda *_: dataclasses.replace(H100, gpus=H100.gpus * 2))
    assert check()[1].count("    measured\n") == 2
    (tmp_path / "slices.json").write_text("{")
    status, out = check()
    assert status == 0 and out.count("    measured\n") == 2 and "is damaged" in out


def test_a_slice_that_fails_leaves_its_results_and_its_log_and_is_tried_last(check, tmp_path):
    assert check(first=f"{WRITE}; sys.exit('the kernel does not compile')")[0] == 1
    assert outcome(tmp_path, "second")["status"] == "done" and (tmp_path / "first.json").exists()
    failed = outcome(tmp_path, "first")
    assert failed["status"] == "failed"
    assert (tmp_path / "first.log").read_text().endswith("the kernel does not compile\n")
    assert check(first="print('nothing written')")[0] == 1
    assert outcome(tmp_path, "first")["reason"] == "wrote no results; exit status 0"
    (tmp_path / "second.json").unlink()
    out = check(first=WRITE)[1]
    assert out.index("=== 1 of 2: second") < out.index("=== 2 of 2: first")


def test_a_slice_that_takes_too_long_is_ended_with_all_its_children(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check_gpu, "LIMIT", 2 / 60)
    monkeypatch.setattr(check_gpu, "SHORTEST", 0)
    child = "import os, sys, time; open(sys.argv[1] + '.pid', 'w').write(str(os.getpid())); time.sleep(99)"
    status, out = check(
        first=f"{WRITE}; import subprocess; subprocess.run([sys.executable, '-c', {child!r}, sys.argv[2]])"
    )
    assert status == 1 and outcome(tmp_path, "first")["status"] == "stopped" and "took more than" in out
    assert outcome(tmp_path, "second")["status"] == "done"
    pid = int((tmp_path / "first.json.pid").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_when_the_time_is_used_up_the_next_call_continues(check, tmp_path, monkeypatch):
    status, out = check("--minutes", "0.5")
    assert status == 1 and "still to do: first, second" in out and not (tmp_path / "first.json").exists()
    monkeypatch.setattr(check_gpu, "SLICES", [dataclasses.replace(part, minutes=8.0) for part in (FIRST, SECOND)])
    status, out = check("--minutes", "7")  # the first one starts all the same, or it never would
    assert status == 1 and "still to do: second" in out and outcome(tmp_path, "first")["status"] == "done"
    assert check("--minutes", "7")[0] == 0 and outcome(tmp_path, "second")["status"] == "done"


def test_an_interrupted_slice_is_still_to_do(check, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(check_gpu, "run", interrupted)
        assert check()[0] == 130
    assert outcome(tmp_path, "first")["reason"] == "interrupted"
    assert check()[1].count("    measured\n") == 2


KERNELS = """
import os, time, pytest

def test_that_is_exact(): pass
def test_that_is_inexact(): assert 1 > 2, "off by 1"
def test_that_crashes(): os._exit(11)
def test_that_hangs(): time.sleep(99)
def test_that_does_not_fit(): pytest.skip("no room")
"""


def test_a_test_that_crashes_or_hangs_ends_none_but_itself(tmp_path):
    (tmp_path / "test_kernels.py").write_text(KERNELS)
    (tmp_path / "pytest.ini").touch()
    options = [option for option in PYTEST[1:] if not option.startswith("--timeout=") and option not in ("-m", "gpu")]
    command = ("pytest", *options, "--timeout=1", "-n1", f"--rootdir={tmp_path}", str(tmp_path / "test_kernels.py"))
    part = Slice("kernels", "", command)
    pytests = check_gpu.Check(H100, tmp_path, os.environ | {"PYTHONPATH": str(ROOT)}, check_gpu.parse([]))
    assert pytests.run([part], None) == [DONE]
    found = report.read_results(pytests.results(part))
    assert set(found["failed"]) == {"test_that_is_inexact", "test_that_crashes", "test_that_hangs"}
    assert "test_that_is_exact" in found["tests"] and "test_that_does_not_fit" not in found["tests"]


def test_tests_that_no_time_was_left_for_are_still_to_do(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_slow.py").write_text(
        "import time\ndef test_one(): time.sleep(1)\ndef test_two(): time.sleep(1)\ndef test_three(): pass\n"
    )
    monkeypatch.setattr(check_gpu, "LIMIT", (check_gpu.RESERVE + 1) / 60)
    part = Slice("kernels", "", ("pytest", "-n1", f"--rootdir={tmp_path}", str(tmp_path / "test_slow.py")))
    pytests = check_gpu.Check(H100, tmp_path, os.environ | {"PYTHONPATH": str(ROOT)}, check_gpu.parse([]))
    assert pytests.run([part], None) == ["stopped"]
    assert "before all tests had run" in outcome(tmp_path, "kernels")["reason"]
    assert "test_one" in report.read_results(pytests.results(part))["tests"]


@pytest.mark.parametrize("option", ["--slice=third", "--slice=0", "--minutes=0"])
def test_what_cannot_be_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        check_gpu.parse([option])
    assert option.split("=")[1] in capsys.readouterr().err


def test_an_output_that_cannot_be_made_is_refused(check, tmp_path):
    (tmp_path / "file").touch()
    assert check_gpu.main(["--output", str(tmp_path / "file" / "folder")]) == 2


def test_what_a_slice_needs_decides_whether_it_runs():
    stack = next(part for part in SLICES if part.name == "step-155m-1k")
    assert H100.why_not(stack) is None
    assert "needs megatron-core and deepspeed" in dataclasses.replace(H100, packages={}).why_not(stack)
    together = next(part for part in SLICES if part.every_gpu)
    assert H100.why_not(together) == "needs two or more GPUs"
    four = dataclasses.replace(H100, gpus=H100.gpus * 4)
    assert four.why_not(together) is None
    options = check_gpu.parse(["--profile", "--commit=abc"])
    command = check_gpu.Check(four, Path("/nowhere"), {}, options).command(together, 60)
    assert command[command.index("--nproc-per-node") + 1] == "4" and command[-1] == "--profile"
    assert command[-5:-1] == ["--output", "/nowhere/all-gpus.json", "--commit", "abc"]


def test_a_machine_without_a_gpu_says_what_is_installed():
    here = machine.look_at_machine(None, toy=True)
    assert here.toy and here.gpus == () and here.packages["torch"] == environment.describe()["packages"]["torch"]


def test_ending_the_check_ends_the_program(tmp_path):
    """A launcher that ends this command must not leave a program on the GPU."""
    program = f"""
import sys
from benchmarks import check_gpu
from benchmarks.goals import Slice
from benchmarks.machine import Machine
check_gpu.SLICES = (Slice("only", "waits", ("only",)),)
check_gpu.look_at_machine = lambda *_: Machine(("A",), "3", {{}})
wait = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
check_gpu.Check.command = lambda *_: [sys.executable, "-c", wait]
sys.exit(check_gpu.main(["--output", {str(tmp_path)!r}]))
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    check = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=variables)
    pid = next(int(line) for line in check.stdout if line.strip().isdigit())
    check.send_signal(signal.SIGTERM)
    assert check.wait(60) == 143
    assert not Path(f"/proc/{pid}").exists()


def step(ratio=1.05, rope=0.5, tape=0.45):
    def of(mfu):
        found = {"mfu": mfu, "mfu_of_rope_flops": mfu and mfu - 0.01, "tokens_per_second": 123456.0}
        return found | {"memory": {"peak": 2**30}}

    return {"ratio_time": ratio, "models": {"rope": of(rope), "tape": of(tape)}}


def attention(*ratios):
    return {"results": [{"of_rope": {"ratio": ratio}} if ratio else {"rejected": {}} for ratio in ratios]}


def rows(tmp_path, records, machine=H100, status="done"):
    files = {part.name: tmp_path / f"{part.name}.json" for part in SLICES}
    for name, record in records.items():
        files[name].write_text(json.dumps(record))
    outcomes = {name: Outcome(status, 12.3, "c", H100.gpus) for name in records}
    lines = [line for line in report.table(machine, outcomes, files) if line.startswith("| ")]
    return {tuple(cells[:2]): cells[2:] for line in lines if (cells := [c.strip() for c in line.strip("|").split("|")])}


@pytest.mark.parametrize(
    "name, record, aim, met",
    [
        ("step-155m-1k", step(1.10), "1.10 times", "yes"),
        ("step-155m-1k", step(1.11), "1.10 times", "**no**"),
        ("step-7b-8k", step(1.149), "1.15 times", "yes"),
        ("step-1.3b-4k", step(rope=0.449), "MFU of RoPE", "**no**"),
        ("step-1.3b-4k", step(tape=0.40), "MFU of TAPE", "yes"),
        ("step-1.3b-4k", step(tape=None), "MFU of TAPE", ""),
        ("attention", attention(1.4, 1.6), "in every shape", "**no**"),
        ("attention", attention(1.4), "in every shape", "yes"),
        ("attention", attention(1.4, None), "in every shape", "so far"),
        ("attention", attention(1.6, None), "in every shape", "**no**"),
        ("attention", attention(None), "in every shape", ""),
        ("attention", {"results": []}, "in every shape", ""),
        ("kernels", {"tests": ["a"], "failed": []}, "exact", "yes"),
        ("kernels", {"tests": ["a"], "failed": ["a"]}, "exact", "**no**"),
        ("kernels", {"tests": [], "failed": []}, "exact", ""),
        ("training", {}, "agree", ""),
    ],
)
def test_goals_are_met_missed_or_not_measured(tmp_path, name, record, aim, met):
    found = rows(tmp_path, {name: record})
    ((goal, cells),) = [(goal, cells) for (goal, part), cells in found.items() if aim in goal and part == name]
    assert cells[1] == met and (cells[0] == "not measured") == (met == "")
    if met == "yes":
        assert rows(tmp_path, {name: record}, status="stopped")[goal, name][1] == "so far"


def test_goals_for_speed_are_not_judged_at_toy_size_or_without_saying_so_on_other_gpus(tmp_path):
    goal = ("TAPE's step takes at most 1.15 times RoPE's", "step-7b-8k")
    toy = dataclasses.replace(H100, gpus=(), toy=True)
    assert rows(tmp_path, {"step-7b-8k": step()}, toy)[goal][1] == "at toy size"
    other = dataclasses.replace(H100, gpus=("NVIDIA A100-SXM4-80GB",))
    found = rows(tmp_path, {"step-7b-8k": step()}, other)
    assert found[goal][1] == "yes (a goal for H100 and H200)"
    assert found["step-7b-8k", "done, elsewhere"] == ["12"] and found["all-gpus", "needs two or more GPUs"] == [""]
    assert found["step-7b-8k", "rope"] == ["123,456", "50.0%", "49.0%", "1.0"]


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
    for part in SLICES:
        assert outcome(tmp_path, part.name)["status"] == "done", part.name
    for goal in ("every fused kernel compiles and is exact", "20 steps of TAPE and RoPE agree with the CPU's"):
        (row,) = [line for line in table.splitlines() if goal in line]
        assert row.endswith("| yes |")
