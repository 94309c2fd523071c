"""The writer of safetensors files, verified with the safetensors library."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_tape.errors import UserError
from megatron_tape.io.files import digest
from megatron_tape.io.safetensors import write_safetensors


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_are_written_bit_for_bit_at_the_returned_offsets(tmp_path, dtype):
    matrix = torch.arange(6).reshape(2, 3).to(dtype)
    tensors = {
        "matrix": matrix,
        "transposed": matrix.T,
        "scalar": torch.tensor(1).to(dtype),
    }
    tensors["empty"] = torch.zeros(0, 3).to(dtype)
    # One element of a column: contiguous, with a stride of 3. ZeRO 3 gathers such tensors.
    tensors["one"] = matrix[:1, 2]
    assert tensors["one"].is_contiguous()
    assert tensors["one"].stride() == (3,)
    found, places = write_safetensors(tmp_path / "tensors", tensors, metadata={"step": "100"})
    read = load_file(tmp_path / "tensors")
    assert read.keys() == tensors.keys() == places.keys()
    assert all(
        read[name].dtype == dtype and torch.equal(read[name], tensors[name]) for name in tensors
    )
    content = (tmp_path / "tensors").read_bytes()
    for name, place in places.items():
        stored = content[place["offset"] : place["offset"] + tensors[name].nbytes]
        copy = tensors[name].clone(memory_format=torch.contiguous_format)
        assert stored == copy.flatten().view(torch.uint8).numpy().tobytes()
        assert place["shape"] == list(tensors[name].shape)
    assert found == digest(tmp_path / "tensors")
    with safe_open(tmp_path / "tensors", "pt") as file:
        assert file.metadata() == {"step": "100"}


def test_tensors_are_read_from_an_iterator_one_at_a_time_and_converted(tmp_path):
    announced = {name: torch.empty(2, dtype=torch.float16, device="meta") for name in ("a", "b")}
    tensors = (torch.tensor([1.5, -6e4]) * factor for factor in (1, 0, 2))
    write_safetensors(tmp_path / "file", announced, tensors)
    assert load_file(tmp_path / "file")["a"].tolist() == [1.5, -6e4]
    assert next(tensors).tolist() == [3.0, -12e4]  # the iterator is not advanced further
    with pytest.raises(UserError) as error:
        write_safetensors(tmp_path / "file", announced, [torch.tensor([1.5, 7e4])])
    assert error.value.subject == "a"
    assert "fp16" in error.value.problem
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path / "file", announced, [torch.ones(2)])
