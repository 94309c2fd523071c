"""Choose a model's attention backend and fused kernels, and verify them on the device. Imports
torch, not Megatron.
"""

import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import ConfigError, NodeError, UserError
from megatron_tape.io.versions import node_name
from megatron_tape.ops.backends import AVERAGE, DECAY, GATE, LIBRARIES, REFLECTIONS, lacks
from megatron_tape.ops.backends.choice import Choice, choose_backend, unsupported
from megatron_tape.ops.parity import (
    Shapes,
    backend_fails,
    first_failure,
    loss_check,
    swiglu_check,
    update_checks,
)
from megatron_tape.position import attention_needs, encoding_of

logger = logging.getLogger(__name__)

_COMPILED = ("triton", "flex", "fla")
"""Backends whose kernels are compiled at run time."""
_PLAIN = ("torch", "tiled", "naive")
"""Backends in plain torch that `train.allow_slow_attention` falls back to, the fastest on a GPU
first.
"""


class _Failure(NamedTuple):
    """Why a rank cannot train with its backend or kernel."""

    node: str
    rank: int
    problem: str
    """A predicate with the subject `model.attention_backend`, such as "is flex, which does not work
    here (...)".
    """
    inexact: str | None = None
    """The backend or kernel whose results on this rank differ from plain torch, or that raises an
    error here.
    """
    replaceable: bool = False
    """Whether `auto` may try another backend: only if the kernels that failed are another
    library's, not this project's.
    """


@dataclass(frozen=True)
class FusedKernels:
    """Whether a model uses Triton kernels instead of plain torch in each of these places."""

    position_update: bool = False
    swiglu: bool = False
    loss: bool = False


def chosen_backend(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shifted_sparse: bool = False,
) -> str:
    """Return the name of the backend that `model.attention_backend` selects on `device`.

    `shifted_sparse` is whether heads attend within shifted segments (`ops.shifted`).
    """
    return backend_choice(model_config, dtype, device, shifted_sparse).backend


def backend_choice(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shifted_sparse: bool,
    packed: bool = False,
    without: Set[str] = frozenset(),
) -> Choice:
    """Return the backend that `model.attention_backend` selects on `device`, with the reason for
    this choice.

    `auto` never selects a backend in `without`. Its choice also depends on whether heads attend
    within shifted segments (`shifted_sparse`), and on whether sequences are `packed` documents.
    Raises ConfigError if a named backend cannot run on `device`, or does not support the positional
    encoding.
    """
    grouped = model_config.query_groups < model_config.num_attention_heads
    return choose_backend(
        model_config.attention_backend,
        device,
        dtype,
        model_config.head_dim,
        attention_needs(model_config),
        segments=shifted_sparse,
        packed=packed,
        without=without,
        grouped=grouped,
    )


def kernel_shapes(
    model_config: ModelConfig,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
) -> Shapes:
    """Return the sizes for which a model's Triton kernels are compiled, for `ops.parity` to compare
    with torch.
    """
    encoding = encoding_of(model_config)
    layers = range(model_config.num_layers)
    return Shapes(
        heads=model_config.num_attention_heads,
        groups=model_config.query_groups,
        head_dim=model_config.head_dim,
        averages=AVERAGE in encoding.needs and any(map(encoding.updates, layers)),
        tensor_parallel_size=tensor_parallel_size,
        reflects=REFLECTIONS in encoding.needs,
        decays=DECAY in encoding.needs,
        gated=GATE in encoding.needs,
        windowed=model_config.needs_window,
        context_parallel_size=context_parallel_size,
        **encoding.update_kernel_shape,
    )


