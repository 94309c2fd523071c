"""`benchmarks.gpu_trial` enforces time limits, preserves results, and reports problems in the
summary.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_wheels import write_wheel

from benchmarks import gpu_trial, trial_commands, trial_ladder, trial_parts
from benchmarks.gpu_trial import PARTS, Part, problems, summary
from benchmarks.kernel_cases import Case, run_cases
from megatron_tape.errors import UserError
from megatron_tape.model.names import MATRICES
from megatron_tape.planning.parameters import parameter_count
from pretrain import compare
from pretrain.comparison.planned_runs import make_plan

ROOT = Path(__file__).resolve().parents[2]

# Programs that replace parts. Their argument is the path of the part's results.
WORKS = "import json, sys; json.dump({'found': 1}, open(sys.argv[1], 'w')); print('measured')"
CRASHES = f"{WORKS}; import os; os.kill(os.getpid(), 11)"
HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])
json.dump({'child': child.pid}, open(sys.argv[1], 'w'))
time.sleep(99)
"""


@pytest.fixture
def trial(monkeypatch, tmp_path, capsys):
    """Return a function that runs a trial of parts (min_seconds, limit, program) and returns its
    results.
    """

    def run(parts, *options):
        monkeypatch.setattr(
            gpu_trial, "PARTS", [Part(name, "", *of[:2]) for name, of in parts.items()]
        )
        monkeypatch.setattr(
            gpu_trial.Trial,
            "command",
            lambda self, part, _: [
                sys.executable,
                "-c",
                parts[part.name][2],
                self.output / f"{part.name}.json",
            ],
        )
        status = gpu_trial.main([f"--output={tmp_path}", "--commit=abc", *options])
        return (
            status,
            json.loads((tmp_path / "results.json").read_text())["stages"],
            capsys.readouterr().out,
        )

    return run


def ends(pid):
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_part_that_hangs_or_crashes_costs_only_its_limit(trial, tmp_path):
    parts = {
        "hangs": (0, 6, HANGS),
        "crashes": (0, 9, CRASHES),
        "long": (60, 90, HANGS),
        "works": (0, 9, WORKS),
    }
    status, found, out = trial(parts, "--minutes=0.9")
    assert status == 1
    assert found["hangs"]["status"] == "out of time"
    assert found["hangs"]["seconds"] < 15
    ends(found["hangs"]["results"]["child"])
    assert (found["crashes"]["status"], found["crashes"]["reason"]) == ("failed", "SIGSEGV")
    assert found["crashes"]["results"] == {"found": 1}
    assert (tmp_path / "crashes.log").read_text() == "measured\n"
    assert found["long"]["status"] == "skipped"
    assert found["works"]["status"] == "done"
    assert "- hangs: out of time" in out
    assert "- crashes: failed (SIGSEGV)" in out
    assert "- long" not in out
    assert (tmp_path / "summary.md").read_text().strip() in out
    with pytest.raises(UserError, match="another trial"):
        trial(parts)


def test_a_trial_without_any_part_fails(trial):
    status, _, out = trial({"long": (60, 90, HANGS)}, "--minutes=0.5")
    assert status == 1
    assert "- nothing ran: it needs 60 s" in out


