"""Run one part of `benchmarks.gpu_trial`, which starts this program for each part.

    python -m benchmarks.trial_parts NAME --output FILE.json [--seconds N] [--toy]

Results are written as they arrive. Without a GPU, a part runs at toy size on the CPU, where Triton
interprets kernels; its times are meaningless.
"""

import argparse
import faulthandler
import functools
import os
import signal
import threading
import time
from collections.abc import Callable

from benchmarks.environment import Record, add_record_arguments
from megatron_tape.command_line import Parser
from megatron_tape.io.versions import ROOT

# The names of the tests in tests/gpu/test_training_on_gpu.py.
_RUN_TEST = "test_a_run_has_the_losses_and_gradient_norms_of_the_cpu"
_GRADIENTS_TEST = "test_gradients_have_at_most_twice_the_error_of_plain_torch"
TRAINING_TESTS = [
    f"{_RUN_TEST}[tape fp32]",
    f"{_RUN_TEST}[tape bf16 ZeRO 2]",
    f"{_RUN_TEST}[rope fp32]",
    f"{_RUN_TEST}[rope bf16 ZeRO 2]",
    f"{_GRADIENTS_TEST}[gradients of tape-dtype0]",
    f"{_GRADIENTS_TEST}[gradients of tape-dtype1]",
]
"""The tests of tests/gpu/test_training_on_gpu.py that the part `training` runs."""
TOY_TRAINING_TESTS = [
    f"{_RUN_TEST}[tape bf16 ZeRO 2]",
    f"{_GRADIENTS_TEST}[gradients of tape packed-dtype0]",
]
# Each function below imports the modules that it needs. A module that cannot be imported then fails
# only the parts that need it.


def machine(record: Record, options: argparse.Namespace) -> None:
    """Measure the GPU's matmul rate and copy bandwidth, and record the C compiler's version."""
    import torch

    from benchmarks.timing import copy_bandwidth, device_here, matmul_peak
    from megatron_tape.io.versions import toolchain

    device = device_here()
    rates: dict = {"compiler": toolchain()["C compiler"]}
    rates["matmul_flops"] = matmul_peak(torch.bfloat16, device)
    rates["copy_bytes_per_second"] = copy_bandwidth(device)
    record.write(rates)


def compile_kernels(record: Record, options: argparse.Namespace) -> None:
    """Compile the kernels for the recipes' shapes in parallel. Later parts find them in Triton's
    cache.
    """
    from benchmarks import kernel_cases as kernels

    _run_cases(record, kernels.compile_case, kernels.kernel_cases(options.toy))


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
    if options.also == "flex":
        arguments.append("--flex")
    if options.toy:
        arguments.append("--toy")
    attention.main(arguments)


def step(
    shape: str, more_arguments: list[str], record: Record, options: argparse.Namespace
) -> None:
    """Time training steps of TAPE, RoPE and transformers' Llama.

    `shape` is a key of `measured_model.SHAPES`, and `more_arguments` are further options of
    `benchmarks.train_step`.
    """
    from benchmarks import train_step

    size = ["--shape", shape, "--repetitions", "3"]
    if options.toy:
        size = ["--shape", "toy", "--repetitions", "1"]
    train_step.main([*size, *more_arguments, *_record_arguments(options)])


def training(record: Record, options: argparse.Namespace) -> None:
    """Compare losses and gradients of 20 training steps of TAPE and RoPE on the GPU with those on
    the CPU.
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
    file = ROOT / "tests" / "gpu" / "test_training_on_gpu.py"
    names = TOY_TRAINING_TESTS if options.toy else TRAINING_TESTS
    tests = [f"{file}::{name}" for name in names]
    # Without the repository's pytest options, which need plug-ins that a GPU machine may lack.
    arguments = ["-o", "addopts=", "--tb=short", "-p", "no:cacheprovider", *tests]
    status = pytest.main(arguments, plugins=[OutcomeRecorder()])
    # Failed tests are in the record, as problems of the trial.
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {status!r}")


PARTS: dict[str, Callable[[Record, argparse.Namespace], None]] = {
    "machine": machine,
    "compile": compile_kernels,
    "correctness": correctness,
    "attention": attention,
    "step-155m": functools.partial(step, "155m-1k", ["--warmup", "2"]),
    "step-1.3b": functools.partial(step, "1.3b-4k", ["--warmup", "1", "--profile"]),
    "training": training,
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
