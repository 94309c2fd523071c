"""`benchmarks.gpu_trial`: stages end within their limits, results survive, and the summary says what was learned."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from test_wheels import write_wheel

from benchmarks import attention, gpu_trial, trial_stages
from benchmarks.gpu_trial import STAGES, Stage
from benchmarks.kernel_cases import Case, run_cases
from benchmarks.timing import TimeLimit
from benchmarks.trial_summary import learned, problems, summary

ROOT = Path(__file__).resolve().parents[2]

# Programs in place of stages, whose argument is the file of their results.
WORKS = "import json, sys; json.dump({'found': 1}, open(sys.argv[1], 'w')); print('measured')"
CRASHES = f"{WORKS}; import os; os.kill(os.getpid(), 11)"
HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])
json.dump({'child': child.pid}, open(sys.argv[1], 'w'))
time.sleep(99)
"""


def of_programs(programs):
    """Return what stands in for `Trial.command`."""
    return lambda self, stage, _: [sys.executable, "-c", programs[stage.name], str(self.work / f"{stage.name}.json")]


@pytest.fixture
def trial(monkeypatch, tmp_path, capsys):
    """Return a function that runs a trial of stages, given as (least, limit, program); and returns what it wrote."""

    def run(stages, *options):
        monkeypatch.setattr(gpu_trial, "STAGES", [Stage(name, "", *of[:2]) for name, of in stages.items()])
        monkeypatch.setattr(gpu_trial.Trial, "command", of_programs({name: of[2] for name, of in stages.items()}))
        monkeypatch.setattr(gpu_trial.signal, "signal", lambda *_: None)
        status = gpu_trial.main([f"--output={tmp_path}", "--commit=abc", *options])
        return status, json.loads((tmp_path / "results.json").read_text())["stages"], capsys.readouterr().out

    return run


def ends(pid):
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stage_that_hangs_or_crashes_costs_only_its_limit(trial, tmp_path):
    stages = {"hangs": (0, 6, HANGS), "crashes": (0, 9, CRASHES), "fails": (0, 9, "1 / 0"), "works": (0, 9, WORKS)}
    status, found, out = trial(stages)
    assert status == 1 and found["hangs"]["status"] == "out of time" and found["hangs"]["seconds"] < 15
    ends(found["hangs"]["results"]["child"])
    assert (found["crashes"]["status"], found["crashes"]["reason"]) == ("failed", "SIGSEGV")
    assert found["crashes"]["log"] == "measured\n" and found["crashes"]["results"] == {"found": 1}
    assert found["fails"]["reason"] == "exit status 1: ZeroDivisionError: division by zero"
    assert found["works"]["status"] == "done" and found["works"]["results"] == {"found": 1}
    assert "Wrong: hangs: out of time (it was ended after 6 s); crashes: failed (SIGSEGV)" in out
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "summary.md", "trial.tar.gz"}
    with tarfile.open(tmp_path / "trial.tar.gz") as archive:
        assert {f"trial/{name}.{kind}" for name in stages for kind in ("json", "log")} == {
            *archive.getnames(), "trial/fails.json",
        } - {"trial/results.json", "trial/summary.md"}  # fmt: skip
        for name in ("results.json", "summary.md"):
            assert archive.extractfile(f"trial/{name}").read() == (tmp_path / name).read_bytes()
            assert archive.getmember(f"trial/{name}").mtime > 1e9
    whole = json.loads((tmp_path / "results.json").read_text())
    assert len(whole["problems"]) == 3 and whole["toy"] is None and whole["seconds"] > 2
    with pytest.raises(SystemExit, match="2"):
        trial(stages)
    assert json.loads((tmp_path / "results.json").read_text()) == whole


def test_what_does_not_fit_into_the_time_left_is_skipped_and_the_next_that_fits_runs(trial):
    status, found, _ = trial({"long": (60, 90, HANGS), "short": (1, 9, WORKS)}, "--minutes=0.5")
    assert status == 0 and found["short"]["status"] == "done"
    assert found["long"]["status"] == "skipped" and found["long"]["reason"].startswith("it needs 60 s")


