"""How many parameters a model has and which of them are trained, from its settings alone. Imports no torch."""

import functools
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from megatron_tape.config.schema import OF_ENCODING, ExtensionConfig, ModelConfig
from megatron_tape.model.names import part_of
from megatron_tape.model.shapes import ParameterShape, cut_shapes, lora_factors

PARTS = ("matrices", "biases", "embeddings", "output", "norms", OF_ENCODING, "lora")
"""The parts of a model; `model.names.part_of` says to which one a parameter belongs."""


class Parameter(NamedTuple):
    """What the counts ask about a parameter."""

    part: str
    shape: ParameterShape


def trained_parts(extension: ExtensionConfig | None) -> Collection[str]:
    """Return the parts that `extension.trains` names; without an extension, all."""
    return PARTS if extension is None or "all" in extension.trains else extension.trains


def trains_output(model: ModelConfig, extension: ExtensionConfig | None) -> bool:
    """Return whether the matrix of the output layer is trained, be it the input embedding's or its own."""
    return ("embeddings" if model.tie_embeddings else "output") in trained_parts(extension)


def parameters(model: ModelConfig, extension: ExtensionConfig | None = None) -> Counter[Parameter]:
    """Count the parameters that are alike, those of LoRA layers included if `extension` adds them."""
    factors = lora_factors(model, extension).values()
    lora = [Parameter("lora", ParameterShape(factor.shape, factor.cut)) for factor in factors]
    return _without_lora(model) + Counter(lora * model.num_layers)


@functools.lru_cache(maxsize=32)
def _without_lora(model: ModelConfig) -> Counter[Parameter]:
    # A search for layouts asks thousands of times.
    return Counter(Parameter(part_of(name), shape) for name, shape in cut_shapes(model).items())


def parameter_count(
    model: ModelConfig,
    extension: ExtensionConfig | None = None,
    parts: Collection[str] = PARTS,
    tensor_size: int = 1,
) -> int:
    """Return the number of elements that one of `tensor_size` tensor-parallel ranks holds of these parts."""
    found = parameters(model, extension).items()
    return sum(count * parameter.shape.elements(tensor_size) for parameter, count in found if parameter.part in parts)


def replicated_count(model: ModelConfig, extension: ExtensionConfig | None = None) -> int:
    """Return the number of trained elements that every tensor-parallel rank holds: norms and what else is not cut."""
    found, trained = parameters(model, extension).items(), trained_parts(extension)
    return sum(n * p.shape.elements() for p, n in found if p.part in trained and p.shape.cut is None)
