"""The parameters of a model and which of them are trained, calculated from the configuration. Imports no torch."""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from math import prod
from typing import NamedTuple, TypeVar

from megatron_tape.config.schema import OF_ENCODING, ExtensionConfig, ModelConfig
from megatron_tape.model.lora_shapes import lora_factors
from megatron_tape.position import ENCODINGS, encoding_of

Found = TypeVar("Found")

PARTS = ("matrices", "biases", "embeddings", "output", "norms", OF_ENCODING, "lora")
"""The parts of a model; `model.weights.part_of` says to which one a parameter belongs."""


class Weight(NamedTuple):
    """One parameter."""

    part: str
    size: int
    """Numbers of the whole parameter."""
    is_cut: bool
    """Whether tensor parallelism cuts it; otherwise every rank holds it whole."""


def trained_parts(extension: ExtensionConfig | None) -> Collection[str]:
    """Return the parts that `extension.trains` names; without an extension, all."""
    return PARTS if extension is None or "all" in extension.trains else extension.trains


def trains_output(model: ModelConfig, extension: ExtensionConfig | None) -> bool:
    """Return whether the matrix of the output layer is trained, be it the input embedding's or its own."""
    return ("embeddings" if model.tie_embeddings else "output") in trained_parts(extension)


def lora_targets(extension: ExtensionConfig | None) -> set[str]:
    """Return the projections that have LoRA layers."""
    return set() if extension is None or not extension.adds_lora else {*extension.lora_targets}


def weights(model: ModelConfig, extension: ExtensionConfig | None = None) -> Iterator[Weight]:
    """Yield every parameter; those of LoRA layers if `extension` adds them."""
    hidden, heads, groups, dim = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    projected = (heads + 2 * groups) * dim
    layer = [
        Weight("matrices", numbers * hidden, True)
        for numbers in (projected, heads * dim, 2 * model.ffn_hidden_size, model.ffn_hidden_size)
    ]
    layer += [Weight("matrices", heads * dim * hidden, True)] * model.attention_output_gate
    layer += [Weight("biases", projected, True)] * model.qkv_bias
    layer += [Weight("norms", hidden, False)] * 2 + [Weight("norms", dim, False)] * (2 * model.qk_norm)
    factors = lora_factors(model, extension).values() if extension is not None else ()
    layer += [Weight("lora", prod(factor.shape), factor.cut is not None) for factor in factors]
    encoding = encoding_of(model)
    yield Weight("embeddings", model.vocab_size * hidden, True)
    for index in range(model.num_layers):
        yield from layer
        for parameter in encoding.parameters(index).values():
            yield Weight(OF_ENCODING, prod(parameter.shape), parameter.head_axis is not None)
    yield Weight("norms", hidden, False)
    if not model.tie_embeddings:
        yield Weight("output", model.vocab_size * hidden, True)


def remembered(function: Callable[..., Found]) -> Callable[..., Found]:
    """Let a function of a model's settings, and of an extension's, compute its result once for equal settings.

    A search for layouts asks thousands of times. The result must not be changed.
    """
    results: dict[tuple, Found] = {}

    @functools.wraps(function)
    def remembering(model: ModelConfig, extension: ExtensionConfig | None = None) -> Found:
        key = repr(model), repr(extension), ENCODINGS.get(model.position_encoding)
        if key not in results:
            if len(results) >= 32:
                results.clear()
            results[key] = function(model, extension)
        return results[key]

    return remembering


@remembered
def weight_counts(model: ModelConfig, extension: ExtensionConfig | None = None) -> Counter[Weight]:
    """Count the parameters that are alike."""
    return Counter(weights(model, extension))


def parameter_count(
    model: ModelConfig, extension: ExtensionConfig | None = None, parts: Collection[str] = PARTS
) -> int:
    """Return the number of parameters of the whole model, or of some of its parts."""
    found = weight_counts(model, extension).items()
    return sum(count * weight.size for weight, count in found if weight.part in parts)


def parameters_per_rank(
    model: ModelConfig,
    tensor_size: int,
    extension: ExtensionConfig | None = None,
    parts: Collection[str] = PARTS,
) -> int:
    """Count one tensor-parallel rank's numbers."""
    found = ((weight, count) for weight, count in weight_counts(model, extension).items() if weight.part in parts)
    return sum(count * (weight.size // (tensor_size if weight.is_cut else 1)) for weight, count in found)


def replicated_parameters(
    model: ModelConfig, extension: ExtensionConfig | None = None, parts: Collection[str] = PARTS
) -> int:
    """Count the numbers that every tensor-parallel rank holds: norms, and factors and matrices that are not cut."""
    found = weight_counts(model, extension).items()
    return sum(count * weight.size for weight, count in found if weight.part in parts and not weight.is_cut)
