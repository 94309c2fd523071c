"""FLOPs of a model, by arithmetic from the settings alone. Imports no torch.

A multiply-add counts as two FLOPs, the backward pass of a matrix product as two forward passes, and a query has `S / 2`
keys (the causal mean), also where a run extends the context with shifted sparse attention.
"""

import functools
from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import MATRICES
from megatron_tape.ops.backends import AVERAGE
from megatron_tape.planning.activations import keeps_attention
from megatron_tape.planning.parameters import Held, parameter_count, trains_matrices, trains_output
from megatron_tape.planning.plan import Plan
from megatron_tape.position import MicroBatch, encoding_of


class LayerWork(NamedTuple):
    """The multiply-adds of one layer's forward pass for one token of a full sequence, LoRA layers left out."""

    total: int
    attention: int
    """Of these, scores and averages, also that of the position state."""


@functools.lru_cache(maxsize=32)
def layer_works(model: ModelConfig) -> tuple[LayerWork, ...]:
    """Count the multiply-adds of every layer, once for all layouts of a search."""
    hidden, heads, groups, dim = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    encoding, works, sequence = encoding_of(model), [], MicroBatch(model.seq_length, model.seq_length, 2, 1)
    scores = heads * dim * model.seq_length // 2
    projections = hidden * (heads + 2 * groups) * dim + heads * dim * hidden * (1 + model.attention_output_gate)
    projections += 3 * hidden * model.ffn_hidden_size
    for layer in range(model.num_layers):
        averages = 2 if AVERAGE in encoding.needs and encoding.updates(layer) else 1
        # The encoding counts the average of its state itself.
        total = projections + 2 * scores + encoding.costs(layer, sequence).multiply_adds
        works.append(LayerWork(total, (1 + averages) * scores))
    return tuple(works)


def flops_per_token(model: ModelConfig, extension: ExtensionConfig | None = None, held: Held | None = None) -> int:
    """Return the FLOPs of matrix products and attention, forward and backward, for one token of a full sequence.

    What the positional encoding and LoRA layers add is included; recomputation is not. A frozen matrix has no gradient
    of its own, which saves a third. With `held`, they are those of a pipeline stage.
    """
    works = layer_works(model)
    layers = sum(work.total for work in (works if held is None else (works[layer] for layer in held.layers)))
    output = model.hidden_size * model.vocab_size * (held is None or held.last)
    frozen = 0 if trains_matrices(extension) else parameter_count(model, None, MATRICES, held=held)
    frozen += 0 if trains_output(model, extension) else output
    return 6 * (layers + output) - 2 * frozen + 6 * parameter_count(model, extension, {"lora"}, held=held)


def flops_per_step(plan: Plan) -> int:
    """Return the same FLOPs for the global batch on all GPUs."""
    return flops_per_token(plan.model, plan.extension) * plan.tokens_per_step


def recomputed_flops_per_token(plan: Plan) -> int:
    """Return the FLOPs that the plan's pipeline stage computes again in the backward pass, for one token."""
    if not plan.recomputes:
        return 0
    kept = plan.config.train.recompute == "selective" and keeps_attention(plan.model)
    works = [layer_works(plan.model)[layer] for layer in plan.held.layers]
    lora = parameter_count(plan.model, plan.extension, {"lora"}, held=plan.held)
    return 2 * (sum(work.total - kept * work.attention for work in works) + lora)
