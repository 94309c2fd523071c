"""Every fused kernel is as exact as plain torch, compared with float64, in the shapes of real
models.

On a GPU (`TESTS_ON=gpu python -m pytest -m gpu`) the tests cover many shapes and dtypes, the most
important first. Without a GPU, Triton interprets the kernels in one tiny shape.
"""

import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from megatron_tape.ops.attention import attention
from megatron_tape.ops.parity import Check, Shapes, deviations, kernel_checks

pytestmark = pytest.mark.gpu
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

if ON_GPU:
    SHAPES = ("12x64", "32x128", "32/8x64", "32/8x128", "16x128", "8x32", "8x80", "8x96")
else:
    SHAPES = ("2x32",)
"""Heads, or heads/groups, and head dimension: the 155M recipe, a 7B model, the 1B recipe, and other
sizes.
"""
PRECISIONS = tuple(DTYPES) if ON_GPU else ("fp32",)
LENGTH = None if ON_GPU else 5
TOKENS = 48 if ON_GPU else 5
"""Sequence length (None: that of the check before training), and tokens of a position update."""
LENGTHS = (1, 63, 1025, 4096) if ON_GPU else (1,)
MANY_TOKENS = 10_000 if ON_GPU else 15

NAMES = [
    f"attention{layer}{visibility}"
    for visibility in ("", " of packed documents", " in a window")
    for layer in ("", " in the first layer", " in the last layer")
]
NAMES += [
    "position update",
    "position update of a state in the type of the rest",
    "position update with a scale per head",
    "attention of inputs that are not contiguous",
    "attention of one query to a cache",
]
KINDS = [(shape, precision) for precision in PRECISIONS for shape in SHAPES]
"""Tests of one kind share compiled kernels. They are adjacent, so that mostly one pytest-xdist
worker runs them.
"""
REPEATABLE = (
    "attention",
    "attention of packed documents",
    "attention in a window",
    "position update",
)


def shapes_of(text):
    heads, groups, dim = re.fullmatch(r"(\d+)(?:/(\d+))?x(\d+)", text).groups()
    heads, groups = int(heads), int(groups or heads)
    return Shapes(heads, groups, int(dim), averages=True, inner=4 * heads, windowed=True)


def check_of(name, shapes, dtype):
    """Return the check of this name, or None if there is no kernel for this GPU and shape."""
    if name == "position update of a state in the type of the rest":
        shapes = replace(shapes, fp32_state=False)
    if name == "position update with a scale per head":
        if shapes.groups != shapes.heads:
            return None
        shapes = replace(shapes, full_mixing=False)
    checks = kernel_checks(shapes, dtype, DEVICE, LENGTH, TOKENS)
    if name.startswith("position update"):
        return checks.get("position update")
    if name in checks:
        return checks[name]

    qkv, z = checks["attention"].inputs
    heads_per_group = shapes.heads // shapes.groups
    q, k, v = qkv.split([heads_per_group * shapes.head_dim, *[shapes.head_dim] * 2], dim=-1)
    inputs = [q.reshape(*q.shape[:2], shapes.heads, shapes.head_dim), k, v, z]
    inputs = [x.contiguous() for x in inputs]
    if name == "attention of one query to a cache":
        inputs = [inputs[0][:1], *inputs[1:]]
        return Check(partial(attend, "triton", False), partial(attend, "torch", False), inputs)

    def attend_strided(*tensors):
        return attend("triton", True, *map(strided, tensors))

    return Check(attend_strided, partial(attend, "torch", True), inputs)


def attend(backend, rotate, *tensors):
    return attention(*tensors, average_state=True, backend=backend, rotate=rotate)


def strided(x):
    """Return x as a non-contiguous view into a larger tensor, like a model's queries and keys."""
    between = torch.stack(
        [x, torch.full_like(x, float("nan"))],
        dim=3,
    )
    return between.transpose(0, 1).contiguous().transpose(0, 1)[:, :, :, 0]


@contextmanager
def nan_in_new_memory():
    """Fill new tensors with NaN, so that unwritten outputs are detected."""

    def filled(function):
        def call(*arguments, **named):
            x = function(*arguments, **named)
            if x.is_floating_point():
                x.fill_(float("nan"))
            return x

        return call

    with (
        mock.patch.object(torch, "empty_like", filled(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty)),
    ):
        yield


def assert_exact(check, dtype):
    """Assert that all deviations are allowed."""
    if check is None:
        pytest.skip("no kernel for this shape, or it exceeds the shared memory")
    with nan_in_new_memory():
        every = list(deviations(*check, dtype))
    inexact = [str(deviation) for deviation in every if not deviation.exact]  # includes NaN
    assert every and not inexact, "; ".join(inexact[:3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape, precision", KINDS)
def test_a_kernel_is_as_exact_as_plain_torch(name, shape, precision):
    assert_exact(check_of(name, shapes_of(shape), DTYPES[precision]), DTYPES[precision])


@pytest.mark.parametrize("name", REPEATABLE)
@pytest.mark.parametrize("shape, precision", KINDS)
def test_deterministic_kernels_give_the_same_bits_twice(name, shape, precision):
    check = check_of(name, shapes_of(shape), DTYPES[precision])

    def results():
        leaves = [x.detach().requires_grad_() for x in check.inputs]
        outputs = [x for x in check.ours(*leaves) if x is not None]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        return [*outputs, *(leaf.grad for leaf in leaves)]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert_exact(check, DTYPES[precision])
        assert all(map(torch.equal, results(), results()))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "name", ["attention", "attention of packed documents", "attention in a window"]
)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape, precision", KINDS)
def test_attention_is_exact_at_any_length(name, length, shape, precision):
    if ON_GPU and precision != "bf16":
        pytest.skip("other dtypes are checked at one length")
    shapes = shapes_of(shape)
    # A few heads suffice, and float64 scores of all heads would not fit into memory.
    groups = min(shapes.groups, 2 if shapes.heads == shapes.groups else 1)
    few = replace(shapes, heads=shapes.heads // shapes.groups * groups, groups=groups)
    check = kernel_checks(few, DTYPES[precision], DEVICE, length)[name]
    assert_exact(check, DTYPES[precision])


@pytest.mark.parametrize("shape, precision", KINDS)
def test_the_position_update_is_exact_with_many_tokens_per_program(shape, precision):
    checks = kernel_checks(shapes_of(shape), DTYPES[precision], DEVICE, 1, MANY_TOKENS)
    assert_exact(checks.get("position update"), DTYPES[precision])
