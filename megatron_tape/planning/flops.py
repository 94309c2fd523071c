"""FLOPs of a model, calculated from its settings. Imports no torch.

A multiply-add counts as two FLOPs, the backward pass of a matrix product as two forward passes. In
a sequence of `S` tokens, a query attends to `S / 2` keys, the mean of causal attention. Shifted
sparse attention is counted as full attention.
"""

import functools
from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import MATRICES
from megatron_tape.ops.backends import AVERAGE
from megatron_tape.planning.activations import keeps_attention
from megatron_tape.planning.parameters import (
    PipelineStageContents,
    parameter_count,
    trains_matrices,
    trains_output,
)
from megatron_tape.planning.plan import Plan
from megatron_tape.position import MicroBatchSizes, encoding_of


class LayerWork(NamedTuple):
    """Multiply-adds of one layer's forward pass for one token of a full sequence, without LoRA."""

    total: int
    attention: int
    """Multiply-adds for scores and for averages of values and position states, included in `total`.
    """


@functools.lru_cache(maxsize=32)
def layer_works(model: ModelConfig) -> tuple[LayerWork, ...]:
    """Return the multiply-adds of each layer. Cached, because a search calls it for every
    layout.
    """
    hidden = model.hidden_size
    heads = model.num_attention_heads
    groups = model.query_groups
    dim = model.head_dim
    encoding = encoding_of(model)
    works = []
    sequence = MicroBatchSizes(model.seq_length, model.seq_length, 2, 1)
    scores = heads * dim * model.seq_length // 2
    projections = hidden * (heads + 2 * groups) * dim + heads * dim * hidden * (
        1 + model.attention_output_gate
    )
    projections += 3 * hidden * model.ffn_hidden_size
    for layer in range(model.num_layers):
        if AVERAGE in encoding.needs and encoding.updates(layer):
            averages = 2
        else:
            averages = 1
        # The encoding's costs include the average of its state.
        total = projections + 2 * scores + encoding.costs(layer, sequence).multiply_adds
        works.append(LayerWork(total, (1 + averages) * scores))
    return tuple(works)


def flops_per_token(
    model: ModelConfig,
    extension: ExtensionConfig | None = None,
    contents: PipelineStageContents | None = None,
) -> int:
    """Return the FLOPs of matrix products and attention, forward and backward, for one token of a
    full sequence.

    The positional encoding and LoRA layers are included, recomputation is not. A frozen matrix
    needs no weight gradient, which saves a third of its FLOPs. `contents` restricts the count to a
    pipeline stage.
    """
    works = layer_works(model)
    layers = sum(
        work.total
        for work in (works if contents is None else (works[layer] for layer in contents.layers))
    )
    output = model.hidden_size * model.vocab_size * (contents is None or contents.last)
    if trains_matrices(extension):
        frozen = 0
    else:
        frozen = parameter_count(model, None, MATRICES, contents=contents)
    frozen += 0 if trains_output(model, extension) else output
    return (
        6 * (layers + output)
        - 2 * frozen
        + 6 * parameter_count(model, extension, {"lora"}, contents=contents)
    )


def flops_per_step(plan: Plan) -> int:
    """Return the FLOPs of `flops_per_token` for the global batch on all GPUs."""
    return flops_per_token(plan.model, plan.extension) * plan.tokens_per_step


def recomputed_flops_per_token(plan: Plan) -> int:
    """Return the FLOPs per token that the plan's pipeline stage recomputes in the backward pass."""
    if not plan.recomputes:
        return 0
    kept = plan.config.train.recompute == "selective" and keeps_attention(plan.model)
    works = [layer_works(plan.model)[layer] for layer in plan.contents.layers]
    lora = parameter_count(plan.model, plan.extension, {"lora"}, contents=plan.contents)
    return 2 * (sum(work.total - kept * work.attention for work in works) + lora)
