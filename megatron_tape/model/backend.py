"""Choose a model's attention backend and check its kernels on the device. Needs torch, but not Megatron."""

import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import ConfigError, NodeError, UserError
from megatron_tape.io.versions import node_name
from megatron_tape.ops.backends import AVERAGE, LIBRARIES, REFLECTIONS, lacks
from megatron_tape.ops.backends.choice import Choice, choose_backend, unsupported
from megatron_tape.ops.parity import Shapes, backend_fails, first_failure, loss_check, swiglu_check, update_checks
from megatron_tape.position import encoding_of

logger = logging.getLogger(__name__)

_COMPILED = ("triton", "flex", "fla")
"""The backends whose kernels are compiled where they run."""
_PLAIN = ("torch", "tiled", "naive")
"""The backends that train in their place if `train.allow_slow_attention` allows it, the fastest on a GPU first."""


class _Answer(NamedTuple):
    """Why a rank cannot train with what it would use."""

    node: str
    rank: int
    problem: str
    """The predicate of a sentence."""
    inexact: str | None = None
    """The backend that is not exact on this rank."""
    replaced: bool = False
    """Whether another row of the table can take its place."""


@dataclass(frozen=True)
class FusedKernels:
    """Which Triton kernels a model runs in place of plain torch, apart from attention."""

    position_update: bool = False
    swiglu: bool = False
    loss: bool = False


def chosen_backend(model: ModelConfig, dtype: torch.dtype, device: torch.device, shifted_sparse: bool = False) -> str:
    """Return the backend that `model.attention_backend` means on `device`; `ConfigError` if it cannot run there."""
    return choice(model, dtype, device, shifted_sparse).backend


def choice(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shifted_sparse: bool = False,
    packed: bool = False,
    without: Set[str] = frozenset(),
) -> Choice:
    """Return the same, with the reason for it."""
    wanted, needs = model.attention_backend, encoding_of(model).needs
    grouped = model.query_groups < model.num_attention_heads
    return choose_backend(wanted, device, dtype, model.head_dim, needs, shifted_sparse, packed, without, grouped)


def kernel_shapes(model: ModelConfig, tensor_parallel_size: int = 1, context_parallel_size: int = 1) -> Shapes:
    """Return the sizes that decide which fused kernels a model compiles."""
    encoding, layers = encoding_of(model), range(model.num_layers)
    return Shapes(
        heads=model.num_attention_heads,
        groups=model.query_groups,
        head_dim=model.head_dim,
        averages=AVERAGE in encoding.needs and any(map(encoding.updates, layers)),
        tensor_parallel_size=tensor_parallel_size,
        reflects=REFLECTIONS in encoding.needs,
        context_parallel_size=context_parallel_size,
        **encoding.fused_update,
    )


def verified_backend(
    model: ModelConfig,
    layout,
    dtype: torch.dtype,
    shifted_sparse: bool = False,
    allow_slow: bool = False,
    packed: bool = False,
) -> str:
    """Return the backend that all ranks of `layout` train with, and log why; all call this together.

    On a GPU its kernels are first compared with plain torch: on one rank of each node before the others, which then
    find the compiled kernels in the node's cache. If those of another library are not exact on some rank, `auto` takes
    the next row of the table on all ranks. If our own are not, do not compile or cannot run, this raises ConfigError,
    or NodeError if only some ranks are concerned. With `allow_slow`, `auto` then becomes plain torch on all ranks, with
    a warning.
    """
    device, auto = torch.device(layout.device), model.attention_backend == "auto"
    shapes = kernel_shapes(model, layout.tensor_parallel_size, layout.context_parallel_size)
    failed: set[str] = set()
    while True:
        chosen = choice(model, dtype, device, shifted_sparse, packed, failed)
        problem = _why_slow(model, chosen, dtype, device)
        checked = chosen.backend in _COMPILED or (device.type == "cuda" and chosen.backend in LIBRARIES)
        # Ranks on other kinds of GPU may have chosen otherwise, and still take part.
        inexact = None
        if layout.any_rank(checked):
            with layout.first_on_node():
                # Shifted sparse attention calls kernels as documents do.
                if checked:
                    inexact = backend_fails(chosen.backend, shapes, dtype, device, packed or shifted_sparse)
        problem = problem if inexact is None else f"is {chosen.backend}, which {inexact}"
        # What comes after a slow backend is slower still.
        replaced = auto and chosen.backend in LIBRARIES and not chosen.slow
        answer = _Answer(node_name(), layout.rank, problem, chosen.backend if inexact else None, replaced)
        bad = [each for each in layout.gather(None if problem is None else answer) if each is not None]
        failed |= {each.inexact for each in bad if each.inexact}
        if not bad or not all(each.replaced for each in bad):
            break
        logger.warning("attention does not use what %s (rank %d, %s)", bad[0].problem, bad[0].rank, bad[0].node)
    if bad:
        error = _unfit(bad, layout.world_size, auto)
        if not allow_slow or not auto:
            raise error
        needs = encoding_of(model).needs
        # torch would hold all S x S scores if they are changed, as our kernel cannot do.
        able = _PLAIN[1:] if lacks("triton", needs) else _PLAIN
        plain = [name for name in able if name not in failed]
        logger.warning("WARNING: training continues with slower attention in plain torch: %s", error)
        chosen = Choice(plain[0], "as train.allow_slow_attention allows")
    elif checked:
        logger.info("the kernels of %s agree with plain torch here", chosen.backend)
    logger.info("attention runs as %s, %s", chosen.backend, chosen.reason)
    return chosen.backend


