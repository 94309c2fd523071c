"""Choose a model's attention backend and check its kernels on the device. Needs torch, but not Megatron."""

import logging
from collections.abc import Set

import torch

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import ConfigError, NodeError, UserError
from megatron_tape.io.versions import node_name
from megatron_tape.ops.backends import AVERAGE, LIBRARIES, REFLECTIONS, lacks
from megatron_tape.ops.backends.choice import Choice, choose_backend, unsupported
from megatron_tape.ops.parity import Shapes, check_fused_kernels, library_fails, loss_disagrees
from megatron_tape.position import encoding_of

logger = logging.getLogger(__name__)

_INSTEAD = {"triton": "torch", "flex": "tiled", "fla": "tiled"}
"""The backends whose kernels are compiled where they run, and what can do the same in plain torch."""


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
    return choose_backend(wanted, device, dtype, model.head_dim, needs, shifted_sparse, packed, without)


def kernel_shapes(model: ModelConfig, tensor_parallel_size: int = 1, context_parallel_size: int = 1) -> Shapes:
    """Return the sizes that decide which fused kernels a model compiles."""
    encoding = encoding_of(model)
    return Shapes(
        heads=model.num_attention_heads,
        groups=model.query_groups,
        head_dim=model.head_dim,
        averages=AVERAGE in encoding.needs and encoding.num_updates > 0,
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

    Of other libraries' kernels, `auto` takes the first that agree with plain torch on all ranks.

    Kernels that are compiled here are first compared with plain torch: on one rank of each node before the others,
    which then find the compiled kernels in the node's cache. If they are not exact, do not compile or cannot run on a
    GPU, and kernels exist for what the model needs, this raises ConfigError, or NodeError if only some ranks are
    concerned. With `allow_slow`, `auto` then becomes plain torch on all ranks, with a warning.
    """
    device = torch.device(layout.device)
    # Shifted sparse attention calls kernels as documents do.
    unfit = _unfit_libraries(model, layout, dtype, packed or shifted_sparse)
    chosen = choice(model, dtype, device, shifted_sparse, packed, unfit.keys())
    problem = _why_slow(model, chosen.backend, dtype, device)
    if (why := unfit.get(chosen.backend)) is not None:
        problem = f"is {chosen.backend}, which {why}"
    fused = chosen.backend in _INSTEAD
    # Ranks on other kinds of GPU may have chosen otherwise, and still take part.
    if layout.any_rank(fused):
        with layout.first_on_node():
            try:
                if fused:
                    shapes = kernel_shapes(model, layout.tensor_parallel_size, layout.context_parallel_size)
                    check_fused_kernels(shapes, dtype, device, chosen.backend)
            except ConfigError as error:
                problem = error.problem
    answers = layout.gather(None if problem is None else (node_name(), layout.rank, problem))
    if bad := [answer for answer in answers if answer is not None]:
        error = _unfit(bad, layout.world_size, model.attention_backend == "auto")
        if not allow_slow or model.attention_backend != "auto":
            raise error
        logger.warning("WARNING: training continues with slower attention in plain torch: %s", error)
        chosen = Choice(_INSTEAD.get(chosen.backend, chosen.backend), "as train.allow_slow_attention allows")
    elif fused or chosen.backend in LIBRARIES:
        logger.info("the kernels of %s agree with plain torch here", chosen.backend)
    logger.info("attention runs as %s, %s", *chosen)
    return chosen.backend


def _unfit_libraries(model: ModelConfig, layout, dtype: torch.dtype, packed: bool) -> dict[str, str]:
    """Return the libraries that cannot compute a model's attention on all ranks, and why, as the predicate of a
    sentence; all ranks call this.
    """
    device, needs, wanted = torch.device(layout.device), encoding_of(model).needs, model.attention_backend
    asked = [name for name in LIBRARIES if wanted in ("auto", name) and not lacks(name, needs)]
    if device.type != "cuda" or (wanted == "auto" and AVERAGE in needs):
        return {}
    shapes = kernel_shapes(model, layout.tensor_parallel_size, layout.context_parallel_size)
    unfit = {}
    for name in asked:
        why = unsupported(name, device, dtype, model.head_dim, needs)
        why = why or library_fails(name, shapes, dtype, device, packed)
        if layout.any_rank(why is not None):
            unfit[name] = why or "does not work on another rank"
            logger.info("attention does not use %s, which %s", name, unfit[name])
    return unfit


def _why_slow(model: ModelConfig, backend: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a GPU does without kernels that exist for a model, as the predicate of a sentence, or None."""
    needs = encoding_of(model).needs
    plain = backend in ("tiled", "naive") or (backend == "torch" and AVERAGE in needs)
    able = [name for name in _INSTEAD if not lacks(name, needs)]
    if device.type != "cuda" or model.attention_backend != "auto" or not plain or not able:
        return None
    reasons = [f"{name} {unsupported(name, device, dtype, model.head_dim, needs)}" for name in able]
    return f"is auto, but no kernels can run here ({'; '.join(reasons)})"


def _unfit(bad: list[tuple[str, int, str]], world_size: int, auto: bool) -> UserError:
    """Return the error about ranks whose kernels do not work, given as node, rank and the problem."""
    node, rank, problem = bad[0]
    ranks = f"rank {rank}" if len(bad) == 1 else f"ranks {', '.join(str(rank) for _, rank, _ in bad[:8])}"
    allowed = "; train.allow_slow_attention trains in plain torch instead" if auto else ""
    if len(bad) == world_size:
        key = ("model.attention_backend", "model.position_encoding")
        return ConfigError(key, f"{problem} ({ranks}, {node})", f"mend that, or choose another{allowed}")
    nodes = tuple(dict.fromkeys(node for node, _, _ in bad))
    said = f"({ranks} of {world_size}) cannot train with the others: model.attention_backend {problem}"
    return NodeError(nodes, said, f"mend or leave out the node{allowed}")


def verified_loss(model: ModelConfig, layout, dtype: torch.dtype) -> bool:
    """Return whether Liger's kernels compute the loss on all ranks of `layout`, which call this together, and log it.

    They do so in bf16 on GPUs where the package liger-kernel is installed and agrees with plain torch.
    """
    device = torch.device(layout.device)
    if device.type != "cuda" or dtype is torch.float32:
        return False
    with layout.first_on_node():
        why = loss_disagrees(model.vocab_size // layout.tensor_parallel_size, dtype, device)
    elsewhere = layout.any_rank(why is not None)
    if why or elsewhere:
        logger.info("the loss runs in plain torch, since %s", why or "Liger's kernels do not work on another rank")
        return False
    logger.info("the loss runs with Liger's kernels, which agree with plain torch here")
    return True
