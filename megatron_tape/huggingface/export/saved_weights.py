"""Open a complete checkpoint of this project, and read its unsharded weights one parameter at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checkpoint.index import check_average, read_index, shard_of, split_key
from megatron_tape.checkpoint.locate import find_checkpoint, find_source
from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.config.sections import build
from megatron_tape.errors import CheckpointError
from megatron_tape.model.names import AVERAGE
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.validation import validate_model
from megatron_tape.model.weights import from_megatron, lora_pairs, unshard
from megatron_tape.position import model_config


@dataclass(frozen=True)
class SavedWeights:
    """An open checkpoint: its `state.json`, the model's settings, and where the shards of each
    parameter are.
    """

    path: Path
    state: Any
    model: ModelConfig
    files: list[dict[str, tuple[Path, str]]]
    """For each tensor-parallel rank: by parameter name, the file of the shard and its key in the
    file.
    """
    source: SavedWeights | None = None
    """The checkpoint with the frozen parameters, if they are not in this one."""
    extension: ExtensionConfig = field(default_factory=ExtensionConfig)
    """The run's section `extension`, which has the settings of LoRA layers."""
    average: bool = False
    """Whether to read averaged weights."""

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The unsharded shapes of all parameters, by the model's names."""
        return parameter_shapes(self.model, self.extension)

    @cached_property
    def trained(self) -> list[str]:
        """The model's names of the trained parameters."""
        frozen = set(self.state.get("frozen", ()))
        return [name for name in self._shapes if name not in frozen]

    @cached_property
    def _lora(self) -> dict[str, dict[str, str]]:
        """By Hugging Face's name of each adapted matrix: the model's names of its LoRA factors A
        and B.
        """
        return lora_pairs(self.model, self.extension)

    def exported(self, name: str, with_lora: bool) -> dict[str, Tensor]:
        """Return the weights that the model's parameter `name` becomes in an export, unsharded and
        in fp32, by Hugging Face's names.

        One parameter may become several weights, such as q_proj, k_proj and v_proj. With
        `with_lora`, LoRA layers are merged into the matrices.
        """
        weights = from_megatron(name, self.read_parameter(name), self.model)
        if not with_lora:
            return weights
        for matrix in weights.keys() & self._lora.keys():
            names = self._lora[matrix]
            factors = {side: self.read_parameter(names[side]) for side in names}
            weights[matrix] = torch.addmm(
                weights[matrix], factors["B"], factors["A"], alpha=self.extension.lora_scale
            )
        return weights

    def read_parameter(self, name: str) -> Tensor:
        """Return the unsharded fp32 tensor of the parameter `name` of the model."""
        if self.source is not None and name not in self.files[0]:
            return self.source.read_parameter(name)

        shards = []
        for files in self.files:
            path, key = files[name]
            # Opened for each parameter, because the pages of an open file stay in memory.
            with safe_open(path, "pt") as file:
                shards.append(file.get_tensor(key))
        # Every rank has the whole of a parameter that is not sharded.
        if (sharding := self.state["sharded"].get(name)) is None:
            return shards[0]
        # `unshard` reads the attributes that Megatron sets on a sharded parameter.
        attributes = SimpleNamespace(
            tensor_model_parallel=True,
            partition_dim=sharding["dim"],
            partition_stride=sharding["stride"],
        )
        return unshard(shards, attributes)


def open_weights(path: Path, average: bool = False) -> SavedWeights:
    """Open the step directory `path`, as `find_checkpoint` returns it. With `average`, read
    averaged weights.

    Raises CheckpointError if the parameters do not match the model's settings, or if there are no
    averaged weights.
    """
    state = checkpoint_files.read_state(path)
    size = state["tensor_model_parallel_size"]
    config = state["config"]
    try:
        model = model_config(config["model"])
        validate_model(model)
        extension = build(ExtensionConfig, config.get("extension", {}), "config.extension")
    except (TypeError, ValueError) as error:
        raise CheckpointError(path, f"has another architecture or version: {error}") from error

    index = read_index(path, size)
    prefixes = ["weight"]
    if average:
        check_average(path, index)
        # Below, averages replace weights. Frozen parameters have no average.
        prefixes.append(AVERAGE)
    files: list[dict[str, tuple[Path, str]]] = [{} for _ in range(size)]
    for prefix in prefixes:
        for file, keys in index.items():
            shards = files[shard_of(file)]
            for key in keys:
                key_prefix, name = split_key(key)
                if key_prefix == prefix:
                    shards[name] = path / file, key

    # The run may have stored its frozen parameters only in the checkpoint from which it started.
    source = None
    source_path = find_source(path, state)
    if source_path is not None:
        # Without the warnings about broken checkpoints.
        source = open_weights(find_checkpoint(source_path, lambda message: None))
    saved = SavedWeights(path, state, model, files, source, extension, average)

    required_names = set(parameter_shapes(model, extension))
    if source is not None:
        required_names -= set(state["frozen"])
    for shards in files:
        for name in required_names - shards.keys():
            raise CheckpointError(
                path, f"has another architecture than its settings: it lacks {name:.100}"
            )
    return saved