def verified_backend(
    model_config: ModelConfig,
    layout,
    dtype: torch.dtype,
    shifted_sparse: bool = False,
    allow_slow: bool = False,
    packed: bool = False,
) -> str:
    """Return the attention backend that all ranks of `layout` use, and log the reason. All ranks
    call this together.

    On a GPU the backend's kernels are first compared with plain torch. One rank of each node does
    this before the others, which then find the compiled kernels in the node's cache.

    If the kernels of another library fail on any rank (they raise an error, or their results
    differ), `auto` tries the next backend of `ops.backends.table` on all ranks. If this project's
    own kernels fail, `auto` falls back to plain torch on all ranks and logs a warning, but only
    with `allow_slow`. If there is no other backend to use, this raises ConfigError, or NodeError if
    the backend failed only on some ranks.
    """
    device = torch.device(layout.device)
    auto = model_config.attention_backend == "auto"
    shapes = kernel_shapes(model_config, layout.tensor_parallel_size, layout.context_parallel_size)
    # Names of the backends whose kernels failed on any rank.
    failed: set[str] = set()

    # Each round checks one backend on all ranks, until one works everywhere.
    while True:
        chosen = backend_choice(model_config, dtype, device, shifted_sparse, packed, without=failed)
        backend = chosen.backend
        is_library = backend in LIBRARIES
        # Whether this rank compares the backend's kernels with plain torch.
        checked = backend in _COMPILED or (device.type == "cuda" and is_library)
        # `first_on_node` contains barriers. If any rank has kernels to compare, all ranks enter it,
        # also those whose GPU model led to a backend that needs no check.
        mismatch = None
        if layout.any_rank(checked):
            with layout.first_on_node():
                if checked:
                    # Shifted sparse attention passes its segments to the kernels as packed
                    # documents.
                    mismatch = backend_fails(
                        backend,
                        shapes,
                        dtype,
                        device,
                        packed=packed or shifted_sparse,
                    )

        problem = _why_slow(model_config, chosen, dtype, device)
        inexact = None
        if mismatch is not None:
            problem = f"is {backend}, which {mismatch}"
            inexact = backend
        # A slow backend is not replaced: all that follow it in the table are even slower.
        replaceable = auto and is_library and not chosen.slow
        # Decide from the failures of all ranks, so that all ranks decide the same.
        failures = _gather_failures(layout, problem, inexact, replaceable)
        failed |= {failure.inexact for failure in failures if failure.inexact}
        if not failures:
            break

        if all(failure.replaceable for failure in failures):
            node, rank, problem, *_ = failures[0]
            logger.warning("attention backend rejected: it %s (rank %d, %s)", problem, rank, node)
            continue

        error = _error_of(failures, layout.world_size, auto)
        if not allow_slow or not auto:
            raise error
        logger.warning(
            "WARNING: train.allow_slow_attention lets training continue with slower attention in"
            " plain torch: %s %s",
            error.subject,
            error.problem,
        )
        plain = [name for name in _PLAIN if name not in failed]
        # The backend torch materializes all S x S scores of encodings that change scores, such as
        # by a bias. These are the encodings that this project's Triton kernel does not support.
        if lacks("triton", attention_needs(model_config)):
            plain.remove("torch")
        chosen = Choice(plain[0], "as train.allow_slow_attention allows")
        # The fallback was not compared with anything, so the log must not say that it agrees.
        checked = False
        break

    if checked:
        logger.info("the kernels of %s agree with plain torch here", chosen.backend)
    logger.info("attention backend: %s, %s", chosen.backend, chosen.reason)
    return chosen.backend


def _gather_failures(
    layout,
    problem: str | None,
    inexact: str | None,
    replaceable: bool = False,
) -> list[_Failure]:
    """Return the failures of all ranks. All ranks call this together.

    The arguments are the fields of this rank's `_Failure`. If `problem` is None, this rank has not
    failed.
    """
    failure = None
    if problem is not None:
        failure = _Failure(node_name(), layout.rank, problem, inexact, replaceable)
    return [failure for failure in layout.gather(failure) if failure is not None]


