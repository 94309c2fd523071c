"""20 training steps of TAPE and RoPE on a GPU have the losses, gradient norms and gradients of a
CPU.

A small model learns real text with `pretrain.train`: Megatron's layers and datasets, DeepSpeed's
ZeRO and, on the GPU (`TESTS_ON=gpu`), the fused kernels, which TAPE's runs select by name. In fp32,
the GPU must reproduce the CPU's figures; in bf16, under ZeRO 2 and 3, with packed documents and
with recomputation, they must be close. Without a GPU, Triton interprets the kernels, and two steps
are taken. The most important of these tests form a part of `benchmarks.gpu_trial`.
"""

import math
import statistics

import pytest
import torch
import training_runs
from training_runs import BACKEND, GRADIENTS, ON_GPU, RUNS, SIZE, Side

pytest.importorskip("megatron.core")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gpu

QUICK = ("tape bf16 ZeRO 2", "gradients of tape packed")
"""The cases that are not marked slow without a GPU."""
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Relative error of a gradient that is always allowed, as in `ops.parity`."""
PLAIN = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""Maximum relative error of plain torch on the device: far above rounding, far below a wrong
gradient's.
"""


def slow(name):
    return pytest.param(name, marks=[] if ON_GPU or name in QUICK else pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_tool):
    folder = tmp_path_factory.mktemp("training")
    training_runs.prepare(folder, run_tool)
    return folder


@pytest.fixture(scope="module")
def expected(folder, request):
    """Return a function for results on the CPU, which another process computes in the order of the
    tests.
    """
    names = [
        item.callspec.params.get("name")
        for item in request.session.items
        if item.module is request.module
    ]
    required = dict.fromkeys(
        name if name in GRADIENTS else RUNS[name].expected
        for name in names
        if name in RUNS or name in GRADIENTS
    )
    program = training_runs.start(folder, list(required))
    yield lambda name: Side(folder, "cpu").result(name, program)
    program.kill()
    program.wait()


@pytest.fixture(scope="module")
def device(folder):
    """The runs on the device, which this process trains once per name."""
    from megatron_tape.ops import parity

    side = Side(folder, "device")
    found = {}
    length = parity.LENGTH
    if not ON_GPU:
        parity.LENGTH = 17  # the interpreted check of the kernels would take minutes

    def rows(name):
        if name not in found:
            found[name] = side.train(name)
        return found[name]

    side.rows = rows
    yield side
    parity.LENGTH = length


def assert_close(rows, others, tolerance):
    assert (
        [row["step"] for row in rows]
        == [row["step"] for row in others]
        == list(range(1, SIZE.steps + 1))
    )
    for row, other in zip(rows, others):
        for key, largest in tolerance.items():
            assert (key in row) == (key in other)
            if key in row:
                assert row[key] == pytest.approx(other[key], rel=largest), (
                    f"{key} at step {row['step']}"
                )


@pytest.mark.parametrize("name", map(slow, RUNS))
def test_a_run_has_the_losses_and_gradient_norms_of_the_cpu(name, device, expected):
    run = RUNS[name]
    rows = device.rows(name)
    assert_close(rows, expected(run.expected), run.tolerance)
    if run.model != "rope":
        norms = [value for key, value in rows[0].items() if "update_norm" in key]
        assert norms and min(norms) > 0.01, "a layer's update does not move the position state"
    if len(rows) >= 20:
        assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1, "nothing is learned"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16][: 1 + ON_GPU],
)
@pytest.mark.parametrize("name", map(slow, GRADIENTS))
def test_gradients_have_at_most_twice_the_error_of_plain_torch(name, dtype, device, expected):
    truth = expected(name)

    def errors(backend):
        found = device.gradients(name, dtype, backend)
        assert found.keys() == truth.keys()
        relative = {name: float((found[name] - x).norm() / x.norm()) for name, x in truth.items()}
        return {
            name: error if math.isfinite(error) else math.inf for name, error in relative.items()
        }

    plain = errors("torch")
    fused = errors(BACKEND)
    # The rounding error of a small tensor may be small by chance, so the median of all is a lower
    # bound.
    typical = statistics.median(plain.values())
    floor = FLOOR[dtype]
    wrong = {
        name: error
        for name, error in fused.items()
        if not error <= 2 * max(plain[name], typical) + floor
    }
    assert not wrong, f"plain torch: { ({name: plain[name] for name in wrong}) }"
    strange = {name: error for name, error in plain.items() if not error <= PLAIN[dtype]}
    assert not strange, "plain torch itself differs from the CPU"
