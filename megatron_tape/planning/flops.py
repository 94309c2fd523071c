"""FLOPs of a model and of one GPU, by arithmetic from the settings alone. Imports no torch.

A multiply-add counts as two FLOPs, the backward pass of a matrix product as two forward passes, and a query has `S / 2`
keys (the causal mean), also where a run extends the context with shifted sparse attention.
"""

import functools
from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.ops.backends import AVERAGE
from megatron_tape.planning.activations import keeps_attention
from megatron_tape.planning.parameters import parameter_count, trained_parts, trains_output
from megatron_tape.planning.plan import CALLED_TWICE, Plan
from megatron_tape.position import MicroBatch, encoding_of

NORMS, ACTIVATION, HEADS = 10, 3, 2
"""Elements that the elementwise operations of a layer's forward pass read and write for each token: per hidden unit
(two norms, two residuals), per unit of the MLP (its activation, in one kernel), and per unit of queries, keys and
values (rotation)."""
WIDE_HEADS = 64
"""Wider ones take our kernel two launches backward (`ops.kernels.triton_attention`)."""
LOGIT_BYTES = 40
"""Bytes read and written for each logit, forward and backward: in bf16 and, several times, in fp32."""


class LayerWork(NamedTuple):
    """The multiply-adds of one layer's forward pass for one token of a full sequence, LoRA layers left out."""

    projections: int
    """Attention's projections and the MLP."""
    scores: int
    """Attention's scores; the average of the values takes as many."""
    state_average: int
    """The average of the position state, by the same attention map."""
    position: int
    """What else the positional encoding adds."""

    @property
    def total(self) -> int:
        return self.projections + 2 * self.scores + self.state_average + self.position


@functools.lru_cache(maxsize=32)
def layer_works(model: ModelConfig) -> tuple[LayerWork, ...]:
    """Count the multiply-adds of every layer, once for all layouts of a search."""
    hidden, heads, groups, dim = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    encoding, works = encoding_of(model), []
    scores = heads * dim * model.seq_length // 2
    projections = hidden * (heads + 2 * groups) * dim + heads * dim * hidden * (1 + model.attention_output_gate)
    for layer in range(model.num_layers):
        average = scores if AVERAGE in encoding.needs and encoding.updates(layer) else 0
        position = encoding.multiply_adds(layer) - average
        works.append(LayerWork(projections + 3 * hidden * model.ffn_hidden_size, scores, average, position))
    return tuple(works)


def flops_per_token(model: ModelConfig, extension: ExtensionConfig | None = None) -> int:
    """Return the FLOPs of matrix products and attention, forward and backward, for one token of a full sequence.

    What the positional encoding and LoRA layers add is included; recomputation is not. A frozen matrix has no gradient
    of its own, which saves a third.
    """
    layers = sum(work.total for work in layer_works(model))
    output = model.hidden_size * model.vocab_size
    frozen = 0 if "matrices" in trained_parts(extension) else parameter_count(model, None, {"matrices"})
    frozen += 0 if trains_output(model, extension) else output
    return 6 * (layers + output) - 2 * frozen + 6 * parameter_count(model, extension, {"lora"})


def flops_per_step(plan: Plan) -> int:
    """Return the same FLOPs for the global batch on all GPUs."""
    return flops_per_token(plan.model, plan.extension) * plan.tokens_per_step


def attention_products(plan: Plan, averages_state: bool) -> tuple[int, int]:
    """Return how many products of S x S x D attention computes in one layer on a GPU, forward and backward.

    Forward: scores, and the average of each value. Backward: scores again, their gradient from each average, and the
    gradients of queries, keys and each value. Our kernel computes the scores twice if heads are wide, and scores and
    their gradient twice in deterministic runs, where queries have a launch of their own.
    """
    values, backend = 1 + averages_state, plan.attention.backend
    if backend in CALLED_TWICE:
        return 2 * values, 5 * values
    again = 0
    if backend == "triton":
        again = int(plan.model.head_dim > WIDE_HEADS) + (1 + values) * plan.config.train.deterministic
    return 1 + values, 3 + 2 * values + again


class Load(NamedTuple):
    """What one GPU computes of a micro-batch in one phase."""

    forward: float
    """FLOPs of the forward pass."""
    backward: float
    """FLOPs of the backward pass."""
    moved: float
    """Bytes that the forward pass reads and writes; the backward pass does so with twice as many."""


