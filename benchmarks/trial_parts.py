"""Run one part of `benchmarks.gpu_trial`, which starts this program for each part.

    python -m benchmarks.trial_parts NAME --output FILE.json [--seconds N] [--toy]

Results are written as they arrive. Without a GPU, a part runs at toy size on the CPU, where Triton
interprets kernels; its times are meaningless.
"""

import argparse
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.environment import Record, add_record_arguments
from megatron_tape.command_line import Parser
from megatron_tape.io.versions import ROOT

_TRAINING_FILE = "tests/gpu/test_training_on_gpu.py"
_RUN_TEST = f"{_TRAINING_FILE}::test_a_run_has_the_losses_and_gradient_norms_of_the_cpu"
_GRADIENTS_TEST = f"{_TRAINING_FILE}::test_gradients_have_at_most_twice_the_error_of_plain_torch"
TRAINING_TESTS = [
    f"{_RUN_TEST}[tape fp32]",
    f"{_RUN_TEST}[tape bf16 ZeRO 2]",
    f"{_RUN_TEST}[rope fp32]",
    f"{_RUN_TEST}[rope bf16 ZeRO 2]",
    f"{_GRADIENTS_TEST}[gradients of tape-dtype0]",
    f"{_GRADIENTS_TEST}[gradients of tape-dtype1]",
]
"""The tests that the part `training` runs."""
TOY_TRAINING_TESTS = [
    f"{_RUN_TEST}[tape bf16 ZeRO 2]",
    f"{_GRADIENTS_TEST}[gradients of tape packed-dtype0]",
]
TWO_RANKS_TESTS = "tests/gpu/test_two_ranks.py"
"""The tests that the part `two-ranks` runs."""

CHANGED = ("position update", "rotat", "join", "split", "tape torch", "tape flash_attn")
"""Beginnings of the names of cases that are compiled and checked first: kernels that have changed
since the last trial, and libraries whose inputs or gradients such kernels prepare.
"""
ATTENTION_SHAPES = ("12x64@1024", "16x128@4096", "32x128@8192", "32/8x128@8192")
"""The shapes of the part `attention`; in the last one, query heads share keys and values."""

# racecheck finds races in shared memory, memcheck accesses outside of tensors.
SANITIZED = (
    ("racecheck", "position update", "_update"),
    ("racecheck", "attention", "_backward"),
    ("memcheck", "attention", "_"),
)
"""The checks of the part `sanitizer`: a tool of compute-sanitizer, the name of a case of
`benchmarks.kernel_cases`, and a substring of the names of the kernels that the tool checks.
"""
SANITIZED_SHAPE = "12x64"
SANITIZER_FOUND = 99
"""Exit status of compute-sanitizer if it has found an error."""

# Each function below imports the modules that it needs. A module that cannot be imported then fails
# only the parts that need it.


def machine(record: Record, options: argparse.Namespace) -> None:
    """Measure the matmul rate, the copy bandwidth and the host's time for a launch, and record the
    C compiler's version.
    """
    import torch

    from benchmarks.launches import launch_seconds
    from benchmarks.timing import copy_bandwidth, device_here, matmul_peak
    from megatron_tape.io.versions import toolchain

    device = device_here()
    rates: dict = {"compiler": toolchain()["C compiler"]}
    rates["matmul_flops"] = matmul_peak(torch.bfloat16, device)
    rates["copy_bytes_per_second"] = copy_bandwidth(device)
    # In case Triton cannot compile a kernel.
    record.write(rates)
    # Interpreting a kernel takes a hundred times as long as launching it.
    rates["launch_seconds"] = launch_seconds(device, launches=20 if options.toy else 2000)
    record.write(rates)


def compile_kernels(record: Record, options: argparse.Namespace) -> None:
    """Compile the kernels for the recipes' shapes in parallel. Later parts find them in Triton's
    cache.
    """
    from benchmarks import kernel_cases as kernels

    cases = kernels.kernel_cases(options.toy)
    # Without a GPU, nothing is compiled, and `correctness` runs the same cases.
    if options.toy:
        cases = cases[:2]
    _run_cases(record, kernels.compile_case, cases)


def correctness(record: Record, options: argparse.Namespace) -> None:
    """Compare outputs and gradients of the same kernels, and of available library kernels, with
    float64.
    """
    from benchmarks import kernel_cases as kernels

    cases = [*kernels.kernel_cases(options.toy), *kernels.library_cases(options.toy)]
    _run_cases(record, kernels.check_case, cases)


def _run_cases(record: Record, function: Callable, cases: list) -> None:
    """Call `function` for each case in its own process. Record and print each result at once."""
    from benchmarks.kernel_cases import run_cases

    # The changed kernels first, since False sorts before True.
    cases = sorted(cases, key=lambda case: not case.name.startswith(CHANGED))
    results = []
    for result in run_cases(function, cases):
        results.append(result)
        record.write({"planned": len(cases), "cases": results})
        # A failed case has an `error`, and a checked case the list `inexact` of wrong results.
        outcome = result.get("error") or "; ".join(result.get("inexact", [])) or "passed"
        case = f"{result['shape']} {result['name']}"
        print(f"{len(results)} of {len(cases)}: {case}: {outcome}", flush=True)


