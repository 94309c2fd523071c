"""Check kernels on a device: errors relative to float64 may be at most twice those of plain torch
in the same dtype.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from megatron_tape.ops.attention import attention
from megatron_tape.ops.attention_inputs import split
from megatron_tape.ops.backends import LIBRARIES
from megatron_tape.ops.decay import STRONGEST, with_decay
from megatron_tape.ops.householder import through_reflections
from megatron_tape.ops.linear_cross_entropy import linear_cross_entropy
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update
from megatron_tape.ops.swiglu import swiglu
from megatron_tape.ops.visibility import Visibility

FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
"""Relative error that is always allowed, since plain torch may be exact by chance for small
tensors.
"""

ROWS = 16
"""Rows (of the first axis) per block. Each block is compared separately, in addition to the whole
tensor.
"""

LENGTH = 272
"""Sequence length in checks of attention: several tiles of each kernel and a partial one."""
LENGTHS = (LENGTH, 192)
"""Sequence lengths in checks of the backends in `LIBRARIES`. 192 is 64 modulo 128; at such lengths
a cuDNN kernel returned NaN (pytorch issue 196678)."""

WEAK = 5.0
"""Added to the logits of gates. Each then lowers the scores of earlier tokens by about 0.01."""

PACKED = " of packed documents"
"""Suffix of the names of checks with packed documents."""
WINDOWED = " in a window"
"""Suffix of the names of checks with a sliding window."""

Outputs = Sequence[Tensor | None]
Function = Callable[..., Outputs]
"""A function to check, from tensors to its outputs; an output that it does not have is None."""


@dataclass(frozen=True)
class Deviation:
    """Relative error of one of a kernel's outputs or gradients, and the `rounding` error of plain
    torch.
    """

    tensor: int
    """Index in the list of outputs followed by gradients."""
    rows: tuple[int, int]
    """First and last of the compared rows."""
    error: float
    rounding: float
    allowed: float

    @property
    def exact(self) -> bool:
        """Whether the error is at most the allowed one; false for NaN."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        """Return a sentence with the place and the size of the error."""
        first, last = self.rows
        return (
            f"tensor {self.tensor}, rows {first} to {last}, is off by {self.error:.1e} (allowed:"
            f" {self.allowed:.1e}, plain torch: {self.rounding:.1e})"
        )


def deviations(
    ours: Function,
    plain: Function,
    inputs: list[Tensor],
    dtype: torch.dtype,
) -> Iterator[Deviation]:
    """Yield the deviations of `ours` from `plain` in float64, compared with those of `plain` in
    `dtype`.

    Both functions map `inputs` to tensors or None. All outputs are compared and, for random
    gradients of the outputs, the gradients of all inputs. Each tensor is compared as a whole and in
    blocks of `ROWS` rows, since an error in a few rows would vanish in the norm of the whole
    tensor.
    """

    def outputs_and_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs and the gradients of `inputs`, in float64."""
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = [x for x in function(*leaves) if x is not None]
        # The three calls of this function have outputs of different dtypes, but get the same random
        # gradients, rounded to `dtype`.
        generator = torch.Generator(outputs[0].device).manual_seed(1)
        output_gradients = []
        for x in outputs:
            gradient = torch.randn(x.shape, generator=generator, device=x.device)
            output_gradients.append(gradient.to(dtype).to(x))
        torch.autograd.backward(outputs, output_gradients)

        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [x.detach().double() for x in (*outputs, *gradients)]

    our_results = outputs_and_gradients(ours, inputs)
    plain_results = outputs_and_gradients(plain, [x.to(dtype) for x in inputs])
    exact_results = outputs_and_gradients(plain, [x.double() for x in inputs])
    results = zip(our_results, plain_results, exact_results, strict=True)
    for index, (our, theirs, truth) in enumerate(results):
        length = len(truth)
        blocks = [slice(0, length)]
        for first in range(0, length, ROWS):
            blocks.append(slice(first, min(first + ROWS, length)))

        for block in blocks:
            true_block = truth[block]
            # Errors are relative to the norm of the block, but at least to the norm of ones: if the
            # exact gradient is zero, errors relative to its own norm are meaningless.
            norm = true_block.norm().clamp(min=true_block.numel() ** 0.5)
            error = float((our[block] - true_block).norm() / norm)
            rounding = float((theirs[block] - true_block).norm() / norm)
            allowed = 2 * rounding + FLOOR[dtype]
            yield Deviation(index, (block.start, block.stop - 1), error, rounding, allowed)


