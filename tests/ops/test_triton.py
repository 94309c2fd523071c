"""Triton kernels equal their references in float64, outputs and all gradients; interpreted without
a GPU.
"""

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from configurations import model_config
from ops_interpreter import DEVICE, rounding_to_nearest
from torch.utils.checkpoint import checkpoint

from megatron_tape.model import backend as model_backend
from megatron_tape.model.backend import FusedKernels, kernel_shapes
from megatron_tape.ops import attention_inputs, parity
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import BACKENDS, choice, sdpa_wide, tiled
from megatron_tape.ops.kernels import (
    triton_attention,
    triton_position_update,
    triton_rotation,
    triton_split,
    triton_swiglu,
)
from megatron_tape.ops.parity import (
    backend_fails,
    first_failure,
    inexact,
    swiglu_check,
    update_checks,
)
from megatron_tape.ops.position_update import compact_update, fused_update, plain_update
from megatron_tape.ops.visibility import Visibility

pytestmark = pytest.mark.gpu
FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
SMALL = dict(
    hidden_size=128,
    num_attention_heads=4,
    num_layers=2,
    ffn_hidden_size=64,
    seq_length=48,
    vocab_size=64,
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill uninitialized memory with NaN, as torch does in deterministic mode; round like a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(triton_attention, "sums_in_one_order", lambda: False)
    assert torch.empty(3, device=DEVICE).isnan().all()
    with rounding_to_nearest():
        yield
    torch.use_deterministic_algorithms(False)


def draw(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


# On a GPU, the backend torch rotates with the kernel under test.
PLAIN = "torch" if DEVICE.type == "cpu" else "naive"


def assert_as_exact_as_torch(attend, inputs, dtype):
    assert inexact(partial(attend, "triton"), partial(attend, PLAIN), inputs, dtype) is None


def check_attention(
    length=65, heads=4, groups=2, dim=64, dtype=FP32, ends=None, wide=True, window=None
):
    """Compare with torch's backend; `ends` are the ends of documents, by sequence."""
    batch = 1 if ends is None else 2
    counts = (heads, groups, groups, groups)
    inputs = [draw(length, batch, n, dim, dtype=dtype, seed=i) for i, n in enumerate(counts)]
    visibility = None
    if ends is not None:
        documents = [(torch.arange(length)[:, None] >= torch.tensor(row)).sum(1) for row in ends]
        visibility = Visibility.of(torch.stack(documents).to(DEVICE))
    if window is not None:
        visibility = visibility or Visibility.of_whole(torch.zeros(batch, length, device=DEVICE))
        visibility = visibility.with_window(window)

    def attend(backend, *tensors):
        return attention(*tensors, average_state=wide, visibility=visibility, backend=backend)

    assert_as_exact_as_torch(attend, inputs, dtype)


SMALL_HEADS = dict(heads=2, groups=1, dim=32)
WINDOWS = [(65, 1), (65, 2), (129, 32), (129, 33), (63, 64), (200, 70)]
"""Lengths and sizes of windows: of single tokens, at the edge of a tile and beyond, and longer than
the sequence."""
UNEVEN = [
    dict(length=65, ends=[[7, 8, 40], [64]]),
    dict(length=130, ends=[[1, 128], [65, 66]]),
    dict(length=330, ends=[[300], [3, 210]]),  # documents with unmasked tiles in the middle
]


@pytest.mark.parametrize(
    "case",
    [
        *(SMALL_HEADS | dict(length=length) for length in (1, 63, 129)),
        *(
            dict(heads=h, groups=g, dtype=t)
            for h, g, t in ((3, 3, BF16), (4, 2, FP16), (5, 1, BF16))
        ),
        *(dict(heads=2, groups=1, dim=dim, dtype=BF16) for dim in BACKENDS["triton"].head_dims),
        *(case | dict(dim=32, dtype=dtype) for case, dtype in zip(UNEVEN, (FP32, BF16, BF16))),
        dict(dtype=BF16, wide=False),
    ],
    ids=str,
)
def test_attention(case):
    check_attention(**case)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        # In fp32, tiles have 32 queries and 32 keys; in bf16, 128 and 64 forward.
        *(SMALL_HEADS | dict(length=length, window=w) for length, w in WINDOWS),
        dict(dtype=BF16, length=330, window=70),
        dict(dtype=BF16, length=200, window=70, ends=[[180], [3, 130]], dim=128),
        dict(dtype=BF16, length=130, window=9, wide=False),
        SMALL_HEADS | dict(length=130, window=40, ends=[[1, 128], [65, 66]]),
    ],
    ids=str,
)
def test_attention_in_a_window(monkeypatch, deterministic, case):
    monkeypatch.setattr(triton_attention, "sums_in_one_order", lambda: deterministic)
    check_attention(**case)


