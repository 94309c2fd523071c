"""Megatron-core's `GPTModel` with a fused output layer and loss, so that training never materializes all logits.

Axes: B batch, S all tokens of a sequence, s this rank's tokens, C hidden size, V this rank's shard of the vocabulary.
"""

from collections.abc import Iterable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_tape.ops.linear_cross_entropy import linear_cross_entropy


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer; with labels, it computes the loss without storing the logits."""

    fused = False
    """Whether Liger's kernels compute the loss."""
    z_loss = 0.0
    """Coefficient of the z-loss. In training, the gradient of the z-loss is added to that of the loss."""
    z_losses: Tensor | float = 0.0
    """Sum of the z-losses of all forward passes with gradients since the last `LanguageModel.take_z_loss`."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states (s, B, C) to logits (S, B, V) and None.

        With `labels` (B, S), return the scalar loss and the loss of each token (B, S) instead. The scalar is the mean
        over the tokens or, with `loss_weights` (B, S), their weighted sum.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        loss, losses, z_loss_sum = linear_cross_entropy(
            input_, weight, labels, loss_weights, self.tp_group, self.fused, z_loss=z_loss
        )
        if z_loss:
            self.z_losses = self.z_losses + z_loss_sum
        return loss, losses


class NumberedLayers(torch.nn.ModuleList):
    """A ModuleList whose parameter names contain each layer's index in the whole model, not in the model chunk.

    `first` is the index of the chunk's first layer. Indexing the list counts from 0.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], first: int):
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def __getitem__(self, index: int | slice) -> torch.nn.Module:
        selected = list(self)[index]
        return torch.nn.ModuleList(selected) if isinstance(index, slice) else selected


class Decoder(GPTModel):
    """`GPTModel` that returns logits or, with labels (B, S), the results of `OutputLayer.forward`.

    `loss_mask` (B, S) holds the weights of the tokens in the loss. `layers` are the decoder layers to build. If they
    are not all layers, the decoder is a model chunk: the first chunk contains the embedding, the last one the output
    layer.
    """

    _output_weight: Tensor | None = None

    def __init__(self, config: TransformerConfig, layers: range, **kwargs):
        first, last = layers.start == 0, layers.stop == config.num_layers
        super().__init__(config, pre_process=first, post_process=last, **kwargs)
        self.decoder.layers = NumberedLayers(self.decoder.layers, layers.start)
        if last:
            # `GPTModel` has no option for the class of the output layer.
            self.output_layer.__class__ = OutputLayer
            if self.share_embeddings_and_output_weights and not first:
                self.output_layer.weight = None

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the weight of a tied output layer: the embedding weight or, if it was set, the copy of it."""
        return super().shared_embedding_or_output_weight() if self._output_weight is None else self._output_weight

    def use_output_weight(self, weight: Tensor) -> None:
        """Set the weight (V, C) of a tied output layer, for the last pipeline stage, which has no embedding."""
        self._output_weight = weight

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, loss_mask=None, **kwargs):
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, weight, labels=labels, loss_weights=loss_mask)