def test_wheels_are_installed_for_the_parts(trial, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels)
    uses = "import json, sys, toy; json.dump({'value': toy.VALUE}, open(sys.argv[1], 'w'))"
    status, found, _ = trial({"uses": (0, 30, uses)}, f"--wheels={wheels}")
    assert status == 0
    assert found["uses"]["results"] == {"value": 1}
    write_wheel(wheels, "other", "cp39-cp39-any")
    with pytest.raises(UserError, match="other-1.0-cp39-cp39-any.whl"):
        gpu_trial.main([f"--output={tmp_path / 'new'}", f"--wheels={wheels}"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_results_survive_if_the_trial_is_killed(tmp_path, number):
    program = f"""
import sys
from benchmarks import gpu_trial
watches = "from benchmarks.trial_parts import start_watchdog; start_watchdog(60)"  # as a part does
programs = {{"works": {WORKS!r}, "hangs": watches + {HANGS!r}, "later": {WORKS!r}}}
gpu_trial.PARTS = [gpu_trial.Part(name, "", 0, 60) for name in programs]
gpu_trial.Trial.command = lambda self, part, seconds: [
    sys.executable, "-c", programs[part.name], str(self.output / f"{{part.name}}.json")]
sys.argv = ["gpu_trial", "--output", {str(tmp_path)!r}]
gpu_trial.command_line.run(gpu_trial.main)
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env=variables, stdout=-1, stderr=-1, text=True
    )
    deadline = time.monotonic() + 60
    hangs = tmp_path / "hangs.json"
    while not (hangs.exists() and hangs.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    parent.communicate(timeout=30)
    assert parent.returncode == (-number if number == signal.SIGKILL else 128 + number)
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert [found[name]["status"] for name in found] == ["done", "interrupted", "not run"]
    ends(json.loads(hangs.read_text())["child"])


def test_without_packages_help_works_and_a_trial_is_refused(tmp_path):
    def without_packages(*options):
        command = [sys.executable, "-S", "-m", "benchmarks.gpu_trial", *options]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
        )

    assert "step-155m" in without_packages("--help").stdout
    done = without_packages(f"--output={tmp_path}")
    assert done.returncode == 2
    assert "lacks numpy, torch, triton" in done.stderr
    assert not any(tmp_path.iterdir())


def crash_or_hang(case):
    if case.name == "crashes":
        os._exit(11)
    if case.name == "hangs":
        time.sleep(99)
    raise ValueError("does not compile")


def test_a_kernel_that_crashes_or_hangs_affects_only_its_own_case(monkeypatch):
    monkeypatch.setattr("benchmarks.kernel_cases.CASE_SECONDS", 12.0)
    cases = [Case("2x32", name, 5) for name in ("crashes", "hangs", "fails")]
    found = {case["name"]: case for case in run_cases(crash_or_hang, cases)}
    assert found["crashes"]["error"] == "the process died with exit status 11"
    assert found["hangs"]["error"] == "took more than 12 s"
    assert found["fails"]["error"] == "ValueError: does not compile"


def test_every_part_of_the_trial_has_a_program():
    assert list(trial_parts.PARTS) == [part.name for part in PARTS]


def test_commands_that_fail_or_lack_a_package_do_not_stop_the_others(monkeypatch, tmp_path):
    def replace(name, error=None):
        def command(self):
            if error is not None:
                raise error

        monkeypatch.setattr(trial_commands.Commands, name, command)

    for name in ("prepare", "kill_and_continue", "evaluate", "extend"):
        replace(name)
    replace("train", SystemExit(2))
    replace("export", ModuleNotFoundError("no module x", name="tools.x"))
    replace("generate", ModuleNotFoundError("no module y", name="y"))
    outcomes = dict(trial_commands.run_commands(tmp_path, toy=True))
    assert outcomes.pop("train") == "failed: SystemExit: 2"
    assert outcomes.pop("export") == "failed: no module x"
    assert outcomes.pop("load, and generate with a cache") == "skipped: no module y"
    assert len(outcomes) == 4
    assert set(outcomes.values()) == {"passed"}


@pytest.fixture
def ladder(monkeypatch, tmp_path):
    """Return a function that trains the ladder without training anything, with the given minutes
    and a function that returns the seconds of a step, given a variant and its number of layers. It
    returns the results and the numbers of layers of the models that were trained.
    """
    trained = []

    def plan(options, overrides):
        settings = dict(text[2:].split("=", 1) for text in overrides)
        train = SimpleNamespace(steps=int(settings["train.steps"]))
        model = SimpleNamespace(num_layers=int(settings["model.num_layers"]))
        config = SimpleNamespace(train=train, model=model)
        return SimpleNamespace(
            runs=[
                SimpleNamespace(variant=SimpleNamespace(label=name), config=config, result=None)
                for name in options.encodings.split(",")
            ]
        )

    def train(arguments):
        layers = next(text for text in arguments if text.startswith("--model.num_layers="))
        trained.append(int(layers.partition("=")[2]))
        return 0

    def climb(minutes, step_seconds):
        monkeypatch.setattr(
            trial_ladder,
            "_step_seconds",
            lambda run, _: step_seconds(run.variant.label, run.config.model.num_layers),
        )
        record = []
        deadline = time.monotonic() + 60 * minutes
        results = SimpleNamespace(write=record.append)
        trial_ladder.train_ladder(tmp_path, trial_ladder.FULL, results, deadline)
        return record[-1], trained

    score = SimpleNamespace(metric="validation loss", value=3.0)
    finished = SimpleNamespace(runs=[SimpleNamespace(scores=[score])])
    monkeypatch.setattr(trial_ladder, "make_dataset", lambda *_: None)
    monkeypatch.setattr(trial_ladder, "initialize_distributed", lambda: None)
    monkeypatch.setattr(trial_ladder, "make_plan", plan)
    monkeypatch.setattr(trial_ladder.compare, "main", train)
    monkeypatch.setattr(trial_ladder, "read_comparison", lambda _: finished)
    return climb


def test_the_ladder_trains_the_largest_size_that_fits(ladder):
    """At 27 and 15 million parameters, four runs would take more than eight minutes."""
    found, trained = ladder(8, lambda name, layers: 0.1)
    assert found["size"] == "6 layers, 5 heads"
    assert found["steps"] == 609
    assert trained == [6] * 4
    assert set(found["tests"]) == set(trial_ladder.FULL.variants)
    assert found["tests"]["wall"] == "validation loss 3.0000"
    # Sizes are given up as soon as some of their variants take too long.
    measured = {size: list(times) for size, times in found["step_seconds"].items()}
    assert measured["8 layers, 8 heads"] == ["rope", "tape"]


def test_the_ladder_continues_without_variants_that_fail(ladder):
    def step_seconds(name, layers):
        if name == "wall":
            raise ValueError("no kernel")
        if name == "fox" and layers > 4:
            raise torch.OutOfMemoryError
        return 0.001

    found, trained = ladder(8, step_seconds)
    assert found["tests"]["wall"] == "failed: ValueError: no kernel"
    assert trained == [4] * 3
    assert set(found["runs"]) == {"rope", "tape", "fox"}


def test_the_ladder_trains_the_smallest_size_if_none_fits(ladder):
    found, trained = ladder(8, lambda name, layers: 60.0)
    assert found["size"] == trial_ladder.FULL.sizes[-1].name
    assert len(trained) == 4


def test_all_sizes_of_the_ladder_are_valid(tmp_path):
    """The steps are determined by the parameters that the models have."""
    setup = replace(trial_ladder.FULL, corpus=trial_ladder.TOY.corpus)
    trial_ladder.make_dataset(tmp_path, setup)
    for size in setup.sizes:
        command = trial_ladder.command(tmp_path, setup, size)
        plan = make_plan(*compare.read_command(command))
        assert [run.variant.label for run in plan.runs] == list(setup.variants)
        model = plan.runs[0].config.model
        assert parameter_count(model, kinds=set(MATRICES)) == setup.parameters(size)


@pytest.mark.parametrize(
    "status, outcome",
    [(0, "passed"), (99, "failed: an error"), (1, "failed: exit status 1: an error")],
)
def test_the_sanitizer_checks_one_kernel(tmp_path, status, outcome):
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho an error\nexit {status}\n'
    )
    program.chmod(0o755)
    assert trial_parts._sanitize(str(program), "racecheck", "swiglu", "_swiglu") == outcome
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("--tool=racecheck --kernel-name kns=_swiglu --error-exitcode=99 ")
    if status == 0:
        # The program that is checked.
        program = arguments.partition(" -c ")[2].strip()
        variables = {**os.environ, "TRITON_INTERPRET": "1"}
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, check=True)


def test_recorded_gpu_results_are_summarized():
    recorded = json.loads((ROOT / "benchmarks/results/h200/first/results.json").read_text())
    text = "\n".join(summary(recorded))
    assert "NVIDIA H200" in text
    assert "No GPU" not in text
    assert "| 12x64@1024 | tape triton |" in text
    assert "| position update |" in text


def test_the_summary_lists_wrong_results_and_the_ratio_of_steps():
    case = {"shape": "12x64", "length": 272, "seconds": 1.0}
    cases = [
        case | {"name": "attention", "worst": 0.5, "inexact": []},
        case | {"name": "tape torch", "worst": 3.0, "inexact": ["tensor 0 is off"]},
        case | {"name": "position update", "error": "the process died"},
    ]
    timed = {"shape": "12x64@1024", "auto": {}, "timed": {}, "no_time": ["tape flex"]}
    timed["rejected"] = {"flash_attn": "is not installed", "tape triton": "tensor 1 is off"}
    results = {
        "correctness": {"planned": 3, "cases": cases},
        "attention": {"results": [timed]},
        "machine": {"launch_seconds": {"torch": 3.2e-6, "triton": 7.5e-6}},
        "step-155m": {
            "models": {},
            "parity": {},
            "peak_flops": 1e15,
            "ratio_time": 1.2,
            "failed_profiles": {"tape": "ValueError: no range"},
            "batches": {
                "64x2": {"models": {}, "ratio_time": 1.15},
                "128x1": {"models": {}, "error": "OutOfMemoryError: no room"},
            },
        },
        "training": {"tests": {"tape": "passed", "rope": "failed: loss at step 3"}},
        "commands": {"tests": {"train": "passed", "export": "failed: no checkpoint"}},
        "sanitizer": {"tests": {"compute-sanitizer": "not installed"}},
    }
    parts = {
        name: {"status": "done", "seconds": 9.0, "results": found}
        for name, found in results.items()
    }
    record = {
        "trial": {"commit": "abc", "date": "today", "command": "python3 ..."},
        "stages": parts,
    }
    found = dict(problems(record))
    assert set(found) == {
        "correctness of 12x64 tape torch at 272 tokens",
        "correctness of 12x64 position update at 272 tokens",
        "12x64@1024 tape triton",
        "profile of tape in step-155m",
        "rope",
        "export",
    }
    text = "\n".join(summary(record))
    assert "Machine: unknown" in text
    assert "- rope: failed: loss at step 3" in text
    assert "| **3.00** |" in text
    assert "step-155m: TAPE's step takes 1.200 times RoPE's." in text
    assert "step-155m 64x2: TAPE's step takes 1.150 times RoPE's." in text
    assert "step-155m 128x1: OutOfMemoryError: no room" in text
    assert "| export | failed: no checkpoint |" in text
    assert "| compute-sanitizer | not installed |" in text


@pytest.mark.slow
def test_without_a_gpu_every_part_runs_at_toy_size(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_trial",
        "--toy",
        "--minutes=9",
        f"--output={tmp_path}",
    ]
    done = subprocess.run(
        [*command, "--commit=abc"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    parts = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert list(parts) == [part.name for part in PARTS]
    assert {part["status"] for part in parts.values()} == {"done"}
    found = {name: part["results"] for name, part in parts.items()}
    assert {results["environment"]["commit"] for results in found.values()} == {"abc"}
    assert found["machine"]["matmul_flops"] > 0
    assert found["machine"]["copy_bytes_per_second"] > 0
    assert min(found["machine"]["launch_seconds"].values()) > 0
    for name in ("compile", "correctness"):
        cases = found[name]["cases"]
        assert len(cases) == found[name]["planned"]
        assert all("error" not in case for case in cases)
    names = {case["name"] for case in found["correctness"]["cases"]}
    assert {"tape torch", "rope torch", "attention", "position update", "swiglu"} < names
    (result,) = found["attention"]["results"]
    assert result["timed"]["forward+backward"]["tape triton"] == {"interpreted": True}
    assert result["of_rope"]["forward+backward"]["ratio"] > 0
    rivals = {"transformers", "transformers compiled"}
    assert set(found["step-155m"]["models"]) == {"tape", "rope", *rivals}
    assert set(found["step-1.3b"]["models"]) == {"tape", "rope", "rope tiled"}
    (batch,) = found["step-155m"]["batches"].values()
    for results in (found["step-155m"], found["step-1.3b"], batch):
        assert results["ratio_time"] > 0
        assert {"tape", "rope"} <= set(results["profiles"])
    for name, number in (("training", 2), ("commands", 7)):
        assert set(found[name]["tests"].values()) == {"passed"}
        assert len(found[name]["tests"]) == number
    assert found["sanitizer"]["tests"]
    assert set(found["ladder"]["runs"]) == {"rope", "fox"}
    assert found["ladder"]["runs"]["fox"]["validation loss"] > 0
    assert all((tmp_path / f"step-1.3b-{name}.trace.json.gz").exists() for name in ("tape", "rope"))
    lines = (tmp_path / "summary.md").read_text()
    assert "No GPU: toy size" in lines
    assert "No problems were found." in lines
    assert "| step-155m 4x1: ms of a step | rope | tape | tape - rope |" in lines
    assert lines.strip() in done.stdout
