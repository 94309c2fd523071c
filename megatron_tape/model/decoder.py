"""Megatron-core's `GPTModel`, whose output layer and loss are one: the logits of all tokens never exist in training."""

from collections.abc import Iterable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_tape.ops.linear_cross_entropy import linear_cross_entropy


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which returns losses if it is given labels."""

    fused = False
    """Whether Liger's kernels compute the loss."""
    z_loss = 0.0
    """The factor of the z-loss, whose gradient is part of the loss's in training."""
    z_losses: Tensor | float = 0.0
    """The sum of the z-losses of forward passes with a gradient, until the engine takes it."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits (S, B, V) and no bias or, for labels (B, S), the loss and each token's loss (B, S)."""
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        loss, losses, of_z = linear_cross_entropy(
            input_, weight, labels, loss_weights, self.tp_group, self.fused, z_loss=z_loss
        )
        if z_loss:
            self.z_losses = self.z_losses + of_z
        return loss, losses


class StretchOfLayers(torch.nn.ModuleList):
    """Layers whose names have their numbers in the whole model, so that no name depends on pipeline stages."""

    def __init__(self, layers: Iterable[torch.nn.Module], first: int):
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def __getitem__(self, index: int | slice) -> torch.nn.Module:
        found = list(self)[index]
        return torch.nn.ModuleList(found) if isinstance(index, slice) else found


class Decoder(GPTModel):
    """`GPTModel`, which returns for labels (B, S) the loss, weighted by its `loss_mask`, and each token's loss.

    Given other `layers` than all, it is a stretch of the model: without the embedding unless they are the first, and
    without the output layer unless they are the last.
    """

    _output_weight: Tensor | None = None

    def __init__(self, config: TransformerConfig, layers: range, **kwargs):
        first, last = layers.start == 0, layers.stop == config.num_layers
        super().__init__(config, pre_process=first, post_process=last, **kwargs)
        self.decoder.layers = StretchOfLayers(self.decoder.layers, layers.start)
        if last:
            # `GPTModel` builds Megatron's class, and takes no other.
            self.output_layer.__class__ = OutputLayer
            if self.share_embeddings_and_output_weights and not first:
                self.output_layer.weight = None

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the weight of a tied output layer: the embedding's, or the copy of it that a last stage has."""
        return super().shared_embedding_or_output_weight() if self._output_weight is None else self._output_weight

    def use_output_weight(self, weight: Tensor) -> None:
        """Compute logits with `weight` (V, C), the embedding's, in a last stage, which has none of its own."""
        self._output_weight = weight

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, loss_mask=None, **kwargs):
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, weight, labels=labels, loss_weights=loss_mask)