def _why_slow(model: ModelConfig, chosen: Choice, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a GPU does without kernels that exist for a model, as the predicate of a sentence, or None."""
    needs = encoding_of(model).needs
    able = [name for name in _COMPILED if not lacks(name, needs)]
    if device.type != "cuda" or not chosen.slow or not able:
        return None
    reasons = {name: unsupported(name, device, dtype, model.head_dim, needs) for name in able}
    said = "; ".join(f"{name} {why}" for name, why in reasons.items() if why)
    return f"is auto, but no kernels can run here ({said})"


def _unfit(bad: list[_Answer], world_size: int, auto: bool) -> UserError:
    """Return the error about ranks whose kernels do not work."""
    node, rank, problem, *_ = bad[0]
    ranks = f"rank {rank}" if len(bad) == 1 else f"ranks {', '.join(str(answer.rank) for answer in bad[:8])}"
    allowed = "; train.allow_slow_attention trains in plain torch instead" if auto else ""
    if len(bad) == world_size:
        key = ("model.attention_backend", "model.position_encoding")
        return ConfigError(key, f"{problem} ({ranks}, {node})", f"mend that, or choose another{allowed}")
    nodes = tuple(dict.fromkeys(answer.node for answer in bad))
    said = f"({ranks} of {world_size}) cannot train with the others: model.attention_backend {problem}"
    return NodeError(nodes, said, f"mend or leave out the node{allowed}")


def verified_kernels(model: ModelConfig, layout, dtype: torch.dtype, allow_slow: bool = False) -> FusedKernels:
    """Return the kernels apart from attention that run on all ranks of `layout`, which call this together, and log it.

    They run on GPUs where Triton is installed and, for the loss, the package liger-kernel, and only where they agree
    with plain torch: the loss in 16 bits only. A position update that does not work where Triton does raises
    ConfigError or NodeError, as in `verified_backend`, unless `allow_slow` or `model` names a backend of others.
    """
    device = torch.device(layout.device)
    if device.type != "cuda":
        return FusedKernels()
    size = layout.tensor_parallel_size
    shapes = kernel_shapes(model, size, layout.context_parallel_size)
    triton = unsupported("triton", device, dtype, 64)
    required = model.attention_backend in ("auto", "triton") and not allow_slow

    checks = {
        "position_update": lambda: update_checks(shapes, dtype, device),
        "swiglu": lambda: {"swiglu": swiglu_check(model.ffn_hidden_size // size, dtype, device)},
        "loss": lambda: {"loss": loss_check(model.vocab_size // size, dtype, device)},
    }
    if not shapes.averages:
        del checks["position_update"]
    if dtype is torch.float32:
        del checks["loss"]
    found = {}
    for name, check in checks.items():
        with layout.first_on_node():
            why = f"triton {triton}" if triton else first_failure(check(), dtype, device)
        answer = _Answer(node_name(), layout.rank, why, inexact=None if triton else name)
        bad = [each for each in layout.gather(None if why is None else answer) if each is not None]
        # All ranks must come to the same decision.
        problem = "needs the fused position update, which {}"
        wrong = [each._replace(problem=problem.format(each.problem)) for each in bad if each.inexact]
        if wrong and name == "position_update" and required:
            raise _unfit(wrong, layout.world_size, auto=True)
        found[name], what = not bad, name.replace("_", " ")
        if bad:
            logger.info("the %s runs in plain torch (rank %d, %s: %s)", what, bad[0].rank, bad[0].node, bad[0].problem)
        else:
            logger.info("the fused %s agrees with plain torch here", what)
    return FusedKernels(**found)
