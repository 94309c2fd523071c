"""The Triton kernels against the plain form in float64, outputs and every gradient; interpreted without a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from ops_interpreter import DEVICE, rounding_to_nearest

from megatron_tape.ops.attention import HEAD_DIMS, attention, document_bounds
from megatron_tape.ops.position_update import fused_update, plain_update

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Rounding that no computation in a type can do without, for tensors so small that plain torch may be lucky.
FLOOR = {FP32: 1e-6, BF16: 1e-3, FP16: 1e-4}


@pytest.fixture(autouse=True)
def poisoned():
    """Fill memory that torch leaves uninitialised with NaN; round as GPUs do."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    with rounding_to_nearest():
        yield
    torch.use_deterministic_algorithms(False)


def draw(*shape, dtype, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def run(function, inputs, dtype=None):
    """Outputs of `function`, and the gradients of its inputs in a fixed direction, in float64."""
    inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    outputs = [x for x in function(*inputs) if x is not None]
    direction = [draw(*x.shape, dtype=torch.float64, seed=i + 50) for i, x in enumerate(outputs)]
    sum((x.double() * d).sum() for x, d in zip(outputs, direction)).backward()
    return [x.detach().double() for x in outputs] + [x.grad.double() for x in inputs]


def assert_as_exact_as_torch(kernel, plain, inputs, dtype):
    exact = run(plain, inputs, torch.float64)
    for ours, theirs, truth in zip(run(kernel, inputs), run(plain, inputs, dtype), exact, strict=True):
        # A gradient that is zero but for rounding has no size of its own.
        size = truth.norm().clamp(min=truth.numel() ** 0.5)
        error, torchs = ((x - truth).norm() / size for x in (ours, theirs))
        assert error <= 2 * torchs + FLOOR[dtype]


def check_attention(length, batch, heads, groups, dim, dtype=FP32, state=None, wide=True, documents=None, rotated=True):
    """Compare with torch's backend; `state` is the type of z if it is another."""
    shapes = [(heads, dtype), (groups, dtype), (groups, dtype), (groups, state or dtype)]
    inputs = [draw(length, batch, n, dim, dtype=kind, seed=i) for i, (n, kind) in enumerate(shapes)]
    bounds = None if documents is None else document_bounds(documents.to(DEVICE))

    def with_backend(backend):
        def call(q, k, v, z=None):
            # torch multiplies equal types only.
            z = z.to(q.dtype) if z is not None and backend == "torch" else z
            return attention(q, k, v, z, wide, bounds, backend)

        return call

    inputs = inputs if rotated else inputs[:3]
    assert_as_exact_as_torch(with_backend("triton"), with_backend("torch"), inputs, dtype)


@pytest.mark.parametrize("length", [1, 63, 65, 257])
def test_attention_at_odd_lengths(length):
    check_attention(length, 1, 2, 1, 32)


@pytest.mark.parametrize("heads, groups", [(3, 3), (4, 2), (5, 1)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_attention_in_half_precision(dtype, heads, groups):
    check_attention(65, 2, heads, groups, 64, dtype)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_attention_of_every_width(dim):
    check_attention(65, 1, 2, 1, dim, BF16)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("length, ends", [(65, [[7, 8, 40], [64]]), (130, [[1, 128], [65, 66]])])
def test_attention_within_uneven_documents(length, ends, dtype):
    at = torch.arange(length)
    documents = torch.stack([(at[:, None] >= torch.tensor(row)).sum(1) for row in ends])
    check_attention(length, 2, 4, 2, 32, dtype, documents=documents)


def test_attention_with_a_state_in_fp32():
    check_attention(65, 1, 4, 2, 64, BF16, state=FP32)


@pytest.mark.parametrize("rotated", [True, False])
def test_attention_without_averaging_the_state(rotated):
    check_attention(65, 1, 4, 2, 64, BF16, wide=False, rotated=rotated)


def test_one_state_for_all_sequences_and_groups_gets_the_sum_of_their_gradients():
    q, k, v = (draw(33, 2, n, 32, dtype=FP32, seed=n) for n in (4, 2, 3))
    v = v[:, :, :2]
    z = draw(33, 1, 1, 32, dtype=FP32, seed=9)
    assert_as_exact_as_torch(
        lambda *inputs: attention(*inputs, True, None, "triton"),
        lambda *inputs: attention(*inputs, True, None, "torch"),
        [q, k, v, z],
        FP32,
    )


def test_strided_inputs_are_read_where_they_are():
    whole = draw(33, 2, 4 * 3 * 32, dtype=FP32, seed=1)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in whole.unflatten(2, (4, 96)).split(32, dim=3)]
    assert not any(x.is_contiguous() for x in views)
    z = draw(33, 2, 4, 32, dtype=FP32, seed=2)
    ours, theirs = (attention(*views, z, True, None, backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", [1, 64, 100])
def test_one_query_sees_a_whole_cache(keys):
    from megatron_tape.ops.triton_attention import attend

    q, k, v, z = (draw(n, 2, h, 32, dtype=FP32, seed=h) for n, h in ((1, 4), (keys, 2), (keys, 2), (keys, 2)))
    o, u, _ = attend(q, k, v, z, None)
    value = torch.cat([v, z], dim=-1)
    q, k, value = (x.permute(1, 2, 0, 3) for x in (q, k, value))
    expected = F.scaled_dot_product_attention(q, k, value, enable_gqa=True).permute(2, 0, 1, 3)
    torch.testing.assert_close(torch.cat([o, u], dim=-1), expected, atol=1e-5, rtol=1e-5)


def test_a_second_derivative_is_refused():
    q, k, v, z = (draw(5, 1, 2, 32, dtype=FP32, seed=n).requires_grad_() for n in range(4))
    for backend in ("triton", "tiled"):
        o, u = attention(q, k, v, z, True, None, backend)
        (slope,) = torch.autograd.grad(o.square().sum() + u.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs_may_stay_unused(used):
    inputs = [draw(33, 1, n, 32, dtype=FP32, seed=n) for n in (4, 2, 2, 2)]
    assert_as_exact_as_torch(
        lambda *x: [attention(*x, True, None, "triton")[used]],
        lambda *x: [attention(*x, True, None, "torch")[used] + 0 * sum(y.sum() for y in x)],
        inputs,
        FP32,
    )


def test_gradients_are_the_slopes():
    inputs = [draw(7, 1, n, 32, dtype=FP32, seed=n, scale=0.5).requires_grad_() for n in (4, 2, 2, 2)]
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, True, None, "triton"), inputs, eps=1e-2, atol=2e-3, rtol=1e-2, fast_mode=True
    )
    inputs = [x.detach().requires_grad_() for x in update_inputs(3, 2, 4, 32, 6, FP32)]
    assert torch.autograd.gradcheck(fused_update, inputs, eps=1e-2, atol=2e-3, rtol=1e-2, fast_mode=True)


def update_inputs(tokens, groups, heads, dim, inner, dtype, full=True):
    shapes = [(tokens, groups, dim), (tokens, heads, dim), (tokens, inner)]
    shapes += [(groups, heads) if full else (heads,), (inner, groups), (groups, inner)]
    return [draw(*s, dtype=dtype, seed=i, scale=1 if i < 3 else s[-1] ** -0.5) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    "tokens, groups, heads, dim, inner, full",
    [(1, 2, 4, 32, 6, True), (33, 3, 6, 80, 7, True), (17, 4, 4, 96, 16, False), (16, 12, 12, 64, 48, True),
     (5, 8, 32, 128, 128, True)],
)  # fmt: skip
def test_position_update(tokens, groups, heads, dim, inner, full, dtype):
    inputs = update_inputs(tokens, groups, heads, dim, inner, dtype, full)
    assert_as_exact_as_torch(lambda *x: [fused_update(*x)], lambda *x: [plain_update(*x)], inputs, dtype)


@pytest.mark.parametrize(
    "changes", [{}, {"token_mixing": "per_head", "num_query_groups": 4}, {"position_encoding": "rope"}]
)
def test_a_model_with_kernels_equals_the_one_without(changes):
    pytest.importorskip("megatron.core")
    from models import build, random_tokens, small_model

    results = []
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7], device=DEVICE)
    tokens, labels = random_tokens(seed=1).to(DEVICE), random_tokens(seed=2).to(DEVICE)
    for backend in ("torch", "triton"):
        built, _ = build(small_model(hidden_size=128, attention_backend=backend, **changes), device=DEVICE)
        assert built.attention_backend == backend
        loss = built(tokens, labels, documents=documents)
        loss.backward()
        results.append([loss.detach()] + [parameter.grad for parameter in built.parameters()])
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


COMPILE = """
import json, sys
from ops_interpreter import compiled
print(json.dumps(compiled(*json.loads(sys.argv[1]))))
"""


@pytest.mark.parametrize("dim, capability", [(64, 90), (128, 86)])
def test_kernels_compile_for_gpus_that_are_not_here(dim, capability):
    """Triton brings the assembler, so what does not compile, or takes more shared memory than there is, shows here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([dim, [capability]])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len({name for name, _, _ in found}) == 7  # attention's and the update's `_forward` share a name
    for name, _, shared in found:
        assert shared <= {86: 99, 90: 227}[capability] * 1024, name
