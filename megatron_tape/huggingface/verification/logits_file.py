"""Files of logits, with which any inference engine can be compared.

A file of logits is a NumPy archive (`numpy.savez`) with these arrays:

- `tokens`, integers (S,): a sequence. Token i has position i.
- `positions`, ascending integers (P,): the tokens whose logits are compared.
- `logits`, floats (P, V): for each of these tokens, the logits of the next token, as the model
  computes them: before temperature, penalties and softmax. Or, instead, `logprobs`: the same after
  log_softmax.

Other arrays are ignored.

Axes: S tokens, P compared tokens, V vocabulary.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_tape.errors import FileError
from megatron_tape.huggingface.verification.sequences import Sequence
from megatron_tape.io.files import atomic_output

_FORMAT = (
    "write it with numpy.savez: tokens (S,), ascending positions (P,), and logits or logprobs"
    " (P, V) as float32"
)


def write_tokens(path: Path, sequence: Sequence, overwrite: bool = False) -> None:
    """Write the tokens of a sequence without gaps, and the positions to compare, for another
    engine to read.

    Raises FileError if `path` exists, unless `overwrite` is set.
    """
    assert not sequence.has_gaps
    positions = np.asarray(sequence.compared_positions, dtype=np.int64)
    with atomic_output(path, overwrite=overwrite) as file:
        np.savez(file, tokens=sequence.ids.numpy(), positions=positions)


def read_logits(path: Path, vocab_size: int) -> tuple[Sequence, Tensor, bool]:
    """Read a file of logits of a model with `vocab_size` logits per token.

    Returns the sequence up to the last compared token, the logits (P, V) in float64, and whether
    they are log-probabilities. Raises FileError if the file is not a file of logits of this model.
    """
    arrays = _read_arrays(path)
    tokens = _integers(path, arrays, "tokens")
    positions = _integers(path, arrays, "positions")
    is_normalized = "logprobs" in arrays
    if is_normalized and "logits" in arrays:
        raise FileError(path, "has both logits and logprobs", "write one of them")
    name = "logits"
    if is_normalized:
        name = "logprobs"
    stored = _array(path, arrays, name)

    if stored.dtype.kind != "f":
        # NumPy stores a type that it does not know, such as bfloat16, as bytes without a meaning.
        raise FileError(path, f"has {name} of the type {stored.dtype}", "convert them to float32")
    _check_tokens(path, tokens, positions, vocab_size)
    logits = stored.astype(np.float64)
    _check_logits(path, name, logits, (len(positions), vocab_size))

    ids = torch.from_numpy(tokens)
    compared = tuple(positions.tolist())
    sequence = Sequence(ids, torch.arange(len(ids)), compared)
    return sequence.until(compared[-1]), torch.from_numpy(logits), is_normalized


def _check_tokens(path: Path, tokens: np.ndarray, positions: np.ndarray, vocab_size: int) -> None:
    """Raise FileError unless the positions ascend within the tokens, and all tokens are in the
    vocabulary.
    """
    last = len(tokens) - 1
    # They may still be in any order.
    if positions.min() < 0 or positions.max() > last:
        raise FileError(path, f"has positions outside of its tokens, 0 to {last}", _FORMAT)
    if (np.diff(positions) <= 0).any():
        raise FileError(path, "has positions that do not ascend", _FORMAT)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        problem = f"has tokens outside of the model's vocabulary, 0 to {vocab_size - 1}"
        raise FileError(path, problem, "choose tokens that the model knows")


def _check_logits(
    path: Path, name: str, logits: np.ndarray, expected_shape: tuple[int, int]
) -> None:
    """Raise FileError if the array `name` has another shape, numbers that are not finite, or logits
    instead of log-probabilities, or the other way round.
    """
    if logits.shape != expected_shape:
        problem = f"has {name} of shape {logits.shape} instead of {expected_shape}"
        fix = "write one row for each position, and all logits except those of padding"
        raise FileError(path, problem, fix)
    if not np.isfinite(logits).all():
        raise FileError(
            path,
            f"has {name} that are NaN or infinite",
            "check the engine's dtype, and its mask of padding",
        )

    largest = logits.max(axis=-1)
    exponentials = np.exp(logits - largest[:, None])
    log_sums = largest + np.log(exponentials.sum(axis=-1))
    # Half precision has errors of this size.
    is_normalized = bool((np.abs(log_sums) < 0.02).all())
    if name == "logits" and is_normalized:
        problem = "has logits that are log-probabilities"
        raise FileError(path, problem, "call the array logprobs instead")
    if name == "logprobs" and not is_normalized:
        problem = "has logprobs whose probabilities do not sum to 1"
        fix = "call the array logits if they are raw, or write those of all tokens"
        raise FileError(path, problem, fix)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return those arrays of the file that a comparison uses, by name.

    Raises FileError if the file cannot be read.
    """
    if not path.is_file():
        raise FileError(path, "is not a file", "give a file of logits (.npz)")
    try:
        # A pickle could run code.
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise FileError(path, "has one array without a name", _FORMAT)
        with archive:
            known = ("tokens", "positions", "logits", "logprobs")
            return {name: archive[name] for name in known if name in archive}
    except FileError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FileError(path, f"is not a NumPy archive of arrays ({error})", _FORMAT) from None


def _array(path: Path, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the array `name`. Raises FileError if it is missing."""
    if name not in arrays:
        raise FileError(path, f"has no array {name}", _FORMAT)
    return arrays[name]


def _integers(path: Path, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the array `name` as int64. Raises FileError unless it has one axis and at least one
    integer.
    """
    array = _array(path, arrays, name)
    if array.dtype.kind not in "iu" or array.ndim != 1 or array.size == 0:
        problem = f"has {name} of the type {array.dtype} and shape {array.shape}"
        raise FileError(path, problem, _FORMAT)
    return array.astype(np.int64)
