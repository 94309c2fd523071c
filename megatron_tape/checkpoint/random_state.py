"""The states of the random number generators that training draws from."""

import json
import logging
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_tape.records import parse_record

logger = logging.getLogger(__name__)

STATE_SIZES = {16, 5056}
"""Bytes of a GPU's and of a CPU's generator."""


def random_state() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return this rank's random states, as the tensors and the metadata of a safetensors file."""
    tensors = {"torch": torch.get_rng_state()}
    tensors |= {f"tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(keys.astype(np.int64))
    return tensors, {"python": json.dumps([version, words, gauss]), "numpy": json.dumps([kind, *rest])}


def set_random_state(tensors: dict[str, Tensor], text: dict[str, str]) -> None:
    """Restore what `random_state` returned; each generator checks its state and raises its own kind of error.

    A GPU's generator cannot take a CPU's state, nor the reverse: where a run moves from one to the other, Megatron's
    streams stay as `seed_everything` has left them.
    """
    torch.set_rng_state(tensors["torch"])
    saved = {key.removeprefix("tracker/"): value for key, value in tensors.items() if key.startswith("tracker/")}
    here = get_cuda_rng_tracker().get_states()
    common = sorted(saved.keys() & here.keys())
    foreign = [name for name in common if {len(saved[name]), len(here[name])} == STATE_SIZES]
    if foreign:
        logger.info("the random streams %s were saved on another kind of device; they begin anew", ", ".join(foreign))
    get_cuda_rng_tracker().set_states(saved | {name: here[name] for name in foreign})
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, words, gauss = parse_record(text["python"], list[Any])
    random.setstate((version, tuple(words), gauss))
    kind, *rest = parse_record(text["numpy"], list[Any])
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))
