"""FlexAttention without compilation."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from comparing import assert_same, draw, draw_qkvz
from models import build, small_model
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import logsigmoid

from megatron_tape.errors import ConfigError, NodeError
from megatron_tape.model import backend as model_backend
from megatron_tape.model.backend import kernel_shapes, verified_backend
from megatron_tape.ops import parity
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import POINTWISE, choice, flex
from megatron_tape.ops.bias import Bias, gates_as_bias
from megatron_tape.ops.visibility import Visibility
from megatron_tape.position.encoding import NO_CACHE

LENGTH = 21
HEADS = 6
GROUPS = 2
DIM = 16
CPU = torch.device("cpu")
IN_DOCUMENTS = Visibility.of(torch.arange(LENGTH) // torch.tensor([[4], [9]]))
WHOLE = Visibility.of_whole(torch.zeros(2, LENGTH))
VISIBILITIES = [
    None,
    IN_DOCUMENTS,
    *(WHOLE.with_window(size) for size in (1, 2, 8, 30)),
    IN_DOCUMENTS.with_window(5),
]


@pytest.fixture(autouse=True)
def gradients_on_a_cpu(monkeypatch):
    """Enable gradients on a CPU, which torch refuses although the uncompiled function has them."""
    monkeypatch.setattr(
        torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None
    )


def layout_of(gather, world_size=1):
    """Return a layout of rank 0 on a GPU; `gather` imitates the answers of other ranks."""
    sizes = dict(tensor_parallel_size=1, context_parallel_size=1, world_size=world_size)
    return SimpleNamespace(
        device="cuda", rank=0, any_rank=bool, gather=gather, first_on_node=nullcontext, **sizes
    )


def table_bias(table):
    """Return a learned bias by distance and head."""

    def tile(rows, columns, table):
        at = [torch.arange(x.start, x.stop) for x in (rows, columns)]
        return table[(at[0][:, None] - at[1]).clamp(0, 11)].permute(2, 0, 1)[None]

    return Bias(
        tile,
        (table,),
        lambda b, h, q, k, table: table[(q - k).clamp(0, 11), h],
    )


@pytest.mark.parametrize("queries", [LENGTH, 9, 1])
@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_flex_equals_the_naive_backend_with_all_gradients(visibility, queries):
    tensors = draw_qkvz(LENGTH, HEADS, GROUPS, DIM, queries)
    table = draw(12, HEADS, seed=5)
    logits = draw(LENGTH, 2, HEADS, seed=6)
    options = {"visibility": visibility, "rotate": queries == LENGTH}
    options |= {"bias": table_bias(table), "log_gate_TBH": logsigmoid(logits)}
    ours, theirs = (
        attention(*tensors, backend=backend, **options) for backend in ("flex", "naive")
    )
    assert_same(ours, theirs, [*tensors, table, logits])


def pair_by_pair(bias, batch, heads, tokens):
    """Return the bias of every pair from `score`, (B, H, S, S)."""
    score = bias.score
    for axis in (3, 2, 1, 0):
        axes = [0 if i == axis else None for i in range(4)]
        score = torch.vmap(
            score,
            in_dims=(*axes, *(None for _ in bias.tensors)),
        )
    at = torch.arange(tokens)
    return score(
        torch.arange(batch),
        torch.arange(heads),
        at,
        at,
        *bias.tensors,
    )


@pytest.mark.parametrize("name", ["alibi", "t5", "gates"])
def test_the_bias_of_pairs_equals_the_bias_of_tiles(name):
    logits = draw(40, 2, 4, seed=3)
    tokens = 40
    if name == "gates":
        bias = gates_as_bias(
            logsigmoid(logits.float()),
            table_bias(draw(12, 4)).in_float32(),
        )
    else:
        built, _ = build(small_model(position_encoding=name))
        parameters = {
            key: draw(*x.shape).float() for key, x in built.encoding.parameters(0).items()
        }
        bias = built.encoding.position_inputs(
            0, parameters, None, torch.zeros(40, 2, 32), NO_CACHE
        ).bias
        assert built.encoding.needs == {POINTWISE}
    pairs = pair_by_pair(bias, 2, 4, tokens)
    tiles = bias.of(slice(0, tokens), slice(0, tokens))
    # A tile of gates may omit a constant per query.
    pairs, tiles = ((x - x[..., :1]).expand(2, -1, tokens, -1).tril() for x in (pairs, tiles))
    assert pairs.std() > 0.1
    torch.testing.assert_close(pairs, tiles, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "S, T",
    [(256, 256), (40, 300), (1, 129), (130, 390)],
)
@pytest.mark.parametrize("window", [None, 1, 60, 128, 200])
@pytest.mark.parametrize("packed", [False, True])
def test_the_block_mask_equals_the_mask_of_pairs(S, T, packed, window):
    visibility = None
    if packed:
        visibility = Visibility.of(torch.arange(T) // torch.tensor([[70], [140]]))
    if window is not None:
        visibility = (visibility or Visibility.of_whole(torch.zeros(2, T))).with_window(window)
    starts = None
    if visibility is not None:
        starts = visibility.bounds_2BT[0]
    ours = flex.block_mask(S, T, starts, CPU)
    theirs = create_block_mask(ours.mask_mod, 1 if starts is None else 2, 1, S, T, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_kernels_are_compared_with_plain_torch_before_a_run(monkeypatch):
    monkeypatch.setattr(choice, "why_not_importable", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(parity, "LENGTH", 40)
    alibi = dict(position_encoding="alibi", kv_channels=16)
    shapes = kernel_shapes(small_model(**alibi))
    assert len(parity.score_checks("flex", shapes, torch.float32, CPU)) == 2
    windowed = kernel_shapes(small_model(**alibi, sliding_window=5))
    assert [*parity.score_checks("flex", windowed, torch.float32, CPU)][2:] == [
        "attention with gates in a window"
    ]

    failures = []
    layout = layout_of(lambda value: [value, *failures])
    check = parity.backend_fails
    monkeypatch.setattr(
        model_backend,
        "backend_fails",
        lambda name, shapes, dtype, device, packed: check(name, shapes, dtype, CPU),
    )

    def verified(backend="auto", **options):
        model = small_model(**alibi, attention_backend=backend)
        return verified_backend(model, layout, torch.float32, **options)

    assert verified() == "flex"
    exact = flex.attend
    monkeypatch.setattr(
        flex,
        "attend",
        lambda x: tuple(1.01 * y for y in exact(x)),
    )
    assert verified(allow_slow=True) == "tiled"
    with pytest.raises(ConfigError) as error:
        verified()
    assert error.value.key == "model.attention_backend"
    assert "allow_slow_attention" in error.value.fix
    with pytest.raises(ConfigError):
        verified("flex", allow_slow=True)

    layout.world_size = 4
    elsewhere = model_backend._Failure("nodeB", 3, "is flex, which does not compile")
    failures[:] = [None, None, elsewhere]
    with pytest.raises(NodeError, match="ranks 0, 3 of 4") as error:
        verified()
    assert error.value.subjects[1:] == ("nodeB",)


def test_auto_uses_the_first_library_that_equals_plain_torch_on_every_rank(monkeypatch, caplog):
    packages = ("torch", "triton")
    monkeypatch.setattr(
        choice, "why_not_importable", lambda name: None if name in packages else "missing"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice._flash_attn_version.cache_clear()
    inexact = set()
    requested = []

    def here(name, shapes, dtype, device, packed):
        requested.append((name, packed))
        return "does not work here" if name in inexact else None

    monkeypatch.setattr(model_backend, "backend_fails", here)
    elsewhere = []
    layout = layout_of(
        lambda value: [value, elsewhere.pop(0) if elsewhere else None],
        world_size=2,
    )

    def verified(encoding, backend="auto", **options):
        model = small_model(position_encoding=encoding, kv_channels=32, attention_backend=backend)
        return verified_backend(model, layout, torch.bfloat16, **options)

    with caplog.at_level(logging.INFO):
        assert verified("tape") == "torch_wide"
        assert requested == [("torch_wide", False)]
    assert "the kernels of torch_wide agree with plain torch here" in caplog.text
    assert verified("tape", packed=True) == verified("tape", shifted_sparse=True) == "triton"
    assert requested[-1] == ("triton", True)

    # Another rank's kernels are wrong, so all ranks use the next row.
    problem = "is torch_wide, which is wrong"
    elsewhere[:] = [model_backend._Failure("nodeB", 1, problem, "torch_wide", replaceable=True)]
    assert verified("tape") == "triton"
    assert "rank 1, nodeB" in caplog.text

    inexact.add("torch")
    assert verified("rope") == "triton"
    with pytest.raises(NodeError):
        verified("rope", "torch")
    # Training does not continue with a slow backend if its kernels were wrong.
    inexact.add("triton")
    assert verified("rope", allow_slow=True) == "tiled"


def test_missing_kernels_are_refused_only_if_another_gpu_has_them(monkeypatch):
    """CoPE has no kernels on any GPU."""
    monkeypatch.setattr(
        choice, "why_not_importable", lambda name: None if name == "triton" else "is not installed"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(model_backend, "backend_fails", lambda *_, **__: None)
    choice._flash_attn_version.cache_clear()

    def verified(encoding, **options):
        model = small_model(position_encoding=encoding, kv_channels=260)
        layout = layout_of(lambda value: [value])
        return verified_backend(model, layout, torch.bfloat16, **options)

    with pytest.raises(ConfigError) as error:
        verified("tape")
    assert "260" in error.value.problem
    assert "allow_slow_attention" in error.value.fix
    assert verified("tape", allow_slow=True) == "torch"
    assert verified("cope") == "tiled"


@pytest.mark.parametrize("name", ["gates", "table"])
def test_the_compiled_bias_supports_gradients(name):
    """Compilation refuses tensors that need a gradient and are indexed twice; without compilation,
    they work.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph
    from torch._inductor.kernel.flex.flex_attention import validate_joint_graph

    if name == "table":
        bias = table_bias(draw(12, HEADS, seed=5))
    else:
        bias = gates_as_bias(logsigmoid(draw(40, 2, 4)))
    score = torch.zeros((), requires_grad=True)
    pair = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    tensors = tuple(x.detach().requires_grad_(x.requires_grad) for x in bias.tensors)
    with TransformGetItemToIndex():
        _, joint = create_fw_bw_graph(
            lambda score, *options: score + bias.score(*options), (score, *pair), tensors
        )
        traced = torch.fx.experimental.proxy_tensor.make_fx(joint)(
            score, *pair, torch.zeros(()), *tensors
        )
    validate_joint_graph(traced.graph)
