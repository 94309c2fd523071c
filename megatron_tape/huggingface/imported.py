"""Writes weights that came from elsewhere as a checkpoint of this project, from which a run can start at step 0."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_tape import checkpoint_files, command_line
from megatron_tape.config import ModelConfig
from megatron_tape.files import atomic_directory
from megatron_tape.huggingface.tensor_files import TensorFile, size_in_bytes
from megatron_tape.weights import WRAPPED, parameter_shapes, to_megatron

TENSORS = "tensors-tp00-dp00000.safetensors"
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class _Padded(Mapping):
    """Weights whose vocabulary has `rows` rows; those added are the mean of all, which no token prefers."""

    def __init__(self, weights: Mapping[str, Tensor], rows: int):
        self._weights, self._rows = weights, rows

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        if name not in _VOCABULARY or len(tensor) == self._rows:
            return tensor
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(self._rows - len(tensor), -1)])

    def __iter__(self):
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def write_imported(
    output: str | Path, model: ModelConfig, weights: Mapping[str, Tensor], vocabulary: int, origin: str
) -> None:
    """Write whole weights by Hugging Face's names (see `megatron_tape.weights`) as the new checkpoint `output`.

    `model.vocab_size` may exceed `vocabulary`, the rows that the weights have: it is padded, and an export takes the
    padding away again. `weights` is asked for one parameter at a time and may read it only then. `origin` says where
    they come from. Raises ValueError where one is missing or of another shape; then nothing is left behind.

    The checkpoint holds no Adam state. `checkpoint.resume: OUTPUT` starts a run from it, with the model's settings as
    `OUTPUT/model.yaml` has them.
    """
    output = Path(output)
    shapes = parameter_shapes(model)
    padded = _Padded(weights, model.vocab_size)
    with atomic_directory(output) as directory:
        total = sum(size_in_bytes(shape, torch.float32) for shape in shapes.values())
        progress, written = command_line.Progress(total), 0
        prefixed = {f"weight/{WRAPPED}{name}": shape for name, shape in shapes.items()}
        with TensorFile(directory / TENSORS, prefixed, torch.float32) as file:
            for name, shape in shapes.items():
                try:
                    tensor = to_megatron(padded, name, model)
                except KeyError as error:
                    raise ValueError(f"{origin} lacks the parameter {error.args[0]}") from None
                except RuntimeError as error:
                    raise ValueError(f"{origin} does not fit its settings at {name}: {error}") from None
                if tuple(tensor.shape) != shape:
                    raise ValueError(f"{origin} gives {name} the shape {tuple(tensor.shape)} instead of {shape}")
                file.write(f"weight/{WRAPPED}{name}", tensor)
                written += size_in_bytes(shape, torch.float32)
                progress.update(written, lambda _: f"writing weights: {written / 1e9:,.2f} GB")  # noqa: B023
        progress.end()
        state = {
            "step": 0,
            "optimizer_steps": 0,
            "consumed_samples": 0,
            "progress": {"bad_steps": 0},
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 1,
            "sharded": {},
            "vocabulary": vocabulary,
            "origin": origin,
            "config": {"model": dataclasses.asdict(model)},
        }
        checkpoint_files.write_json(directory / "state.json", state)
        _write_settings(directory / "model.yaml", model)
        entries = {}
        for name in (TENSORS, "state.json", "model.yaml"):
            size, sha256 = checkpoint_files.digest(directory / name)
            entries[name] = {"bytes": size, "sha256": sha256}
        manifest = {"format_version": checkpoint_files.FORMAT_VERSION, "step": 0, "files": entries}
        checkpoint_files.write_json(directory / checkpoint_files.MANIFEST, manifest)
    command_line.say(
        f"wrote {output}; train from it with --config {output / 'model.yaml'} --config RECIPE "
        f"--checkpoint.resume {output}"
    )


def _write_settings(path: Path, model: ModelConfig) -> None:
    import yaml

    path.write_text(yaml.safe_dump({"model": dataclasses.asdict(model)}, sort_keys=False), encoding="utf-8")


def padded_vocabulary(rows: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that holds `rows`; raises ValueError if `multiple` is below 1."""
    if multiple < 1:
        raise ValueError(f"--vocab-multiple is {multiple}; give 1 or more")
    return -(-rows // multiple) * multiple