def attention(record: Record, options: argparse.Namespace) -> None:
    """Time every available attention backend with TAPE and RoPE."""
    from benchmarks import attention

    # No check or shape starts in the last ten seconds.
    seconds = max(1.0, options.seconds - 10)
    arguments = ["--minutes", str(seconds / 60), *_record_arguments(options)]
    if not options.toy:
        arguments += ["--shapes", *ATTENTION_SHAPES]
    if options.also == "flex":
        arguments.append("--flex")
    if options.toy:
        arguments.append("--toy")
    attention.main(arguments)


def step_155m(record: Record, options: argparse.Namespace) -> None:
    """Time and profile training steps of TAPE and RoPE with three micro-batch sizes. Time those of
    transformers' Llama, with and without torch.compile.
    """
    # All batches have the same tokens as the shape's own one, 32x4.
    batches = ["64x2", "128x1"]
    if options.toy:
        batches = ["4x1"]
    _step(options, "155m-1k", ["--warmup=2", "--compile-baseline", "--more-batches", *batches])


def step_1b(record: Record, options: argparse.Namespace) -> None:
    """Time and profile training steps of TAPE and RoPE, and of RoPE with torch's attention and with
    FlashAttention. Time those of transformers' Llama.
    """
    more_arguments = ["--warmup=1", "--rope-backends", "flash_attn", "torch"]
    if options.toy:
        # The part `step-155m` measures transformers' Llama.
        more_arguments = ["--warmup=1", "--rope-backends", "tiled", "--against"]
    _step(options, "1.3b-4k", more_arguments)


def _step(options: argparse.Namespace, shape: str, more_arguments: list[str]) -> None:
    """Run `benchmarks.train_step` with a key of `measured_model.SHAPES` and further options."""
    from benchmarks import train_step

    size = ["--shape", shape, "--repetitions", "3"]
    if options.toy:
        size = ["--shape", "toy", "--repetitions", "1"]
    train_step.main([*size, "--profile", *more_arguments, *_record_arguments(options)])


def training(record: Record, options: argparse.Namespace) -> None:
    """Compare losses and gradients of 20 training steps of TAPE and RoPE on the GPU with those on
    the CPU.
    """
    tests = TRAINING_TESTS
    if options.toy:
        tests = TOY_TRAINING_TESTS
    _run_tests(record, options, tests)


def two_ranks(record: Record, options: argparse.Namespace) -> None:
    """Train on two ranks, which share a single GPU, and compare with one rank. At toy size, only
    collect these tests.
    """
    if options.toy:
        # Running them would take as long as half of the other parts.
        record.write({"tests": {TWO_RANKS_TESTS: "not run; `make test` runs it without a GPU"}})
        _run_tests(record, options, [TWO_RANKS_TESTS], "--collect-only")
    else:
        _run_tests(record, options, [TWO_RANKS_TESTS])


