"""Choose a model's attention backend and check its kernels on the device. Needs torch, but not Megatron."""

import logging

import torch

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import ConfigError
from megatron_tape.ops.attention import Choice, choose_backend
from megatron_tape.ops.backends import AVERAGE
from megatron_tape.ops.measured import Heads
from megatron_tape.ops.parity import Shapes, check_fused_kernels
from megatron_tape.position import encoding_of

logger = logging.getLogger(__name__)


def chosen_backend(model: ModelConfig, dtype: torch.dtype, device: torch.device, shifted_sparse: bool = False) -> str:
    """Return the backend that `model.attention_backend` means on `device`; `ConfigError` if it cannot run there."""
    return choice(model, dtype, device, shifted_sparse).backend


def choice(model: ModelConfig, dtype: torch.dtype, device: torch.device, shifted_sparse: bool = False) -> Choice:
    """Return the same, with the reason for it."""
    shape = Heads(model.num_attention_heads, model.query_groups, model.head_dim, model.seq_length)
    return choose_backend(model.attention_backend, device, dtype, shape, encoding_of(model).needs, shifted_sparse)


def kernel_shapes(model: ModelConfig, tensor_parallel_size: int = 1) -> Shapes:
    """Return the sizes that decide which fused kernels a model compiles."""
    encoding = encoding_of(model)
    return Shapes(
        heads=model.num_attention_heads,
        groups=model.query_groups,
        head_dim=model.head_dim,
        inner=model.position_mlp_width,
        averages=AVERAGE in encoding.needs and encoding.num_updates > 0,
        full_mixing=model.token_mixing == "full",
        fp32_state=model.position_state_precision == "fp32",
        tensor_parallel_size=tensor_parallel_size,
    )


def verified_backend(model: ModelConfig, layout, dtype: torch.dtype, shifted_sparse: bool = False) -> str:
    """Return the backend that all ranks of `layout` train with, and log why; all call this together.

    The fused kernels are first compiled and compared with plain torch: on one rank of each node before the others,
    which then find the compiled kernels in the node's cache. If they are not exact or do not compile, `auto` becomes
    torch with a warning, and triton raises `ConfigError`.
    """
    device = torch.device(layout.device)
    chosen, error = choice(model, dtype, device, shifted_sparse), None
    fused = chosen.backend == "triton"
    # Ranks on other kinds of GPU may have chosen otherwise, and still take part.
    if layout.any_rank(fused):
        with layout.first_on_node():
            try:
                if fused:
                    check_fused_kernels(kernel_shapes(model, layout.tensor_parallel_size), dtype, device)
            except ConfigError as caught:
                error = caught
        if layout.any_rank(error is not None) and fused:
            chosen = _instead_of_triton(model, error)
        elif fused:
            logger.info("the fused kernels agree with plain torch here")
    logger.info("attention runs as %s, %s", *chosen)
    return chosen.backend


def _instead_of_triton(model: ModelConfig, error: ConfigError | None) -> Choice:
    """Return torch if any backend may run, with a warning; otherwise raise `error`, or that another rank has one."""
    if model.attention_backend != "auto":
        raise error or ConfigError(
            "the fused kernels do not work on another rank; set model.attention_backend to torch"
        )
    logger.warning(
        "WARNING: training continues with slower attention in plain torch: %s",
        error or "the fused kernels do not work on another rank",
    )
    return Choice("torch", "as the fused kernels do not work")
