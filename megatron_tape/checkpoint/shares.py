"""The tensor files of a checkpoint: where each rank's share of a parameter is, checked against the model's shapes."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatron_tape.errors import CheckpointError
from megatron_tape.model.weights import current_name


class Shares:
    """One tensor-parallel rank's shares, by keys such as `exp_avg/NAME` with current names; its files stay open."""

    def __init__(self, checkpoint: Path, rank: int):
        """Open the files. Raises CheckpointError if one is not a safetensors file."""
        self._places: dict[str, tuple[Path, safe_open, str]] = {}
        for path in sorted(checkpoint.glob(f"tensors-tp{rank:02d}-*.safetensors")):
            try:
                file = safe_open(path, "pt")
                self._places |= {current_name(key): (path, file, key) for key in file.keys()}
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                message = f"{path} is not a safetensors file ({reason}); choose another checkpoint"
                raise CheckpointError(message) from None

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def read(self, key: str) -> Tensor:
        """Return the tensor of a key that is present."""
        _, file, stored = self._places[key]
        return file.get_tensor(stored)

    def weight_names(self) -> set[str]:
        """Return the names of the parameters whose weights are held."""
        return {key.partition("/")[2] for key in self._places if key.startswith("weight/")}

    def check(self, key: str, shape: list[int]) -> None:
        """Raise CheckpointError if the tensor is not fp32 or does not have this `shape`."""
        path, file, stored = self._places[key]
        found = file.get_slice(stored)
        if (found.get_dtype(), found.get_shape()) != ("F32", shape):
            raise CheckpointError(
                f"{path} holds {key} as {found.get_dtype()} of shape {found.get_shape()}, and the model's is F32 of "
                f"shape {shape}; choose another checkpoint"
            )

    @property
    def kinds(self) -> set[str]:
        """The kinds of tensors kept for parameters: `weight`, and Adam's moments by name."""
        return {key.partition("/")[0] for key in self._places}


def check_shares(
    checkpoint: Path, shares: list[Shares], parameters: Mapping[str, nn.Parameter], tensor_parallel_size: int
) -> None:
    """Raise CheckpointError if a share's shape or type differs from the model's, or is missing for some ranks.

    `shares` are those of all ranks that saved; `parameters` are now cut over `tensor_parallel_size` ranks.
    """
    kinds = sorted({kind for held in shares for kind in held.kinds})
    for name, parameter in parameters.items():
        shape = list(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO 3 `shape` is that of an empty tensor
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] = shape[parameter.partition_dim] * tensor_parallel_size // len(shares)
        for key in (f"{kind}/{name}" for kind in kinds):
            holders = [held for held in shares if key in held]
            if len(holders) not in (0, len(shares)):
                raise CheckpointError(
                    f"{checkpoint} holds {key} for only some tensor-parallel ranks; choose another checkpoint"
                )
            for held in holders:
                held.check(key, shape)
