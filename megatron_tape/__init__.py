"""TAPE, contextualized equivariant positional encoding (ICML 2025), for language models.

The classes of exported models, for your own PyTorch code; `docs/python.md` has examples:

    TapeConfig, TapeForCausalLM     a language model for transformers
    TapePhases, TapeAttention, TapePosition
                                    the initial position state, and the parts of a layer

Importing this package does not import torch. To train on many GPUs, use programs such as `python -m
pretrain.train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_tape.huggingface.modeling.attention_tape import TapeAttention
    from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
    from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM
    from megatron_tape.huggingface.modeling.position_tape import TapePhases, TapePosition

__version__ = "0.1.0"
__all__ = ["TapeAttention", "TapeConfig", "TapeForCausalLM", "TapePhases", "TapePosition"]

_FILES = {
    "TapeAttention": "attention_tape",
    "TapeConfig": "configuration_tape",
    "TapeForCausalLM": "modeling_tape",
    "TapePhases": "position_tape",
    "TapePosition": "position_tape",
}
"""Files of the classes in `megatron_tape/huggingface/modeling`."""


def __getattr__(name: str) -> Any:
    """Import a name in `__all__` when it is first used; this imports torch and transformers."""
    # Python calls this only for names that the module does not define.
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.huggingface.modeling.{_FILES[name]}")
    return getattr(module, name)