def inexact(
    ours: Function,
    plain: Function,
    inputs: list[Tensor],
    dtype: torch.dtype,
) -> str | None:
    """Return a sentence about the first of the `deviations` that is not exact, or None if all
    are.
    """
    for deviation in deviations(ours, plain, inputs, dtype):
        if not deviation.exact:
            return str(deviation)
    return None


@dataclass(frozen=True)
class Shapes:
    """What determines the kernels that a model compiles: its sizes (heads and groups of all ranks)
    and options.
    """

    heads: int
    groups: int
    head_dim: int
    averages: bool
    """Whether the position state is averaged and updated (TAPE)."""
    inner: int = 0
    """Width of the position MLP."""
    full_mixing: bool = True
    """Whether token mixing is a matrix, not one scale per head."""
    fp32_state: bool = True
    """Whether the position state is in fp32 even if other tensors are in a 16-bit dtype."""
    tensor_parallel_size: int = 1
    reflects: bool = False
    """Whether scores use the reflections of the tokens between query and key (PaTH)."""
    decays: bool = False
    """Whether channels of queries and keys decay (Wall attention)."""
    gated: bool = False
    """Whether they do so together with forget gates."""
    context_parallel_size: int = 1
    windowed: bool = False
    """Whether some layers have a sliding window."""

    @property
    def heads_and_groups_per_rank(self) -> tuple[int, int]:
        """Query heads and key/value groups per rank in attention, where context parallelism divides
        them too.
        """
        groups = self.groups // self.tensor_parallel_size
        ranks = self.context_parallel_size
        heads = self.heads // self.tensor_parallel_size // ranks
        # Groups are copied until the ranks can divide them evenly: several ranks may hold the same
        # group.
        return heads, math.lcm(groups, ranks) // ranks


class Check(NamedTuple):
    """A kernel, its reference in plain torch, and the inputs for which they must agree."""

    ours: Function
    plain: Function
    inputs: list[Tensor]


def kernel_checks(
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    length: int | None,
    tokens: int = 48,
) -> dict[str, Check]:
    """Return the checks of the project's Triton kernels by name.

    Attention is checked on two sequences of `length` tokens (default: `LENGTH`), the position
    update on `tokens` tokens.
    """
    checks = attention_checks("triton", shapes, dtype, device, length or LENGTH)
    return checks | update_checks(shapes, dtype, device, tokens)


