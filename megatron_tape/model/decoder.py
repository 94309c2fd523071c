"""Megatron-core's `GPTModel`, whose output layer and loss are one: the logits of all tokens never exist in training."""

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_tape.ops.linear_cross_entropy import linear_cross_entropy


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which returns losses if it is given labels."""

    fused = False
    """Whether Liger's kernels compute the loss."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits (S, B, V) and no bias or, for labels (B, S), what `linear_cross_entropy` returns."""
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        return linear_cross_entropy(input_, weight, labels, loss_weights, self.tp_group, self.fused)


class Decoder(GPTModel):
    """`GPTModel`, which returns for labels (B, S) the loss, weighted by its `loss_mask`, and each token's loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # `GPTModel` builds Megatron's class, and takes no other.
        self.output_layer.__class__ = OutputLayer

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, loss_mask=None, **kwargs):
        if labels is None:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, weight, labels=labels, loss_weights=loss_mask)