def test_attention_without_a_state():
    inputs = [draw(65, 1, n, 64, dtype=BF16, seed=n) for n in (4, 2, 2)]
    assert_as_exact_as_torch(lambda backend, *x: attention(*x, backend=backend), inputs, BF16)


@pytest.mark.parametrize(
    "queries, keys, dim, dtype, packed, window",
    [
        (1, 64, 32, FP32, False, None),
        (1, 101, 64, BF16, True, None),
        (70, 130, 80, BF16, False, None),
        (1, 101, 32, FP32, False, 40),
        (70, 130, 32, FP32, True, 33),
    ],
)
def test_fewer_queries_than_keys_see_the_whole_cache(queries, keys, dim, dtype, packed, window):
    inputs = [
        draw(n, 2, h, dim, dtype=dtype, seed=h)
        for n, h in ((queries, 4), (keys, 2), (keys, 2), (keys, 2))
    ]
    starts = torch.tensor([[keys - 20], [3]], device=DEVICE)
    documents = torch.arange(keys, device=DEVICE) >= starts
    visibility = Visibility.of(documents) if packed else None
    if window is not None:
        visibility = (visibility or Visibility.of_whole(documents.long())).with_window(window)
    assert_as_exact_as_torch(
        lambda backend, *x: attention(
            *x, average_state=True, visibility=visibility, backend=backend, rotate=False
        ),
        inputs,
        dtype,
    )


