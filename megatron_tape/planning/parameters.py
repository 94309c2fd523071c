"""How many parameters a model has and which of them are trained, from its settings alone. Imports no torch."""

import functools
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import KINDS, MATRICES, kind_of, split_layer
from megatron_tape.model.shapes import ParameterShape, cut_shapes, lora_factors


class Parameter(NamedTuple):
    """What the counts ask about a parameter."""

    kind: str
    shape: ParameterShape


def trained_kinds(extension: ExtensionConfig | None) -> Collection[str]:
    """Return the kinds of parameters that `extension.trains` names; without an extension, all."""
    return KINDS if extension is None or "all" in extension.trains else extension.trains


def trains_matrices(extension: ExtensionConfig | None) -> bool:
    """Return whether the matrices of attention and the MLP are trained, which only all together can be."""
    return not set(MATRICES).isdisjoint(trained_kinds(extension))


def trains_output(model: ModelConfig, extension: ExtensionConfig | None) -> bool:
    """Return whether the matrix of the output layer is trained, be it the input embedding's or its own."""
    return ("embeddings" if model.tie_embeddings else "output") in trained_kinds(extension)


class Held(NamedTuple):
    """What a pipeline stage holds of a model."""

    layers: tuple[int, ...]
    first: bool
    """Whether it begins with the embedding."""
    last: bool
    """Whether it ends with the output layer."""

    def includes(self, name: str) -> bool:
        """Return whether it holds this parameter."""
        prefix, _, _ = split_layer(name)
        if prefix:
            return int(prefix.split(".")[2]) in self.layers
        return self.first if name.startswith("embedding.") else self.last


def parameters(
    model: ModelConfig, extension: ExtensionConfig | None = None, held: Held | None = None
) -> Counter[Parameter]:
    """Count the parameters that are alike, those of LoRA layers included if `extension` adds them.

    With `held`, they are those of a pipeline stage.
    """
    factors = lora_factors(model, extension).values()
    lora = [Parameter("lora", ParameterShape(factor.shape, factor.cut)) for factor in factors]
    return _without_lora(model, held) + Counter(lora * (model.num_layers if held is None else len(held.layers)))


@functools.lru_cache(maxsize=64)
def _without_lora(model: ModelConfig, held: Held | None) -> Counter[Parameter]:
    # A search for layouts asks thousands of times.
    shapes = cut_shapes(model).items()
    return Counter(Parameter(kind_of(name), shape) for name, shape in shapes if held is None or held.includes(name))


def parameter_count(
    model: ModelConfig,
    extension: ExtensionConfig | None = None,
    kinds: Collection[str] = KINDS,
    tensor_size: int = 1,
    held: Held | None = None,
) -> int:
    """Return the number of elements that one of `tensor_size` tensor-parallel ranks holds of these kinds."""
    found = parameters(model, extension, held).items()
    return sum(count * parameter.shape.elements(tensor_size) for parameter, count in found if parameter.kind in kinds)


def replicated_count(model: ModelConfig, extension: ExtensionConfig | None = None, held: Held | None = None) -> int:
    """Return the number of trained elements that every tensor-parallel rank holds: norms and what else is not cut."""
    found, trained = parameters(model, extension, held).items(), trained_kinds(extension)
    return sum(n * p.shape.elements() for p, n in found if p.kind in trained and p.shape.cut is None)
