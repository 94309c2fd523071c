"""Files of logits: what is written, what is read, and which files are refused."""

import numpy as np
import pytest
import torch

from megatron_tape.errors import FileError
from megatron_tape.huggingface.verification.logits_file import read_logits, write_tokens
from megatron_tape.huggingface.verification.sequences import every_token

VOCABULARY = 8
LOGITS = np.random.default_rng(3).standard_normal((3, VOCABULARY)).astype(np.float32)
ARRAYS = {"tokens": np.arange(7) % 5, "positions": np.array([0, 2, 5]), "logits": LOGITS}


def saved(path, **changes):
    """Write a file of logits with changes; None leaves an array out."""
    arrays = {name: array for name, array in (ARRAYS | changes).items() if array is not None}
    np.savez(path, **arrays)
    return path


def test_an_engine_reads_the_tokens_and_adds_its_logits(tmp_path):
    path = tmp_path / "tokens"
    sequence = every_token([0, 2, 6], VOCABULARY)
    write_tokens(path, sequence)
    assert [file.name for file in tmp_path.iterdir()] == ["tokens"]

    with np.load(path) as archive:
        np.savez(tmp_path / "logits.npz", logits=LOGITS, **archive)
    read, logits, normalized = read_logits(tmp_path / "logits.npz", VOCABULARY)
    assert torch.equal(read.ids, sequence.ids)
    assert torch.equal(read.positions, sequence.positions)
    assert read.compared == (0, 2, 6)
    assert logits.dtype == torch.float64
    assert torch.equal(logits, torch.from_numpy(LOGITS).double())
    assert not normalized


def test_tokens_after_the_last_compared_one_are_left_out(tmp_path):
    sequence, *_ = read_logits(saved(tmp_path / "logits.npz"), VOCABULARY)
    assert sequence.ids.tolist() == [0, 1, 2, 3, 4, 0]
    assert sequence.compared_positions == [0, 2, 5]


def test_log_probabilities_are_told_from_logits(tmp_path):
    logprobs = torch.from_numpy(LOGITS).log_softmax(-1).half().numpy()
    path = saved(tmp_path / "logits.npz", logits=None, logprobs=logprobs)
    _, read, normalized = read_logits(path, VOCABULARY)
    assert normalized
    assert torch.equal(read, torch.from_numpy(logprobs).double())


def test_existing_tokens_are_kept_unless_overwritten(tmp_path):
    path = tmp_path / "tokens.npz"
    path.write_text("kept")
    sequence = every_token([1], VOCABULARY)
    with pytest.raises(FileError, match="exists"):
        write_tokens(path, sequence)
    assert path.read_text() == "kept"
    write_tokens(path, sequence, overwrite=True)
    assert np.load(path)["positions"].tolist() == [1]


NAN = LOGITS.copy()
NAN[1, 2] = np.nan


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"tokens": None}, "no array tokens"),
        ({"positions": None}, "no array positions"),
        ({"logits": None}, "no array logits"),
        ({"logprobs": LOGITS}, "both logits and logprobs"),
        ({"tokens": np.arange(7.0)}, "tokens of the type float64"),
        ({"tokens": np.zeros((1, 7), int)}, r"tokens of the type int64 and shape \(1, 7\)"),
        ({"positions": np.array([], int)}, "positions of the type"),
        ({"tokens": np.array([0, 1, 2, 3, -1, 0])}, "tokens outside .*vocabulary, 0 to 7"),
        ({"tokens": np.array([0, 1, 2, 3, 8, 0])}, "tokens outside .*vocabulary, 0 to 7"),
        ({"positions": np.array([-1, 2, 5])}, "positions outside of its tokens, 0 to 6"),
        ({"positions": np.array([0, 2, 7])}, "positions outside of its tokens, 0 to 6"),
        ({"positions": np.array([0, 5, 2])}, "positions that do not ascend"),
        ({"positions": np.array([0, 5, 5])}, "positions that do not ascend"),
        ({"logits": LOGITS[:2]}, r"shape \(2, 8\) instead of \(3, 8\)"),
        ({"logits": np.pad(LOGITS, ((0, 0), (0, 4)))}, r"shape \(3, 12\) instead .*padding"),
        ({"logits": LOGITS.astype(int)}, "logits of the type int64"),
        ({"logits": LOGITS.view("V2")}, r"logits of the type \|V2; convert them to float32"),
        ({"logits": NAN}, "NaN or infinite"),
        ({"logits": np.where(LOGITS == LOGITS.min(), -np.inf, LOGITS)}, "NaN or infinite"),
        ({"logits": np.array([[object()]])}, "not a NumPy archive of arrays"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(tmp_path, changes, problem):
    path = saved(tmp_path / "logits.npz", **changes)
    with pytest.raises(FileError, match=problem) as caught:
        read_logits(path, VOCABULARY)
    assert caught.value.subject == str(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileError, match="is not a file"):
        read_logits(tmp_path / "missing.npz", VOCABULARY)
    with pytest.raises(FileError, match="is not a file"):
        read_logits(tmp_path, VOCABULARY)

    complete = saved(tmp_path / "logits.npz").read_bytes()
    other = tmp_path / "other.npz"
    for contents in (b"", b"not an archive", complete[: len(complete) // 2]):
        other.write_bytes(contents)
        with pytest.raises(FileError, match="is not a NumPy archive"):
            read_logits(other, VOCABULARY)

    np.savez_compressed(other, **ARRAYS)
    compressed = bytearray(other.read_bytes())
    compressed[60:90] = bytes(30)
    other.write_bytes(compressed)
    with pytest.raises(FileError, match="is not a NumPy archive"):
        read_logits(other, VOCABULARY)

    np.save(tmp_path / "one.npy", LOGITS)
    with pytest.raises(FileError, match="has one array without a name"):
        read_logits(tmp_path / "one.npy", VOCABULARY)
