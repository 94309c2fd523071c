"""The number of a model's parameters and which of them are trained, from its settings. Imports no
torch.
"""

import functools
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import KINDS, MATRICES, kind_of, split_layer
from megatron_tape.model.shapes import ParameterShape, lora_factors, sharded_shapes


class Parameter(NamedTuple):
    """The kind of a parameter (one of `model.names.KINDS`) and its shape."""

    kind: str
    shape: ParameterShape


def trained_kinds(extension: ExtensionConfig | None) -> Collection[str]:
    """Return the kinds of parameters that `extension.trains` names; without an extension, all."""
    if extension is None or "all" in extension.trains:
        return KINDS
    return extension.trains


def trains_matrices(extension: ExtensionConfig | None) -> bool:
    """Return whether the matrices of attention and the MLP are trained. A run trains all of them or
    none.
    """
    return not set(MATRICES).isdisjoint(trained_kinds(extension))


def trains_output(model: ModelConfig, extension: ExtensionConfig | None) -> bool:
    """Return whether the output layer's matrix is trained; with tied embeddings, it is the
    embedding's matrix.
    """
    kind = "embeddings" if model.tie_embeddings else "output"
    return kind in trained_kinds(extension)


class PipelineStageContents(NamedTuple):
    """The layers of a pipeline stage, and whether it has the embedding and the output layer."""

    layers: tuple[int, ...]
    is_first: bool
    """Whether this is the first stage, which has the embedding."""
    is_last: bool
    """Whether this is the last stage, which has the last norm and the output layer."""

    def includes(self, name: str) -> bool:
        """Return whether the stage has the parameter of this name."""
        layer, _ = split_layer(name)
        if layer is not None:
            return layer in self.layers
        if name.startswith("embedding."):
            return self.is_first
        # The last norm and the output layer.
        return self.is_last


def parameters(
    model: ModelConfig,
    extension: ExtensionConfig | None = None,
    contents: PipelineStageContents | None = None,
) -> Counter[Parameter]:
    """Count the parameters by kind and shape, including LoRA layers if `extension` adds them.

    `contents` restricts the count to a pipeline stage.
    """
    # A copy, because the counter is cached.
    counts = Counter(_without_lora(model, contents))
    num_layers = model.num_layers
    if contents is not None:
        num_layers = len(contents.layers)
    # Every layer has LoRA factors of the same shapes.
    for factor in lora_factors(model, extension).values():
        counts[Parameter("lora", ParameterShape(factor.shape, factor.partition_dim))] += num_layers
    return counts


@functools.lru_cache(maxsize=64)
def _without_lora(model: ModelConfig, contents: PipelineStageContents | None) -> Counter[Parameter]:
    """Return the number of parameters by kind and shape, without LoRA layers. Cached, because a
    search for layouts calls it thousands of times.
    """
    return Counter(
        Parameter(kind_of(name), shape)
        for name, shape in sharded_shapes(model).items()
        if contents is None or contents.includes(name)
    )


def parameter_count(
    model: ModelConfig,
    extension: ExtensionConfig | None = None,
    kinds: Collection[str] = KINDS,
    tensor_size: int = 1,
    contents: PipelineStageContents | None = None,
) -> int:
    """Return the number of elements of the parameters of `kinds` on one of `tensor_size`
    tensor-parallel ranks.

    `contents` restricts the count to a pipeline stage.
    """
    return sum(
        count * shape.elements(tensor_size)
        for (kind, shape), count in parameters(model, extension, contents).items()
        if kind in kinds
    )


def replicated_count(
    model: ModelConfig, extension: ExtensionConfig | None, contents: PipelineStageContents | None
) -> int:
    """Return the number of trained elements that are replicated over the tensor-parallel ranks,
    such as norms.
    """
    trained = trained_kinds(extension)
    return sum(
        count * shape.elements()
        for (kind, shape), count in parameters(model, extension, contents).items()
        if kind in trained and shape.partition_dim is None
    )