def test_a_second_derivative_is_refused():
    q, k, v, z = (draw(5, 1, 2, 32, dtype=FP32, seed=n).requires_grad_() for n in range(4))
    for backend in ("triton", "tiled"):
        o, u = attention(q, k, v, z, average_state=True, backend=backend)
        (slope,) = torch.autograd.grad(
            o.square().sum() + u.square().sum(),
            q,
            create_graph=True,
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()


def update_inputs(tokens, groups, heads, dim, inner, dtype, full=True):
    states = [
        (tokens, groups, dim),
        (tokens, heads, dim),
        (tokens, inner),
    ]
    matrices = [
        (groups, heads) if full else (heads,),
        (inner, groups),
        (groups, inner),
    ]
    tensors = [draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(states + matrices)]
    return [*tensors[:3], *(x * x.shape[-1] ** -0.5 for x in tensors[3:])]


@pytest.mark.parametrize(
    "tokens, groups, heads, dim, inner, dtype, full",
    [
        (1, 2, 4, 32, 6, FP32, True),
        (33, 3, 6, 80, 7, FP16, True),
        (17, 4, 4, 96, 16, BF16, False),
        (5, 8, 32, 128, 128, BF16, True),
    ],
)
def test_position_update(tokens, groups, heads, dim, inner, dtype, full):
    inputs = update_inputs(tokens, groups, heads, dim, inner, dtype, full)
    assert (
        inexact(lambda *x: fused_update(*x)[:1], lambda *x: [plain_update(*x)], inputs, dtype)
        is None
    )


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("readers", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_the_gradients_of_all_readers_of_an_updated_state_are_summed(readers, full):
    """The next layer's attention and update read copies of the state; checkpoints and stages read
    the state itself.
    """
    z, u, *rest = update_inputs(33, 4, 4, 32, 7, BF16, full)

    def fused(rounded, *x):
        exact = rounded.detach().float() * 1.0001
        return [fused_update(exact, *x, rounded_NGD=rounded)[reader] for reader in readers]

    def plain(rounded, *x):
        exact = rounded.to(torch.promote_types(rounded.dtype, FP32))
        new = plain_update(exact + exact.detach() * 1e-4, *x)
        copies = new, new.to(u.dtype), new.to(u.dtype)
        return [copies[reader] for reader in readers]

    assert inexact(fused, plain, [z, u, *rest], BF16) is None


@pytest.mark.parametrize("layout", ["half", "batch first"])
def test_the_update_reads_averages_in_other_layouts_without_a_copy(layout):
    """Attention writes the averages of v and z as halves of one tensor; FlashAttention-4 writes one
    sequence after the other.
    """
    z, u, *rest = update_inputs(34, 2, 4, 32, 6, FP32)
    if layout == "half":
        strided = torch.stack([torch.full_like(u, float("nan")), u], dim=2)[:, :, 1]
    else:
        strided = (
            u.unflatten(0, (17, 2))
            .transpose(0, 1)
            .contiguous()
            .transpose(
                0,
                1,
            )
        )
    strided.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.data_ptr()) or x, lambda x: x
    ):
        ours = fused_update(z, strided, *rest).state

    assert not strided.is_contiguous()
    assert strided.data_ptr() in saved
    torch.testing.assert_close(
        ours,
        plain_update(z, u, *rest),
        rtol=1e-5,
        atol=1e-5,
    )
    slope = torch.randn_like(ours)
    gradients = [
        torch.autograd.grad(new, strided, slope)[0]
        for new in (ours, plain_update(z, strided, *rest))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_state_in_fp32_is_updated_in_fp32():
    z, u, gate, mixing, up, down = update_inputs(33, 4, 4, 32, 7, BF16)
    small = [u, gate, mixing * 1e-3, up, down * 1e-3]
    truth = plain_update(z.double(), *(x.double() for x in small))
    for update in (fused_update, compact_update):
        new, *copies, _ = update(z.float(), *small, rounded_NGD=z)
        assert new.dtype is FP32
        assert (new - truth).abs().max() < 1e-4
        for copy in copies:
            assert torch.equal(copy, new.to(BF16))
        new, *copies, _ = update(z, *small)
        assert (new - truth).abs().max() > 1e-3
        assert all(torch.equal(copy, new) for copy in copies)


def test_the_update_refuses_wrong_shapes():
    inputs = update_inputs(3, 4, 4, 32, 6, BF16)
    for index in range(6):
        wrong = [x[:-1] if i == index else x for i, x in enumerate(inputs)]
        with pytest.raises(ValueError, match="expected"):
            fused_update(*wrong)
    with pytest.raises(ValueError, match="expected"):  # one scale per head requires G = H
        fused_update(*update_inputs(3, 2, 4, 32, 6, BF16, full=False))
    with pytest.raises(ValueError, match="rounded_NGD must be z in torch.bfloat16"):
        fused_update(inputs[0].float(), *inputs[1:])


def test_an_error_in_one_row_is_named():
    inputs = [draw(48, 1, 2, 32, dtype=BF16, seed=n) for n in range(4)]

    def exact(*x):
        return attention(*x, average_state=True)

    def wrong(*x):
        o, u = exact(*x)
        return o, u.index_fill(0, torch.tensor([40], device=DEVICE), 0.0)

    every = parity.deviations(wrong, exact, inputs, BF16)
    assert (1, (32, 47)) in [(x.tensor, x.rows) for x in every if not x.exact]


@contextlib.contextmanager
def saving_bytes():
    """Yield a dict that receives the bytes of each memory that autograd saves, by address."""
    saved = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield saved


def test_attention_saves_only_inputs_outputs_and_one_number_per_query():
    inputs = [draw(64, 2, n, 32, dtype=BF16, seed=n).requires_grad_() for n in (4, 2, 2, 2)]
    with saving_bytes() as saved:
        outputs = attention(*inputs, average_state=True, backend="triton")
    assert sum(saved.values()) == sum(x.nbytes for x in (*inputs, *outputs)) + 4 * 64 * 2 * 4
    assert {x.data_ptr() for x in (*inputs, *outputs)} <= set(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_mixing": "per_head", "num_query_groups": 4},
        {"position_encoding": "rope"},
        {"increments": "learned"},
    ],
)
def test_a_model_with_fused_kernels_equals_one_without(changes):
    pytest.importorskip("megatron.core")
    from models import build, random_tokens, small_model

    results = []
    documents = torch.tensor(
        [[0] * 5 + [1] * 11, [0] * 9 + [1] * 7],
        device=DEVICE,
    )
    tokens = random_tokens(seed=1).to(DEVICE)
    labels = random_tokens(seed=2).to(DEVICE)
    for backend in ("torch", "triton"):
        model = small_model(num_layers=2, hidden_size=128, attention_backend=backend, **changes)
        built, _ = build(model, device=DEVICE)
        assert built.attention_backend == backend
        loss = built(tokens, labels, documents=documents)
        loss.backward()
        results.append([loss.detach()] + [parameter.grad for parameter in built.parameters()])
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "changes, packed, layers",
    [
        # The last of four layers does not average the state, and the first is not updated before.
        ({}, False, 2),
        ({"state_precision": "bf16"}, False, 2),
        ({"state_precision": "bf16", "state_norm": "unit"}, False, 0),
        ({}, True, 0),
    ],
)
def test_the_update_writes_the_state_into_the_next_layers_value(
    monkeypatch, changes, packed, layers
):
    """`torch_wide` averages [v | z] as one tensor, except within documents. torch's kernel replaces
    cuDNN's, and saves only its inputs here, too.
    """
    pytest.importorskip("megatron.core")
    from models import build, random_tokens, small_model

    for module in (choice, model_backend):
        monkeypatch.setattr(module, "unsupported", lambda *arguments: None)
    monkeypatch.setattr(sdpa_wide, "sdpa_kernel", lambda kernel: contextlib.nullcontext())
    monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: True)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        partial(checkpoint, sdpa, use_reentrant=False),
    )
    rotate_and_join = mock.Mock(wraps=triton_rotation.rotate_and_join)
    monkeypatch.setattr(triton_rotation, "rotate_and_join", rotate_and_join)
    tokens = random_tokens(seed=1).to(DEVICE)
    documents = (torch.arange(tokens.shape[1], device=DEVICE) > 5).expand_as(tokens)
    model = small_model(
        num_layers=4,
        hidden_size=128,
        num_query_groups=4,
        attention_backend="torch_wide",
        **changes,
    )

    def results(fused, joins=True):
        built, _ = build(model, device=DEVICE, dtype=BF16, fused=FusedKernels(fused))
        assert built._joins_values
        built._joins_values = joins
        with saving_bytes() as saved:
            loss = built(tokens, tokens, documents=documents if packed else None)
        loss.backward()
        joined = [call.args[-1] for call in rotate_and_join.call_args_list]
        rotate_and_join.reset_mock()
        gradients = [parameter.grad for parameter in built.parameters()]
        return [loss.detach(), *gradients], sum(x is not None for x in joined), sum(saved.values())

    ours, joined, bytes_joined = results(fused=True)
    separate, joined_separate, bytes_separate = results(fused=True, joins=False)
    plain, *_ = results(fused=False)
    assert (joined, joined_separate) == (layers, 0)
    assert bytes_separate - bytes_joined == layers * tokens.numel() * 128 * 2
    assert all(map(torch.equal, ours, separate))
    # Rescaling divides by the modulus, so that the gradients of a small number are inexact.
    if "state_norm" not in changes:
        torch.testing.assert_close(ours, plain, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("backend", ["tiled", "triton", "triton deterministic"])
def test_tiles_outside_of_all_windows_are_skipped(monkeypatch, backend):
    """NaN in tokens that a tile does not need would reach the results of tiles that read them."""
    backend, deterministic, _ = backend.partition(" ")
    monkeypatch.setattr(triton_attention, "sums_in_one_order", lambda: bool(deterministic))
    # The size of Triton's tiles in fp32.
    monkeypatch.setattr(tiled, "QUERIES", 32)
    monkeypatch.setattr(tiled, "KEYS", 32)
    length = 330
    inputs = [draw(length, 1, n, 32, dtype=FP32, seed=n) for n in (4, 2, 2, 2)]
    output_grads = [draw(length, 1, 4, 32, dtype=FP32, seed=8 + i).detach() for i in range(2)]
    visibility = Visibility.of_whole(torch.zeros(1, length, device=DEVICE)).with_window(40)

    def results(poisoned):
        leaves = [x.clone() for x in inputs]
        for x in leaves:
            x[poisoned] = float("nan")
            x.requires_grad_()
        outputs = attention(
            *leaves, average_state=True, visibility=visibility, backend=backend, rotate=False
        )
        torch.autograd.backward(outputs, output_grads)
        return [*outputs, *(leaf.grad for leaf in leaves)]

    clean = results(slice(0, 0))
    # Tokens from 128 on do not see the first 64, nor the tiles that these are in. Tokens before 224
    # are not seen from 288 on.
    for poisoned, kept in ((slice(0, 64), slice(192, None)), (slice(288, None), slice(0, 224))):
        for ours, theirs in zip(results(poisoned), clean, strict=True):
            assert torch.equal(ours[kept], theirs[kept])


def failure():
    shapes = kernel_shapes(model_config(**SMALL), 2)
    return backend_fails("triton", shapes, FP32, DEVICE)


def scaled_by_two(function, *inputs, **options):
    """Return the results of `function`, twice as large."""
    results = function(*inputs, **options)
    if isinstance(results, torch.Tensor):
        return 2 * results
    return [x if x is None else 2 * x for x in results]


def test_kernels_are_checked_before_training(monkeypatch):
    monkeypatch.setattr(parity, "LENGTH", 33)
    assert failure() is None
    # Windows are checked only for models that have one.
    for changes, checked in (({}, 0), ({"sliding_window": 48}, 0), ({"sliding_window": 47}, 3)):
        shapes = kernel_shapes(model_config(**SMALL, **changes), 2)
        checks = parity.kernel_checks(shapes, FP32, DEVICE, 33)
        assert sum(parity.WINDOWED in name for name in checks) == checked
        assert shapes.windowed == bool(checked)
        assert backend_fails("triton", shapes, FP32, DEVICE) is None

    for kernels, name in (
        (triton_attention, "attend"),
        (triton_attention, "attend_backward"),
        (triton_rotation, "rotate_and_join"),
    ):
        exact = getattr(kernels, name)
        with monkeypatch.context() as broken:
            wrong = partial(scaled_by_two, exact)
            broken.setattr(kernels, name, wrong)
            broken.setattr(triton_attention, name, wrong)
            assert "does not work here (attention" in failure()
    monkeypatch.setattr(triton_position_update, "update", lambda z, *_: (z, z, z))
    checks = update_checks(kernel_shapes(model_config(**SMALL), 2), FP32, DEVICE)
    assert "off by" in first_failure(checks, FP32, DEVICE)
    monkeypatch.setattr(triton_swiglu, "backward", partial(scaled_by_two, triton_swiglu.backward))
    assert "tensor 1" in first_failure({"swiglu": swiglu_check(48, FP32, DEVICE)}, FP32, DEVICE)


def test_the_check_of_a_library_detects_a_wrong_rotation(monkeypatch):
    """The reference of the check must not use the kernel for rotation."""
    monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: True)
    monkeypatch.setattr(parity, "LENGTHS", (17,))
    shapes = parity.Shapes(2, 2, 32, averages=True, inner=4)
    assert backend_fails("torch", shapes, FP32, DEVICE) is None
    wrong = partial(scaled_by_two, triton_rotation.rotate_and_join)
    monkeypatch.setattr(triton_rotation, "rotate_and_join", wrong)
    assert "is off by" in backend_fails("torch", shapes, FP32, DEVICE)


