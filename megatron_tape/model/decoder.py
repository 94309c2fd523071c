"""Megatron-core's `GPTModel` with a fused output layer and loss, so that training never materializes all logits."""

from collections.abc import Iterable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_tape.ops.linear_cross_entropy import linear_cross_entropy


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which computes the loss when labels are given."""

    fused = False
    """Whether Liger's kernels compute the loss."""
    z_loss = 0.0
    """Coefficient of the z-loss; in training, its gradient is added to that of the loss."""
    z_losses: Tensor | float = 0.0
    """Sum of the z-losses of forward passes with gradients since the last `LanguageModel.take_z_loss`."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits (S, B, V) and None or, given labels (B, S), the loss and the loss of each token (B, S)."""
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
    """Layers named by their index in the whole model, so that names do not depend on pipeline stages."""

    def __init__(self, layers: Iterable[torch.nn.Module], first: int):
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def __getitem__(self, index: int | slice) -> torch.nn.Module:
        found = list(self)[index]
        return torch.nn.ModuleList(found) if isinstance(index, slice) else found


class Decoder(GPTModel):
    """`GPTModel` that, given labels (B, S), returns the loss weighted by `loss_mask`, and the loss of each token.

    With only some of the model's `layers` it is a model chunk: the first chunk has the embedding, the last one the
    output layer.
    """

    _output_weight: Tensor | None = None

    def __init__(self, config: TransformerConfig, layers: range, **kwargs):
        first, last = layers.start == 0, layers.stop == config.num_layers
        super().__init__(config, pre_process=first, post_process=last, **kwargs)
        self.decoder.layers = NumberedLayers(self.decoder.layers, layers.start)
        if last:
            # `GPTModel` always builds Megatron's class.
            self.output_layer.__class__ = OutputLayer
            if self.share_embeddings_and_output_weights and not first:
                self.output_layer.weight = None

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the weight of a tied output layer: that of the embedding or, in the last stage, its copy."""
        return super().shared_embedding_or_output_weight() if self._output_weight is None else self._output_weight

    def use_output_weight(self, weight: Tensor) -> None:
        """Compute logits with `weight` (V, C), a copy of the embedding weight, in a last stage without embedding."""
        self._output_weight = weight

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, loss_mask=None, **kwargs):
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, weight, labels=labels, loss_weights=loss_mask)
