"""TAPE, contextualized equivariant positional encoding (ICML 2025), for language models.

The parts for one's own PyTorch code; `docs/python.md` shows them at work:

    TapeModel               a small language model that also returns every layer's position states
    TapeLayer, TapeAttention, PositionUpdate, initial_position_state
                            its parts, plain modules of torch
    plot_position_states    draw how far each layer moved each token

Importing this package imports neither torch nor CUDA. `python -m pretrain.train` and its kin train on many GPUs.
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
    """Import a name of `__all__` on its first use, and torch with it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_tape.model.modules"), name)
