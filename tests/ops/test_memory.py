"""Memory-saving operations equal plain torch in float64, and save little for the backward pass."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from comparing import draw
from models import small_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_tape.errors import NodeError
from megatron_tape.model import backend
from megatron_tape.ops import chunks, parity
from megatron_tape.ops.backends import choice
from megatron_tape.ops.backends.table import CPU, GPUS, HOPPER
from megatron_tape.ops.linear_cross_entropy import linear_cross_entropy
from megatron_tape.ops.swiglu import swiglu

pytestmark = pytest.mark.gpu
S = 7
B = 3
C = 5
V = 11
WEIGHTS = torch.rand(B, S, generator=torch.Generator().manual_seed(4))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def labels_of(vocabulary=V, length=S):
    return torch.randint(
        vocabulary,
        (B, length),
        generator=torch.Generator().manual_seed(1),
    )


def plain(hidden, weight, labels, weights=None, z_loss=0.0):
    """Return the loss, the token losses and the z-loss, computed from the logits of all tokens."""
    logits = hidden @ weight.T
    losses = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    if weights is None:
        weights = torch.ones_like(losses) / losses.numel()
    squares = logits.logsumexp(-1).square().T
    return (losses * weights).sum(), losses, z_loss * (squares * weights).sum()


def set_chunk(monkeypatch, logits):
    """Set the maximum number of logits per chunk on all devices."""
    monkeypatch.setattr(chunks, "LOGITS", dict.fromkeys(chunks.LOGITS, logits))


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operator returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return result


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [1, 4, S * B, 100])
def test_the_chunked_loss_equals_the_loss_of_whole_logits(monkeypatch, tokens, z_loss, weighted):
    set_chunk(monkeypatch, tokens * V + 3)
    hidden = draw(S, B, C)
    weight = draw(V, C, seed=2)
    labels = labels_of()
    weights = WEIGHTS if weighted else None
    loss, by_token, of_z = linear_cross_entropy(hidden, weight, labels, weights, z_loss=z_loss)
    expected, of_tokens, expected_of_z = plain(hidden, weight, labels, weights, z_loss)
    torch.testing.assert_close(by_token, of_tokens.detach())
    torch.testing.assert_close(of_z, expected_of_z.detach())
    assert not by_token.requires_grad
    assert not of_z.requires_grad
    # The gradient can be computed only once.
    ours = [
        3.0 * loss,
        *torch.autograd.grad(
            3.0 * loss,
            (hidden, weight),
        ),
    ]
    together = 3.0 * (expected + expected_of_z)
    torch.testing.assert_close(
        ours, [3.0 * expected, *torch.autograd.grad(together, (hidden, weight))]
    )


@pytest.mark.parametrize("tokens", [4, 100])
@pytest.mark.parametrize("weighted, z_loss", [(False, 0.0), (True, 0.3)])
def test_liger_kernels_compute_the_same_loss(monkeypatch, tokens, weighted, z_loss):
    pytest.importorskip("liger_kernel")
    set_chunk(monkeypatch, tokens * V)
    weights = WEIGHTS.to(DEVICE) if weighted else None
    results = []
    for fused in (True, False):
        hidden, weight = (
            draw(*shape, dtype=torch.float32).to(DEVICE).detach() for shape in ((S, B, C), (V, C))
        )
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        loss, by_token, of_z = linear_cross_entropy(
            *inputs, labels_of().to(DEVICE), weights, fused=fused, z_loss=z_loss
        )
        results.append((loss.detach(), by_token, of_z, *torch.autograd.grad(3.0 * loss, inputs)))
    for ours, plain_torch in zip(*results):
        torch.testing.assert_close(ours, plain_torch, rtol=1e-5, atol=1e-6)


def test_liger_kernels_are_checked_before_training(monkeypatch):
    kernels = pytest.importorskip("megatron_tape.ops.kernels.liger")
    device = torch.device(DEVICE)

    def failure():
        checks = {"loss": parity.loss_check(V, torch.float32, device)}
        return parity.first_failure(checks, torch.float32, device)

    assert failure() is None
    monkeypatch.setattr(kernels, "to_gradients", lambda exponentials, *_: exponentials)
    assert "tensor 1" in failure()
    monkeypatch.setattr(kernels, "exponentials", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in failure()


def test_ranks_agree_on_the_fused_kernels(monkeypatch):
    elsewhere = []
    requested = []
    answers = dict.fromkeys(("loss", "swiglu", "position update"))
    layout = SimpleNamespace(
        device="cuda",
        rank=0,
        world_size=2,
        tensor_parallel_size=2,
        context_parallel_size=1,
        first_on_node=contextlib.nullcontext,
        gather=lambda value: [value, elsewhere.pop(0) if elsewhere else None],
    )
    for name in ("loss", "swiglu"):
        make = lambda size, *_, n=name: requested.append((n, size))  # noqa: E731
        monkeypatch.setattr(backend, f"{name}_check", make)
    monkeypatch.setattr(backend, "update_checks", lambda *_: {"position update": None})
    monkeypatch.setattr(
        backend,
        "first_failure",
        lambda checks, *_: answers[next(iter(checks))],
    )
    monkeypatch.setattr(backend, "unsupported", lambda *_: answers.get("triton"))
    tape, rope = (small_model(position_encoding=name) for name in ("tape", "rope"))

    def verified(model=tape, dtype=torch.bfloat16, **options):
        return backend.verified_kernels(model, layout, dtype, **options)

    assert verified() == backend.FusedKernels(position_update=True, swiglu=True, loss=True)
    assert requested == [("swiglu", tape.ffn_hidden_size // 2), ("loss", tape.vocab_size // 2)]
    # RoPE has no position update, and in fp32 the loss uses plain torch.
    assert verified(rope, torch.float32) == backend.FusedKernels(swiglu=True)
    elsewhere[:] = [None, None, backend._Failure("nodeB", 1, "liger-kernel is not installed")]
    assert not verified().loss

    answers["position update"] = "does not work here (position update)"
    with pytest.raises(NodeError):
        verified()
    assert not verified(allow_slow=True).position_update
    named = small_model(position_encoding="tape", attention_backend="torch")
    assert not verified(named).position_update

    answers["triton"] = "is not installed"
    assert verified() == backend.FusedKernels()
    # A wrong update on a rank with Triton ends the run on the ranks without Triton, too.
    elsewhere[:] = [None, backend._Failure("nodeB", 1, "does not work here", "position_update")]
    with pytest.raises(NodeError) as error:
        verified()
    assert error.value.subjects == ("nodeB",)
    layout.device = "cpu"
    assert verified() == backend.FusedKernels()


def test_the_bf16_rounding_error_does_not_exceed_that_of_whole_logits(monkeypatch):
    """Chunks accumulate the gradient of the weight in fp32, which is rounded once."""
    length = 64
    vocabulary = 96
    shapes = ((length, B, 16), (vocabulary, 16))
    inputs = [draw(*shape, seed=5).bfloat16().detach() for shape in shapes]
    labels = labels_of(vocabulary, length)
    set_chunk(monkeypatch, 5 * vocabulary)

    def of_whole_logits(hidden, weight):
        logits = hidden @ weight.T
        if logits.dtype is torch.bfloat16:
            logits = logits.float()
        return F.cross_entropy(logits.permute(1, 2, 0), labels)

    def gradients(loss, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return [x.double() for x in torch.autograd.grad(loss(*leaves), leaves)]

    exact = gradients(of_whole_logits, torch.float64)
    plain = gradients(of_whole_logits, torch.bfloat16)
    ours = gradients(lambda *x: linear_cross_entropy(*x, labels)[0], torch.bfloat16)
    for own, theirs, truth in zip(ours, plain, exact):
        assert (own - truth).norm() <= 1.1 * (theirs - truth).norm()


@pytest.mark.parametrize("gradient", [True, False])
def test_at_most_one_chunk_of_logits_exists(monkeypatch, gradient):
    tokens = 2
    vocabulary = 50
    hidden = draw(S, B, C)
    weight = draw(vocabulary, C)
    labels = labels_of(vocabulary)
    set_chunk(monkeypatch, tokens * vocabulary)
    with Largest() as largest, torch.set_grad_enabled(gradient):
        loss, *_ = linear_cross_entropy(hidden, weight, labels)
        assert loss.requires_grad == gradient
        if gradient:
            loss.backward()
    assert largest.numbers == max(tokens * vocabulary, vocabulary * C) < S * B * vocabulary / 4


def test_chunks_are_larger_on_gpus_with_much_memory(monkeypatch):
    assert chunks.LOGITS.keys() == GPUS | {CPU}
    assert chunks.chunk_size(2**15, CPU) == 2**11
    assert chunks.chunk_size(2**15, HOPPER) == 2**13
    assert chunks.chunk_size(2**40, HOPPER) == 1

    vocabulary = 50
    monkeypatch.setattr(chunks, "LOGITS", {CPU: 2 * vocabulary, HOPPER: 6 * vocabulary})
    for generation, tokens in ((CPU, 2), (HOPPER, 6)):
        monkeypatch.setattr(choice, "generation", lambda device, name=generation: name)
        with Largest() as largest:
            linear_cross_entropy(draw(S, B, 2), draw(vocabulary, 2), labels_of(vocabulary))
        assert largest.numbers == tokens * vocabulary


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_equals_plain_torch_and_saves_only_its_input(dtype):
    both = draw(S, B, 2 * C, dtype=dtype)
    saved = []
    gate, up = both.chunk(2, dim=-1)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x) or x,
        lambda x: x,
    ):
        ours = swiglu(both)
    assert [x.data_ptr() for x in saved] == [both.data_ptr()]
    theirs = F.silu(gate) * up
    direction = draw(S, B, C, dtype=dtype, seed=8).detach()
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x, both, direction) for x in (ours, theirs)))
