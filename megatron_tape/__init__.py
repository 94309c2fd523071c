"""TAPE, contextualized equivariant positional encoding (ICML 2025), for language models.

Classes and functions for your own PyTorch code; `docs/python.md` has examples:

    TapeModel               a small language model that also returns every layer's position states
    TapeLayer, TapeAttention, PositionUpdate, initial_position_state
                            the modules of its layers, and the state before the first layer
    plot_position_states    draw how far the layers moved each token's position state

Importing this package does not import torch. To train on many GPUs, use programs such as `python -m
pretrain.train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_tape.model.modules import (
        PositionUpdate,
        TapeAttention,
        TapeLayer,
        TapeModel,
        initial_position_state,
        plot_position_states,
    )

__version__ = "0.1.0"
__all__ = [
    "PositionUpdate",
    "TapeAttention",
    "TapeLayer",
    "TapeModel",
    "initial_position_state",
    "plot_position_states",
]


def __getattr__(name: str) -> Any:
    """Import a name in `__all__` when it is first used; this imports torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_tape.model.modules"), name)