def _run_tests(
    record: Record, options: argparse.Namespace, tests: list[str], *more_arguments: str
) -> None:
    """Run tests with pytest, and record the outcome of each as soon as it is known.

    `tests` are files of the repository, or tests as pytest names them. `more_arguments` are further
    options of pytest.
    """
    import pytest

    outcomes: dict[str, str] = {}

    class OutcomeRecorder:
        """A pytest plugin that records the outcome of each test."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            """Record an outcome. pytest calls this after each phase of a test."""
            # The phases are setup, call and teardown. Setup and teardown matter only if they fail.
            if report.passed and report.when != "call":
                return
            # The test's name, which follows its file.
            test = report.nodeid.partition("::")[2]
            outcomes[test] = report.outcome
            if not report.passed:
                # The end of the text has the error, or the reason of a skip.
                words = str(report.longrepr).split()
                outcomes[test] += f": {' '.join(words)[-300:]}"
            record.write({"tests": outcomes})

    os.environ["TESTS_ON"] = "cpu" if options.toy else "gpu"
    # Without the repository's pytest options, which need plug-ins that a GPU machine may lack.
    arguments = ["-o", "addopts=", "--tb=short", "-p", "no:cacheprovider", *more_arguments]
    arguments += [str(ROOT / test) for test in tests]
    status = pytest.main(arguments, plugins=[OutcomeRecorder()])
    # Failed tests are in the record, as problems of the trial.
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {status!r}")


def commands(record: Record, options: argparse.Namespace) -> None:
    """Run the project's commands at small size: train, kill and continue, evaluate, extend, export,
    load and generate.
    """
    from benchmarks.trial_commands import run_commands

    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="gpu-trial-commands-") as folder:
        for name, outcome in run_commands(Path(folder), options.toy):
            outcomes[name] = outcome
            record.write({"tests": outcomes})
            print(f"{name}: {outcome}", flush=True)


def ladder(record: Record, options: argparse.Namespace) -> None:
    """Train the largest model that the time allows with RoPE, TAPE, Wall and FoX."""
    from benchmarks.environment import quiet_libraries
    from benchmarks.trial_ladder import FULL, TOY, train_ladder

    # The last seconds are for writing the record.
    deadline = time.monotonic() + options.seconds - 10
    quiet_libraries()
    setup = TOY if options.toy else FULL
    with tempfile.TemporaryDirectory(prefix="gpu-trial-ladder-") as folder:
        train_ladder(Path(folder), setup, record, deadline)


def sanitizer(record: Record, options: argparse.Namespace) -> None:
    """Run kernels that use shared memory under compute-sanitizer, if it is installed and there is a
    GPU.
    """
    toolkit = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    program = shutil.which("compute-sanitizer", path=toolkit)
    if program is None or options.toy:
        reason = "not installed" if program is None else "needs a GPU"
        record.write({"tests": {"compute-sanitizer": reason}})
        return

    outcomes = {}
    # The checks run at the same time, since each spends most of its time importing torch.
    with ThreadPoolExecutor(len(SANITIZED)) as threads:
        results = [threads.submit(_sanitize, program, *check) for check in SANITIZED]
        for (tool, case, _), result in zip(SANITIZED, results):
            outcomes[f"{tool} of {case}"] = result.result()
            record.write({"tests": outcomes})


def _sanitize(program: str, tool: str, case: str, kernels: str) -> str:
    """Return the outcome of a case under a tool of compute-sanitizer: "passed", or "failed: ..."
    with the end of the output.

    `program` is the path of compute-sanitizer; the other arguments are those of `SANITIZED`.
    """
    run_case = (
        "from benchmarks.kernel_cases import LENGTH, Case, compile_case;"
        f" compile_case(Case({SANITIZED_SHAPE!r}, {case!r}, LENGTH))"
    )
    command = [program, f"--tool={tool}", "--kernel-name", f"kns={kernels}"]
    command += [f"--error-exitcode={SANITIZER_FOUND}", sys.executable, "-c", run_case]
    done = subprocess.run(
        command,
        cwd=ROOT,
        # With torch's cache, one allocation holds many tensors, and memcheck would not find an
        # access beyond a tensor.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == 0:
        return "passed"
    words = " ".join(done.stdout.split())
    if done.returncode == SANITIZER_FOUND:
        return f"failed: {words[-300:]}"
    return f"failed: exit status {done.returncode}: {words[-300:]}"


PARTS: dict[str, Callable[[Record, argparse.Namespace], None]] = {
    "machine": machine,
    "step-155m": step_155m,
    "compile": compile_kernels,
    "correctness": correctness,
    "step-1.3b": step_1b,
    "attention": attention,
    "training": training,
    "two-ranks": two_ranks,
    "commands": commands,
    "sanitizer": sanitizer,
    "ladder": ladder,
}


def _record_arguments(options: argparse.Namespace) -> list[str]:
    """Return the options --output and --commit for the program that measures a part."""
    arguments = ["--output", str(options.output)]
    if options.commit:
        arguments += ["--commit", options.commit]
    return arguments


def start_watchdog(seconds: float) -> None:
    """Start a thread that kills this process and its group when the parent ends or after
    `seconds`.

    The parent stops this process in time, unless it is killed itself.
    """
    parent = os.getppid()
    deadline = time.monotonic() + seconds

    def kill_when_due() -> None:
        """Wait until the parent ends or the time is over, and kill this process and its group."""
        # A process whose parent ends gets another parent.
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.2)
        # Under gpu_trial, each part leads a process group. Otherwise, the group is the caller's.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=kill_when_due, daemon=True).start()


def main(argv: list[str] | None = None) -> None:
    """Run the part that the command line names."""
    parser = Parser(description=__doc__)
    parser.add_argument("part", choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    seconds = "time limit in seconds (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=600.0, help=seconds)
    toy = "run at toy size on the CPU, even if there is a GPU"
    parser.add_argument("--toy", action="store_true", help=toy)
    parser.add_argument("--also", choices=["flex"], help="also time FlexAttention")
    add_record_arguments(parser)
    options = parser.parse_args(argv)
    # The trial stops a part at its limit. The watchdog ends it if the trial itself was killed.
    start_watchdog(options.seconds + 10)
    # Print the stacks of a part that crashes, or that still runs shortly before its limit.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, options.seconds - 2))
    # Set before torch is imported, which reads the variable.
    if options.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    options.toy = options.toy or not torch.cuda.is_available()
    if options.toy:
        os.environ |= {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        torch.set_num_threads(1)
        print("no GPU: running at toy size on the CPU", flush=True)
    record = Record(options)
    record.write({})  # records the environment even if the part fails
    PARTS[options.part](record, options)


if __name__ == "__main__":
    main()