def attention_checks(
    backend: str,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
) -> dict[str, Check]:
    """Return checks of `backend` against naive by name, on two sequences of `length` tokens, packed
    and not packed.
    """
    draw = _random_tensors(dtype, device)
    H, G = shapes.heads_and_groups_per_rank
    D = shapes.head_dim
    # As in a model, queries, keys and values are the parts of one projection.
    widths = [H // G * D, D, D]
    qkv = draw(length, 2, G, sum(widths))
    z = draw(length, 2, G, D)

    def rotate_and_attend(
        qkv: Tensor,
        *learned_state: Tensor,
        backend: str,
        **options: Any,
    ) -> Outputs:
        """Return the averages. `learned_state` is the state or, if it needs no gradient, nothing;
        it is then the constant z.
        """
        # The reference must not use the kernel that concatenates gradients.
        if backend == "naive":
            q, k, v = qkv.split(widths, dim=-1)
        else:
            q, k, v = split(qkv, widths)

        if learned_state:
            (state,) = learned_state
        else:
            state = z.to(q)
        # Memory for [v | z] that contains z, as the position update provides it. naive ignores it.
        joined = torch.cat([torch.zeros_like(v), state.detach()], dim=-1)
        return attention(
            q.reshape(length, 2, H, D),
            k,
            v,
            state,
            joined_TBGE=joined,
            backend=backend,
            **options,
        )

    with_each_visibility = partial(_with_each_visibility, windowed=shapes.windowed)
    if not shapes.averages:
        return with_each_visibility("", rotate_and_attend, backend, [qkv])
    # The first layer's state needs no gradient and the last layer's is not averaged; both cases
    # have separate kernels.
    average = partial(rotate_and_attend, average_state=True)
    return {
        **with_each_visibility("", average, backend, [qkv, z]),
        **with_each_visibility(" in the first layer", average, backend, [qkv]),
        **with_each_visibility(" in the last layer", rotate_and_attend, backend, [qkv, z]),
    }


def update_checks(
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int = 48,
) -> dict[str, Check]:
    """Return the check of the fused position update by name, or nothing if the model cannot use
    it.
    """
    H = shapes.heads
    G = shapes.groups
    if not (shapes.averages and fits_fused(G, H)):
        return {}
    draw = _random_tensors(dtype, device)
    D = shapes.head_dim
    P = shapes.inner
    mixing: tuple[int, ...] = (H,)
    if shapes.full_mixing:
        mixing = (G, H)
    # The inputs are z, u and the gate, then A, W_up and W_down.
    states = [draw(tokens, G, D), draw(tokens, H, D), draw(tokens, P)]
    matrices = []
    for shape in (mixing, (P, G), (G, P)):
        # Scaled, so that products have about the size of their inputs.
        matrices.append(draw(*shape) * shape[-1] ** -0.5)
    fused = partial(_update, fused_update, shapes.fp32_state)
    plain = partial(_update, _plain_update, shapes.fp32_state)
    return {"position update": Check(fused, plain, [*states, *matrices])}


def score_checks(
    backend: str,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Check]:
    """Return the checks of `backend`, flex or fla, by name.

    They cover reflections with and without gates if `shapes.reflects`, decays and a sink if
    `shapes.decays`, with gates if `shapes.gated`, otherwise gates. A bias takes the same path
    through flex as gates.
    """
    draw = _random_tensors(dtype, device)
    H, G = shapes.heads_and_groups_per_rank
    D = shapes.head_dim
    qkv = [draw(LENGTH, 2, n, D) for n in (H, G, G)]

    def draw_logits(*shape: int) -> Tensor:
        """Return logits of gates or decays of two sequences.

        They are strong in the first one. In the second one they are weak, so that tokens outside of
        a window would have weight.
        """
        logits = draw(*shape)
        logits[:, 1] += WEAK
        return logits

    logits = draw_logits(LENGTH, 2, H)
    with_each_visibility = partial(_with_each_visibility, windowed=shapes.windowed)
    if shapes.decays:
        tensors = [*qkv, draw_logits(LENGTH, 2, H, D), draw(H)]
        if shapes.gated:
            tensors.append(logits)
        return with_each_visibility(" with decays", _with_decays, backend, tensors)
    if not shapes.reflects:
        return with_each_visibility(" with gates", _with_gates, backend, [*qkv, logits])

    tensors = [*qkv, draw(LENGTH, 2, G, D), draw(LENGTH, 2, G)]
    name = " through reflections"
    without_gates = with_each_visibility(name, _with_reflections, backend, tensors)
    tensors = [*tensors, logits]
    return without_gates | with_each_visibility(
        f"{name} with gates", _with_reflections, backend, tensors
    )


def _random_tensors(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Return a function that draws a normal tensor of the shape of its arguments."""
    # Numbers are drawn on the CPU, so that they are the same for all devices.
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


def _with_each_visibility(
    name: str,
    attend: Callable[..., Outputs],
    backend: str,
    inputs: list[Tensor],
    windowed: bool,
) -> dict[str, Check]:
    """Return checks of `attend(*inputs, backend=..., visibility=...)` against naive: for whole
    sequences, for documents and, if `windowed`, for a window.

    `name` is the part of the checks' names that follows "attention".
    """
    length = len(inputs[0])
    device = inputs[0].device
    # Two documents in each of the two sequences; the second one starts inside a tile.
    starts = torch.tensor([[3 * length // 8], [5 * length // 8 + 1]], device=device)
    documents = torch.arange(length, device=device) >= starts
    checks = {}
    visibilities = {"": None, PACKED: Visibility.of(documents)}
    if windowed:
        # Queries attend to some keys of an earlier tile, but not to all.
        whole = Visibility.of_whole(documents.long())
        visibilities[WINDOWED] = whole.with_window(length // 3 + 1)
    for suffix, visibility in visibilities.items():
        ours = partial(attend, backend=backend, visibility=visibility)
        plain = partial(attend, backend="naive", visibility=visibility)
        checks[f"attention{name}{suffix}"] = Check(ours, plain, inputs)
    return checks


def _with_gates(*tensors: Tensor, **options: Any) -> Outputs:
    """Return attention with forget gates; `tensors` are q, k, v and the logits of the gates.

    `options` are `backend` and `visibility`.
    """
    *qkv, logits = tensors
    return attention(*qkv, log_gate_TBH=_gates(logits), **options)


def _with_decays(*tensors: Tensor, **options: Any) -> Outputs:
    """Return attention with decays; `tensors` are q, k, v, the logits of the decays, the sink and,
    optionally, the logits of gates.

    `options` are `backend` and `visibility`.
    """
    q, k, v, logits, sink, *gate_logits = tensors
    log_decay = STRONGEST * torch.expm1(_gates(logits) / STRONGEST)
    fields: dict[str, Any] = {"rescore": with_decay(log_decay), "sink_H": sink}
    if gate_logits:
        fields["log_gate_TBH"] = _gates(gate_logits[0])
    return attention(q, k, v, **fields, **options)


def _gates(logits: Tensor) -> Tensor:
    """Return the logarithms of the gates, at least in float32, as `position.fox` does."""
    return logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))


def _with_reflections(
    *tensors: Tensor,
    backend: str,
    visibility: Visibility | None,
) -> Outputs:
    """Return attention with reflections; `tensors` are q, k, v, w, the logits of beta and,
    optionally, of gates.

    The naive backend rounds its precomputed tensors to the keys' dtype, as a kernel does.
    """
    q, k, v, w, beta_logits, *gate_logits = tensors

    def directions(w: Tensor, beta_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors w, and beta between 0 and 2."""
        return normalize(w, dim=-1), 2 * beta_logits.sigmoid()

    reflections = through_reflections(directions, (w, beta_logits))
    prepare = reflections.prepare

    def prepare_rounded(q: Tensor, k: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of `Rescore.prepare`, rounded to the dtype of `k`."""
        return tuple(x.to(k.dtype) for x in prepare(q, k, *tensors))

    if backend == "naive":
        reflections = replace(reflections, prepare=prepare_rounded)
    fields: dict[str, Any] = {"visibility": visibility, "rescore": reflections}
    if gate_logits:
        fields["log_gate_TBH"] = _gates(gate_logits[0])
    return attention(q, k, v, backend=backend, **fields)


def _update(
    function: Callable[..., Outputs],
    fp32_state: bool,
    z: Tensor,
    *tensors: Tensor,
) -> Outputs:
    """Return the state that `function` updates, and its copies; `tensors` are u, the gate and the
    matrices.

    With `fp32_state`, the state is in fp32, with values that a 16-bit dtype cannot represent; z
    then stands for the state rounded to this dtype.
    """
    state = z
    if fp32_state and z.dtype.itemsize == 2:
        # 1.0001 differs from 1 by less than bf16 can represent.
        state = z.float() * 1.0001
    return function(state, *tensors, rounded_NGD=z)


def _plain_update(z: Tensor, *tensors: Tensor, rounded_NGD: Tensor) -> Outputs:
    """Return the state that `plain_update` computes, and its copies, as `fused_update` does."""
    new = plain_update(z, *tensors)
    copy = new.to(rounded_NGD.dtype)
    return new, copy, copy


def backend_fails(
    backend: str,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = True,
) -> str | None:
    """Return why `backend` fails on `device` for a model of `shapes`, as the predicate of a
    sentence, or None.

    This compiles and runs the backend's kernels and compares them with plain torch. For the
    backends in `LIBRARIES`, packed documents are checked only if `packed` is True.
    """
    # flex and fla run only with encodings that change scores.
    if backend in ("flex", "fla"):
        return first_failure(score_checks(backend, shapes, dtype, device), dtype, device)
    if backend not in LIBRARIES:
        checks = attention_checks(backend, shapes, dtype, device, LENGTH)
        return first_failure(checks, dtype, device)
    for length in LENGTHS:
        checks = attention_checks(backend, shapes, dtype, device, length)
        if not packed:
            checks = {name: check for name, check in checks.items() if PACKED not in name}
        if why := first_failure(checks, dtype, device):
            return why
    return None


def first_failure(
    checks: Mapping[str, Check],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return why the first kernel that fails its check cannot be used, as the predicate of a
    sentence, or None.
    """
    where = device.type
    if where == "cuda":
        where = torch.cuda.get_device_name(device)
    for name, check in checks.items():
        try:
            why = inexact(*check, dtype)
        except torch.OutOfMemoryError:
            # Running out of memory says nothing about the kernel.
            raise
        except Exception as error:  # a compiler may raise anything
            first_line = str(error).partition("\n")[0]
            why = f"{type(error).__name__}: {first_line}"
        if why:
            return f"does not work here ({name} on {where}; {why})"
    return None


def loss_check(
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Check:
    """Return the check of Liger's kernels, for an unsharded vocabulary and for the second of two
    shards.

    `vocabulary` is the size of this rank's shard, for which the kernels are compiled.
    """
    generator = torch.Generator().manual_seed(0)
    # Labels of two shards; half of them are not in the second one.
    labels = torch.randint(2 * vocabulary, (2, 35), generator=generator).to(device)
    weights = torch.rand(labels.shape, generator=generator).to(device)
    # The shapes of hidden states (S, B, C) and of the weight's shard (V, C).
    shapes = (35, 2, 16), (vocabulary, 16)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    def losses(hidden: Tensor, weight: Tensor, fused: bool) -> list[Tensor]:
        """Return a list with one tensor (2,): the losses for the unsharded vocabulary and for the
        shard.
        """
        values = []
        # Unsharded, all labels are below `vocabulary`; the second shard begins at this label.
        for own_labels, first_label in ((labels % vocabulary, 0), (labels, vocabulary)):
            loss, *_ = linear_cross_entropy(
                hidden,
                weight,
                own_labels,
                weights,
                fused=fused,
                first_label=first_label,
                z_loss=0.1,
            )
            values.append(loss)
        return [torch.stack(values)]

    return Check(partial(losses, fused=True), partial(losses, fused=False), inputs)


def swiglu_check(
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Check:
    """Return the check of the fused SwiGLU; `width` is the size of this rank's shard of the MLP."""

    def run(gate_and_up: Tensor, fused: bool) -> list[Tensor]:
        """Return a list with the result of `swiglu`."""
        return [swiglu(gate_and_up, fused)]

    gate_and_up = _random_tensors(dtype, device)(35, 2, 2 * width)
    return Check(partial(run, fused=True), partial(run, fused=False), [gate_and_up])