def test_a_trial_in_which_nothing_ran_is_not_a_success(trial):
    status, _, out = trial({"long": (60, 90, HANGS)}, "--minutes=0.5")
    assert status == 1 and "2. Wrong: nothing ran: it needs 60 s" in out


def test_wheels_are_installed_for_the_stages(trial, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels)
    uses = "import json, sys, toy; json.dump({'file': toy.__file__}, open(sys.argv[1], 'w'))"
    status, found, _ = trial({"uses": (0, 30, uses)}, f"--wheels={wheels}")
    assert status == 0 and found["uses"]["results"]["file"].endswith("packages/toy.py")
    write_wheel(wheels, "other", "cp39-cp39-any")
    with pytest.raises(SystemExit, match="2"):
        gpu_trial.main([f"--output={tmp_path / 'new'}", f"--wheels={wheels}"])
    assert re.search(r"for Python 3\.\d+: ERROR: other-1.0-cp39-cp39-any.whl is not", capsys.readouterr().err)


@pytest.mark.parametrize(
    "option", ["--minutes=0", "--minutes=601", "--text=/no/such/file", "--output=/dev/null", "--wheels=/no/such/folder"]
)
def test_what_cannot_work_is_refused_at_once(tmp_path, option, capsys, monkeypatch):
    monkeypatch.setattr(gpu_trial.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        gpu_trial.main([f"--output={tmp_path}", option])
    assert option.split("=")[1] in capsys.readouterr().err and not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_results_exist_if_the_trial_is_ended_in_the_middle(tmp_path, number):
    program = f"""
import sys
from benchmarks import gpu_trial
watches = "from benchmarks.trial_stages import watch; watch(60)"  # as a stage does
programs = {{"works": {WORKS!r}, "hangs": watches + {HANGS!r}, "later": {WORKS!r}}}
gpu_trial.STAGES = [gpu_trial.Stage(name, "", 0, 60) for name in programs]
gpu_trial.MERGED_EVERY = 0.1
gpu_trial.Trial.command = lambda self, stage, seconds: [
    sys.executable, "-c", programs[stage.name], str(self.work / f"{{stage.name}}.json")]
sys.exit(gpu_trial.main(["--output", {str(tmp_path)!r}]))
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", program], env=variables, stdout=-1, stderr=-1, text=True)

    def stages():
        file = tmp_path / "results.json"
        return json.loads(file.read_text())["stages"] if file.exists() else {}

    deadline = time.monotonic() + 60
    while "results" not in stages().get("hangs", {}):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    out, err = parent.communicate(timeout=30)
    assert parent.returncode == (-number if number == signal.SIGKILL else 128 + number) and not err
    found = stages()
    assert [found[name]["status"] for name in found] == ["done", "interrupted", "not run"]
    assert ("interrupted by the user" in out) == (number == signal.SIGINT)
    assert (tmp_path / "summary.md").exists() and (tmp_path / "trial.tar.gz").exists()
    ends(found["hangs"]["results"]["child"])


def test_it_starts_without_any_installed_package():
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_trial", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0 and "step-155m" in done.stdout


def test_a_python_without_packages_is_refused(tmp_path):
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_trial", f"--output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 2 and "lacks numpy, torch, triton" in done.stderr and "make install" in done.stderr
    assert not any(tmp_path.iterdir())


def crash_or_hang(case):
    if case.name == "crashes":
        os._exit(11)
    if case.name == "hangs":
        time.sleep(99)
    raise ValueError("does not compile")


def test_a_kernel_that_crashes_or_hangs_ends_only_its_own_process(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.kernel_cases.CASE_SECONDS", 12.0)
    cases = [Case("2x32", name, 5) for name in ("crashes", "hangs", "fails")]
    found = {case["name"]: case for case in run_cases(crash_or_hang, cases)}
    assert found["crashes"]["error"] == "the process died with exit status 11"
    assert found["hangs"]["error"] == "took more than 12 s"
    assert found["fails"]["error"] == "ValueError: does not compile"
    checked = tmp_path / "correctness.json"
    cases = [found["crashes"] | {"name": "attention"}, found["hangs"] | {"name": "rope torch"}]
    checked.write_text(json.dumps({"cases": [*cases, found["fails"] | {"name": "tape tiled"}]}))
    assert trial_stages._crashed(checked) == {"triton", "torch"}


def test_attention_is_recorded_as_it_is_timed_and_what_had_no_time_is_not_wrong():
    arguments = attention.parse(["--toy", "--without", "triton"])

    def measured(minutes):
        return [json.dumps(each) for each in attention.measure(attention.TOY, arguments, TimeLimit(minutes))]

    *_, first, last = map(json.loads, measured(5))
    assert (len(first["timed"]), len(last["timed"])) == (1, 2) and set(last["auto"]) == {"tape", "rope"}
    late = json.loads(measured(1e-9)[-1])
    assert "tape torch" in late["no_time"]
    found = {"attention": {"status": "done", "seconds": 1.0, "results": {"results": [late]}}}
    assert problems(record() | {"stages": found}) == []
    assert "tape torch had no time left" in learned(record() | {"stages": found})[4]


def record():
    """Return what a trial on a GPU might find."""
    environment = {
        "gpus": ["NVIDIA H100"], "cpu": "a CPU", "python": "3.12.3", "packages": {"torch": "2.11", "triton": "3.6"},
        "gpu_software": {"cudnn": "cuDNN 91002"},
    }  # fmt: skip
    kernel = {"shape": "12x64", "length": 272, "seconds": 1.0}
    cases = [
        kernel | {"name": "attention", "worst": 0.5, "inexact": []},
        kernel | {"name": "tape torch", "worst": 3.0, "inexact": ["tensor 0 is off"]},
        kernel | {"name": "position update", "error": "the process died with exit status -11"},
    ]
    both = {
        "tape torch": {"seconds": 2e-3, "tflops": 500.0, "ratio": 2.0},
        "tape triton": {"seconds": 3e-3, "tflops": 333.0, "ratio": 3.0},
        "rope torch": {"seconds": 1e-3, "tflops": 700.0, "ratio": 1.0},
    }
    timed = {
        "shape": "12x64@1024",
        "auto": {"tape": "tape triton", "rope": "rope torch"},
        "timed": {"forward": {}, "forward+backward": both},
        "of_rope": {"forward+backward": {"ratio": 2.0, "tape": "tape torch", "rope": "rope torch"}},
        "rejected": {"flash_attn": "is not installed", "tape triton": "1024 tokens: tensor 1 is off"},
        "no_time": ["tape flex"],
    }
    model = {"attention": "torch", "seconds_per_step": 0.5, "tokens_per_second": 2e5, "mfu": 0.4, "of_matmul": 0.5}
    step = {
        "models": {"tape": model, "rope": model | {"mfu": 0.45}, "transformers": model},
        "ratio_time": 1.2, "fastest_rival": "transformers", "ratios_to_fastest_rival": {"rope": 0.9},
    }  # fmt: skip
    results = {
        "machine": {
            "environment": environment,
            "arguments": {"toy": False},
            "matmul_flops": 7.9e14,
            "copy_bytes_per_second": 3e12,
        },
        "compile": {"planned": 3, "cases": cases},
        "correctness": {"planned": 3, "cases": cases},
        "attention": {"results": [timed]},
        "step-155m": step,
        "training": {"tests": {"tape": "passed", "rope": "failed: loss at step 3", "other": "skipped: no GPU"}},
        "pretraining": {
            "models": {
                "tape": {"curve": [{"step": 5, "validation_loss": 2.5}], "lengths": {"1024": 2.0, "2048": 2.5}},
                "rope": {"curve": [], "lengths": {}},
            }
        },
    }
    stages = {name: {"status": "done", "seconds": 9.0, "results": found} for name, found in results.items()}
    stages["step-1.3b"] = {"status": "out of time", "seconds": 180.0, "reason": "it was ended after 180 s"}
    return {"trial": {"commit": "abc", "date": "today", "command": "python3 ..."}, "stages": stages}


def test_ten_lines_say_what_was_learned():
    lines = learned(record())
    assert len(lines) == 10
    machine, wrong, kernels, correct, timed, other, _, small, large, training = lines
    assert "NVIDIA H100" in machine and "matrix product 790.0 TFLOP/s, copy 3.00 TB/s" in machine
    case = "12x64 position update at 272 tokens"
    same = f"compile of {case}, correctness of {case}: the process died"
    for problem in ("step-1.3b: out of time", same, "tape triton: 1024 tokens", "rope: failed: loss"):
        assert problem in wrong
    assert "flash_attn" not in wrong and "flex" not in wrong and kernels.startswith("Kernels: 1 of 3")
    assert "1 of 3 cases are as exact as plain torch; not these: 12x64 tape torch" in correct
    assert timed == (
        "Attention 12x64@1024, forward + backward: fastest for TAPE is torch (2.000 ms), for RoPE torch (1.000 ms): "
        "2.00 times; auto takes triton (3.000 ms) and torch (1.000 ms)"
    )
    assert other.startswith("Attention 16x128@4096: not measured")
    assert large == "A step of 1.3B at 4,096 tokens: not measured: stage out of time (it was ended after 180 s)"
    assert "TAPE takes 1.200 times as long as RoPE (goal 1.10: missed); RoPE 0.900 times transformers" in small
    assert "MFU 40.0%" in small and training.startswith("Training: 1 of 2 tests agree with the CPU; 1 skipped (no GPU)")
    assert "tape 2.000 / 2.500" in training
    table = "\n".join(summary(record()))
    assert "No GPU" not in table and "unknown" not in table and "| 12x64@1024 | tape flex | had no time left" in table
    assert "| position update | **fails** |" in table
    assert "| 12x64@1024 | tape triton |  | 3.000, 333.0, 3.00 |" in table


def test_goals_of_the_larger_model_are_judged_on_a_gpu_only():
    found = record()
    found["stages"]["step-1.3b"] = found["stages"]["step-155m"]
    large = learned(found)[8]
    assert "MFU 40.0% (goal 40%: met)" in large and "MFU 45.0% (goal 45%: met)" in large
    found["stages"]["machine"]["results"]["arguments"]["toy"] = True
    lines = "\n".join(summary(found))
    assert "goal" not in lines and "155M" not in lines and "**No GPU: toy size" in lines


def test_a_summary_of_nothing_says_so():
    nothing = record() | {"stages": {"machine": {"status": "failed", "seconds": 1.0}}}
    assert len(learned(nothing)) == 10 and problems(nothing) == ["machine: failed (no reason is known)"]
    assert "**It is unknown which machine this was.**" in "\n".join(summary(nothing))


@pytest.mark.slow
def test_without_a_gpu_every_stage_runs_at_toy_size(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_trial", "--toy", "--minutes=9", f"--output={tmp_path}"]
    started = time.monotonic()
    done = subprocess.run([*command, "--commit=abc"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert time.monotonic() - started < 240  # 80 s on two idle cores
    stages = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert list(stages) == [stage.name for stage in STAGES if stage.default]
    assert {stage["status"] for stage in stages.values()} == {"done"}
    found = {name: stage["results"] for name, stage in stages.items()}
    assert {results["environment"]["commit"] for results in found.values()} == {"abc"}
    assert found["machine"]["matmul_flops"] > 0 and found["machine"]["copy_bytes_per_second"] > 0
    for name, ours in (("compile", 7), ("correctness", 7)):
        cases = found[name]["cases"]
        assert len(cases) == found[name]["planned"] >= ours and all("error" not in case for case in cases)
    assert {"tape torch", "rope torch"} < {case["name"] for case in found["correctness"]["cases"]}
    (result,) = found["attention"]["results"]
    assert result["auto"] == {"tape": "tape tiled", "rope": "rope torch"}
    assert result["timed"]["forward+backward"]["tape triton"] == {"interpreted": True}
    assert result["of_rope"]["forward+backward"]["ratio"] > 0
    for name in ("step-155m", "step-1.3b"):
        assert set(found[name]["models"]) == {"tape", "rope", "transformers"} and found[name]["ratio_time"] > 0
    assert set(found["training"]["tests"].values()) == {"passed"} and len(found["training"]["tests"]) == 2
    with tarfile.open(tmp_path / "trial.tar.gz") as archive:
        assert {f"trial/step-1.3b-{name}.trace.json.gz" for name in ("tape", "rope")} < set(archive.getnames())
    lines = (tmp_path / "summary.md").read_text()
    assert "No GPU: toy size" in lines and "2. Nothing that ran was wrong." in lines and lines.strip() in done.stdout