def _why_slow(
    model_config: ModelConfig,
    chosen: Choice,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return why a GPU must use slow attention although some kernels support the model, or None if
    it need not.
    """
    needs = attention_needs(model_config)
    # Kernels that support the model; if there are none, slow attention is all there is.
    supporting = [name for name in _COMPILED if not lacks(name, needs)]
    if device.type != "cuda" or not chosen.slow or not supporting:
        return None

    reasons = []
    for name in supporting:
        reason = unsupported(name, device, dtype, model_config.head_dim, needs)
        if reason:
            reasons.append(f"{name} {reason}")
    return (
        f"is auto, but no attention kernel for this model runs on this GPU ({'; '.join(reasons)})"
    )


def _error_of(failures: list[_Failure], world_size: int, auto: bool) -> UserError:
    """Return a ConfigError if all ranks failed, else a NodeError that names the nodes of the ranks
    that failed.
    """
    node, rank, problem, *_ = failures[0]
    ranks = f"rank {rank}"
    if len(failures) > 1:
        # The first few, since there may be thousands.
        ranks = f"ranks {', '.join(str(failure.rank) for failure in failures[:8])}"
    fallback = ""
    if auto:
        fallback = (
            "; to train with slower attention in plain torch, set train.allow_slow_attention: true"
        )
    if len(failures) == world_size:
        return ConfigError(
            ("model.attention_backend", "model.position_encoding"),
            f"{problem} ({ranks}, {node})",
            f"fix this, or choose another backend{fallback}",
        )
    # If only some ranks failed, the cause is their nodes, not the settings.
    return NodeError(
        tuple(dict.fromkeys(failure.node for failure in failures)),
        f"({ranks} of {world_size}) cannot train with the other nodes: model.attention_backend"
        f" {problem}",
        f"fix or exclude the node{fallback}",
    )


def verified_kernels(
    model_config: ModelConfig,
    layout,
    dtype: torch.dtype,
    allow_slow: bool = False,
) -> FusedKernels:
    """Return the fused kernels, apart from attention, that all ranks of `layout` use, and log the
    reasons.

    All ranks call this together. A kernel is used on GPUs with Triton if its results agree with
    plain torch on every rank. The loss also requires liger-kernel and a 16-bit dtype. If the
    position update's kernel fails although Triton works, this raises an error like
    `verified_backend`. With `allow_slow`, or if `model.attention_backend` is neither auto nor
    triton, the update uses plain torch instead.
    """
    device = torch.device(layout.device)
    if device.type != "cuda":
        return FusedKernels()

    size = layout.tensor_parallel_size
    shapes = kernel_shapes(model_config, size, layout.context_parallel_size)
    # Why Triton cannot run here, or None. The head dimension does not matter for these kernels; 64
    # is one that passes the check.
    without_triton = unsupported("triton", device, dtype, 64)
    # Whether this raises an error if the position update's kernel fails.
    required = model_config.attention_backend in ("auto", "triton") and not allow_slow
    ffn_width = model_config.ffn_hidden_size // size
    vocabulary = model_config.vocab_size // size

    # For each kernel, a function that returns its checks by name. The inputs of the checks take
    # memory, so they are created only when the kernel is checked.
    checks = {"swiglu": lambda: {"swiglu": swiglu_check(ffn_width, dtype, device)}}
    # `averages`: whether layers update the position state from attention's average of it.
    if shapes.averages:
        checks["position_update"] = lambda: update_checks(shapes, dtype, device)
    if dtype is not torch.float32:
        checks["loss"] = lambda: {"loss": loss_check(vocabulary, dtype, device)}

    usable = {}
    for name, make_checks in checks.items():
        # Why the kernel cannot be used, or None. If Triton works, the check below decides.
        problem = f"triton {without_triton}"
        # The name of the kernel if it ran, but its results were wrong.
        inexact = None
        # All ranks enter the block, also those without Triton, since it contains a barrier.
        with layout.first_on_node():
            if not without_triton:
                problem = first_failure(make_checks(), dtype, device)
                if problem:
                    inexact = name
        # Decide from the failures of all ranks, so that all ranks decide the same.
        failures = _gather_failures(layout, problem, inexact)
        usable[name] = not failures
        if not failures:
            logger.info("the fused %s agrees with plain torch here", name.replace("_", " "))
            continue

        # Without the position update's kernel, training would be slower; users must allow that.
        wrong = [failure for failure in failures if failure.inexact]
        if wrong and name == "position_update" and required:
            # `_error_of` reports the first failure.
            problem = f"requires the fused position update, which {wrong[0].problem}"
            wrong[0] = wrong[0]._replace(problem=problem)
            raise _error_of(wrong, layout.world_size, auto=True)
        node, rank, problem, *_ = failures[0]
        logger.info(
            "the %s runs in plain torch (rank %d, %s: %s)",
            name.replace("_", " "),
            rank,
            node,
            problem,
        )
    return FusedKernels(**usable)
