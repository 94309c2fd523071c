"""Save and restore the states of the random number generators: Python's, NumPy's and torch's."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from megatron_tape.checkpoint.index import CHOOSE_ANOTHER
from megatron_tape.errors import CheckpointError
from megatron_tape.io.records import parse_record

RANDOM = "random.safetensors"
"""The file in a checkpoint with the states of all ranks."""


def random_state() -> bytes:
    """Return the states of this rank's generators, serialized.

    The states that are tensors or arrays are stored as tensors, and the others as JSON.
    """
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    state: Any = np.random.get_state()
    kind, keys, *rest = state  # the name of the algorithm, its array, and three numbers
    # The keys are uint32, which torch supports only in part.
    tensors["numpy"] = torch.from_numpy(keys.astype(np.int64))
    texts = {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, *rest]),
    }
    tensors["text"] = _as_tensor(json.dumps(texts).encode())
    return safetensors.torch.save(tensors)


def set_random_state(packed: bytes) -> None:
    """Restore the states in `packed`, a result of `random_state`.

    Without CUDA, the state of a GPU's generator is ignored.
    """
    tensors = safetensors.torch.load(packed)
    serialized = tensors["text"].numpy().tobytes()
    texts = parse_record(serialized, dict[str, str])

    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    # `setstate` requires a tuple of words, which JSON has turned into a list.
    version, words, gauss = parse_record(texts["python"], list[Any])
    random.setstate((version, tuple(words), gauss))
    kind, *rest = parse_record(texts["numpy"], list[Any])
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, keys, *rest))


def _as_tensor(data: bytes) -> Tensor:
    """Return the bytes as a uint8 tensor."""
    # torch warns about a buffer that is not writable.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pack_states(states: list[bytes]) -> dict[str, Tensor]:
    """Return the tensors of the file `RANDOM`, given the `random_state` of each rank.

    `states` (ranks, bytes) has a row for each rank, padded to the longest state. `lengths` (ranks,)
    has the lengths without padding.
    """
    lengths = torch.tensor([len(state) for state in states])
    rows = torch.zeros(len(states), int(lengths.max()), dtype=torch.uint8)
    for row, state in zip(rows, states, strict=True):
        row[: len(state)] = _as_tensor(state)
    return {"lengths": lengths, "states": rows}


def restore_random_state(checkpoint: Path, rank: int) -> None:
    """Restore the states that rank `rank` saved.

    Do nothing if the checkpoint was imported or was saved by fewer ranks. Raises CheckpointError if
    the states cannot be restored.
    """
    path = checkpoint / RANDOM
    if not path.is_file():  # an imported checkpoint
        return
    try:
        with safe_open(path, "pt") as file:
            rows = file.get_slice("states")
            lengths = file.get_slice("lengths")
            if rank >= lengths.get_shape()[0]:
                return
            # Read only this rank's row of the file.
            length = int(lengths[rank])
            state = rows[rank, :length].numpy().tobytes()
        set_random_state(state)
    except Exception as error:  # each generator raises its own type of error
        reason = " ".join(str(error).split())
        problem = f"has random states that cannot be restored ({type(error).__name__}: {reason})"
        raise CheckpointError(path, problem, CHOOSE_ANOTHER) from None