@pytest.mark.parametrize(
    "groups, wide, learned",
    [
        (2, True, True),
        (4, False, False),
        (4, False, True),
    ],
)
def test_the_fused_rotation_for_other_backends_is_as_exact_as_torch(
    monkeypatch, groups, wide, learned
):
    """On a GPU, it prepares the inputs of library kernels, which get [v | z] as one tensor."""

    def attend(fused, q, k, v, *state):
        monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: fused)
        z = state[0] if state else broadcast.to(q)
        inputs = attention_inputs.AttentionInputs(z, wide, q_SBHD=q, k_TBGD=k, v_TBGD=v)
        return inputs.prepared(join=True)

    broadcast = draw(33, 1, 1, 32, dtype=BF16, seed=9)
    inputs = [draw(33, 2, n, 32, dtype=BF16, seed=n) for n in (4, groups, groups)]
    if learned:
        inputs.append(draw(33, 2, groups, 32, dtype=BF16, seed=9))
    assert inexact(partial(attend, True), partial(attend, False), inputs, BF16) is None


@pytest.mark.parametrize("batch_first", [False, True])
def test_gradients_of_both_averages_are_concatenated_in_their_layout(batch_first):
    x = draw(33, 2, 3, 40, dtype=BF16, seed=1)
    if batch_first:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x.requires_grad_()
    o, u = triton_split.split(x, [20, 20])
    slopes = (
        draw(33, 2, 20, 3, dtype=BF16, seed=2).transpose(
            2,
            3,
        ),
        draw(33, 2, 3, 20, dtype=BF16, seed=3),
    )
    (gradient,) = torch.autograd.grad((o, u), x, slopes)
    assert torch.equal(torch.cat([o, u], -1), x)
    assert torch.equal(gradient, torch.cat(slopes, -1))
    assert gradient.stride() == x.stride()


