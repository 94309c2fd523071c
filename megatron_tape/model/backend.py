"""Choose a model's attention backend and check its kernels on the device. Needs torch, but not Megatron."""

import logging

import torch

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import AVERAGE, REFLECTIONS
from megatron_tape.ops.backends.choice import Choice, choose_backend
from megatron_tape.ops.parity import Shapes, check_fused_kernels, loss_disagrees
from megatron_tape.position import encoding_of

logger = logging.getLogger(__name__)

_INSTEAD = {"triton": "torch", "flex": "tiled", "fla": "tiled"}
"""The backends whose kernels are compiled where they run, and what can do the same in plain torch."""


def chosen_backend(model: ModelConfig, dtype: torch.dtype, device: torch.device, shifted_sparse: bool = False) -> str:
    """Return the backend that `model.attention_backend` means on `device`; `ConfigError` if it cannot run there."""
    return choice(model, dtype, device, shifted_sparse).backend


def choice(model: ModelConfig, dtype: torch.dtype, device: torch.device, shifted_sparse: bool = False) -> Choice:
    """Return the same, with the reason for it."""
    needs = encoding_of(model).needs
    return choose_backend(model.attention_backend, device, dtype, model.head_dim, needs, shifted_sparse)


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


def verified_backend(model: ModelConfig, layout, dtype: torch.dtype, shifted_sparse: bool = False) -> str:
    """Return the backend that all ranks of `layout` train with, and log why; all call this together.

    Kernels that are compiled here are first compared with plain torch: on one rank of each node before the others,
    which then find the compiled kernels in the node's cache. If they are not exact or do not compile, `auto` becomes
    plain torch with a warning, and a backend that was named raises `ConfigError`.
    """
    device = torch.device(layout.device)
    chosen, error = choice(model, dtype, device, shifted_sparse), None
    fused = chosen.backend in _INSTEAD
    # Ranks on other kinds of GPU may have chosen otherwise, and still take part.
    if layout.any_rank(fused):
        with layout.first_on_node():
            try:
                if fused:
                    shapes = kernel_shapes(model, layout.tensor_parallel_size, layout.context_parallel_size)
                    check_fused_kernels(shapes, dtype, device, chosen.backend)
            except ConfigError as caught:
                error = caught
        if layout.any_rank(error is not None) and fused:
            chosen = _instead(model, chosen.backend, error)
        elif fused:
            logger.info("the kernels of %s agree with plain torch here", chosen.backend)
    logger.info("attention runs as %s, %s", *chosen)
    return chosen.backend


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


def _instead(model: ModelConfig, backend: str, error: ConfigError | None) -> Choice:
    """Return plain torch if any backend may run, with a warning; otherwise raise `error`, or that another rank has one.

    All ranks then compute alike.
    """
    plain = _INSTEAD[backend]
    if error is None:
        problem = f"is {backend}, whose kernels do not work on another rank"
        error = ConfigError("model.attention_backend", problem, f"set it to {plain}")
    if model.attention_backend != "auto":
        raise error
    logger.warning("WARNING: training continues with slower attention in plain torch: %s", error)
    return Choice(plain, f"as the kernels of {backend} do not work")
