"""FLOPs of a model, calculated from its settings. Imports no torch.

A multiply-add counts as two FLOPs, the backward pass of a matrix product as two forward passes. A
query attends to `ModelConfig.keys_per_query` keys: to half of a sequence, the mean of causal
attention, and in layers with a sliding window to fewer. Shifted sparse attention is counted as full
attention.
"""

import functools
from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import MATRICES
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
    query_width = model.num_attention_heads * model.head_dim
    group_width = model.query_groups * model.head_dim
    encoding = encoding_of(model)
    # All tokens of a sequence are on one GPU. The width in bytes has no effect on multiply-adds.
    one_sequence = MicroBatchSizes(
        tokens=model.seq_length, local_tokens=model.seq_length, width=2, tensor_size=1
    )

    qkv = hidden * (query_width + 2 * group_width)
    output = hidden * query_width
    # The gate is computed from attention's input by a matrix of the same size.
    gate = output * model.attention_output_gate
    # Gate, up and down projection.
    mlp = 3 * hidden * model.ffn_hidden_size

    works = []
    for layer in range(model.num_layers):
        encoding_work = encoding.costs(layer, one_sequence).multiply_adds
        averages = 1  # of the values
        if encoding.averages_state(layer):
            averages = 2  # of values and states; `encoding_work` includes the latter
        # Averages of values take as much as scores.
        scores = int(query_width * model.keys_per_query(layer))
        total = qkv + output + gate + mlp + 2 * scores + encoding_work
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
    output = model.hidden_size * model.vocab_size
    if contents is not None:
        works = tuple(works[layer] for layer in contents.layers)
        output *= contents.is_last

    forward = sum(work.total for work in works) + output
    # Each element of a LoRA layer takes one multiply-add per token.
    forward += parameter_count(model, extension, {"lora"}, contents=contents)

    frozen = 0
    if not trains_matrices(extension):
        frozen += parameter_count(model, kinds=MATRICES, contents=contents)
    if not trains_output(model, extension):
        frozen += output
    # A multiply-add is 2 FLOPs. The backward pass has two products like that of the forward pass,
    # which makes 6 FLOPs. A frozen matrix needs only one of these two.
    return 6 * forward - 2 * frozen


def flops_per_step(plan: Plan) -> int:
    """Return the FLOPs of `flops_per_token` for the global batch on all GPUs."""
    return flops_per_token(plan.model, plan.extension) * plan.tokens_per_step


def recomputed_flops_per_token(plan: Plan) -> int:
    """Return the FLOPs per token that the plan's pipeline stage recomputes in the backward pass."""
    if not plan.recomputes:
        return 0
    works = [layer_works(plan.model)[layer] for layer in plan.contents.layers]
    recomputed = sum(work.total for work in works)
    recomputed += parameter_count(plan.model, plan.extension, {"lora"}, contents=plan.contents)
    if plan.keeps_attention:
        recomputed -= sum(work.attention for work in works)
    return 2 * recomputed