def test_gradients_of_long_sequences_with_many_heads_per_group_are_joined(monkeypatch):
    """Only the first axis of CUDA's grids may have more than 65535 programs."""
    join = mock.MagicMock()
    monkeypatch.setattr(triton_split, "_join", join)
    widths = [8 * 128, 128, 128]
    x = torch.empty(2**17, 1, 8, sum(widths), device="meta", requires_grad=True)
    parts = triton_split.split(x, widths)
    torch.autograd.backward(parts, [torch.empty_like(part) for part in parts])
    ((grid,), _) = join.__getitem__.call_args
    assert max(grid[1:], default=1) < 2**16


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_gradient_of_a_projection_is_written_once(monkeypatch, groups, learned, wide):
    """With a key for each head, the rotation writes the gradients of q, k and v as views of one
    tensor; with grouped queries, one kernel concatenates them.
    """
    monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: True)
    join = mock.MagicMock(wraps=triton_split._join)
    join.__getitem__.side_effect = triton_split._join.__getitem__
    monkeypatch.setattr(triton_split, "_join", join)
    qkv = draw(33, 2, groups, (4 // groups + 2) * 32, dtype=FP32, seed=1)
    widths = [4 // groups * 32, 32, 32]
    z = draw(33, 2, groups, 32, dtype=FP32, seed=2)

    def gradients(split, fused):
        leaf = qkv.detach().requires_grad_()
        state = z.detach().requires_grad_(learned)
        q, k, v = split(leaf, widths)
        inputs = attention_inputs.AttentionInputs(
            state, wide, q_SBHD=q.reshape(33, 2, 4, 32), k_TBGD=k, v_TBGD=v
        )
        outputs = inputs.prepared(join=True, fused=fused)
        slopes = [draw(*x.shape, dtype=FP32, seed=3) for x in outputs]
        torch.autograd.backward(outputs, slopes)
        return [x.grad for x in (leaf, state) if x.requires_grad]

    ours = gradients(attention_inputs.split, True)
    theirs = gradients(lambda x, widths: x.split(widths, dim=-1), False)
    assert join.__getitem__.called == (groups == 2)
    assert ours[0].is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_parts_of_a_gradient_in_another_order_are_concatenated(monkeypatch):
    monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: True)
    x = draw(5, 2, 3, 24, dtype=FP32, seed=1).requires_grad_()
    parts = attention_inputs.split(x, [8, 8, 8])
    first, second, third = draw(5, 2, 3, 24, dtype=FP32, seed=2).chunk(3, dim=-1)
    for slopes in ([second, first, third], [first, second, third.clone()]):
        (gradient,) = torch.autograd.grad(parts, x, slopes, retain_graph=True)
        assert torch.equal(gradient, torch.cat(slopes, -1))


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_update_writes_the_gradient_of_the_average_into_that_of_both(monkeypatch, batch_first):
    """Attention returns [o | u]. The update writes the gradient of u, and a kernel that of o next
    to it, unless something else uses u, too.
    """
    monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: True)
    z, _, *rest = update_inputs(34, 4, 4, 32, 6, FP32)
    x = draw(17, 2, 4, 64, dtype=FP32, seed=8)
    if batch_first:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)

    def gradient(split, update, uses):
        leaf = x.detach().requires_grad_()
        o, u = split(leaf, [32, 32])
        new, *_ = update(z, u, *rest)
        loss = new.square().sum() + o.square().sum()
        if uses > 1:
            loss = loss + u.square().sum()
        loss.backward()
        return leaf.grad

    halves = []

    def empty(u):
        halves.append(triton_split.empty_next_to_left_half(u))
        return halves[-1]

    monkeypatch.setattr(triton_position_update, "empty_next_to_left_half", empty)
    for uses in (1, 2):
        ours = gradient(attention_inputs.split, fused_update, uses)
        theirs = gradient(lambda x, widths: x.split(widths, dim=-1), compact_update, uses)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.stride() == x.stride()
        same_memory = ours.untyped_storage().data_ptr() == halves[-1].untyped_storage().data_ptr()
        assert same_memory == (uses == 1)