def loads(plan: Plan) -> dict[str, Load]:
    """Return what one GPU computes of one micro-batch, without recomputation, by the computing phases' names."""
    model, batch, tokens = plan.model, plan.batch, plan.matrix_tokens
    hidden, inner, layers = model.hidden_size, model.ffn_hidden_size, len(plan.held.layers)
    heads = model.num_attention_heads * model.head_dim
    projected = heads + 2 * model.query_groups * model.head_dim
    works, ranks = [layer_works(model)[layer] for layer in plan.held.layers], plan.config.parallel.ranks_per_stage
    of_multiply_add = 2 * batch.tokens / ranks

    matrices = sum(work.projections for work in works)
    matrices += parameter_count(model, plan.extension, {"lora"}, held=plan.held)
    products = 2 if "matrices" in plan.trained_parts else 1
    read = layers * hidden * (projected + heads + 3 * inner) / plan.tensor_size
    multiplied = layers * tokens * (4 * hidden + (projected + heads + 3 * inner) / plan.tensor_size)

    products_of = {averages: attention_products(plan, averages) for averages in (False, True)}
    attended = [[work.scores * products for products in products_of[work.state_average > 0]] for work in works]
    averaging = sum(work.state_average > 0 for work in works)
    read_and_written = (layers * (projected + heads) + averaging * 2 * heads) * batch.tokens / ranks

    position = sum(work.position for work in works)
    of_encoding = sum(_moved_by_encoding(model, batch)[layer] for layer in plan.held.layers)
    of_mlp_and_heads = tokens / plan.tensor_size * (ACTIVATION * inner + HEADS * projected)
    elementwise = layers * (NORMS * batch.local_tokens * hidden + of_mlp_and_heads)
    if plan.attention.backend == "torch_wide":
        # States are copied into one tensor with the values, and the averages of the values out of one.
        elementwise += averaging * 2 * (model.query_groups * model.head_dim + heads) * batch.tokens / ranks

    logits = tokens * model.vocab_size / plan.tensor_size * plan.held.last
    product = 2 * logits * hidden
    return {
        "projections": Load(
            of_multiply_add * matrices, products * of_multiply_add * matrices, plan.width * (read + multiplied)
        ),
        "attention": Load(
            of_multiply_add * sum(forward for forward, _ in attended),
            of_multiply_add * sum(backward for _, backward in attended),
            plan.width * read_and_written,
        ),
        "position": Load(of_multiply_add * position, 2 * of_multiply_add * position, of_encoding),
        "elementwise": Load(0, 0, plan.width * elementwise),
        "loss": Load(product, product * (1 + plan.trains_output), LOGIT_BYTES * logits / 3),
    }


def recomputed_phases(plan: Plan) -> tuple[str, ...]:
    """Return the phases whose forward pass the backward pass repeats."""
    if not plan.recomputes:
        return ()
    kept = plan.config.train.recompute == "selective" and keeps_attention(plan.model)
    return ("projections", *(() if kept else ("attention",)), "position", "elementwise")


def product_flops(plan: Plan) -> float:
    """Return the FLOPs of one GPU's matrix products in a step: of all but attention, recomputation included."""
    found = loads(plan)
    repeated = sum(found[phase].forward for phase in recomputed_phases(plan) if phase != "attention")
    once = sum(load.forward + load.backward for phase, load in found.items() if phase != "attention")
    return (once + repeated) * plan.micro_batches


@functools.lru_cache(maxsize=256)
def _moved_by_encoding(model: ModelConfig, batch: MicroBatch) -> tuple[int, ...]:
    """Return the bytes that each layer's forward pass reads and writes for its encoding, outside attention.

    They are the states before and after the update, the average, and what is kept for the backward pass.
    """
    encoding, found = encoding_of(model), []
    for layer in range(model.num_layers):
        states = encoding.state_bytes(layer, batch.width) + encoding.updates(layer) * (
            encoding.state_bytes(layer + 1, batch.width) + model.num_attention_heads * model.head_dim * batch.width
        )
        moved = batch.local_tokens * states + encoding.saved_bytes(layer, batch)
        found.append(moved if encoding.parameters(layer) else 0)
    return tuple(found)
