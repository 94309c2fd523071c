"""The states of the random number generators that training draws from."""

import json
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_tape.records import parse_record


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
    """Restore what `random_state` returned; each generator checks its state and raises its own kind of error."""
    torch.set_rng_state(tensors["torch"])
    trackers = {key.removeprefix("tracker/"): value for key, value in tensors.items() if key.startswith("tracker/")}
    get_cuda_rng_tracker().set_states(trackers)
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, words, gauss = parse_record(text["python"], list[Any])
    random.setstate((version, tuple(words), gauss))
    kind, *rest = parse_record(text["numpy"], list[Any])
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))
