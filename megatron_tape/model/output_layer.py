"""The output layer, which computes the loss in chunks of tokens, so that training never
materializes all logits.

Axes: B batch, S tokens of this context-parallel rank, s tokens of this rank, C hidden size, V this
rank's shard of the vocabulary.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_tape.config.schema import ModelConfig
from megatron_tape.ops.linear_cross_entropy import linear_cross_entropy


class OutputLayer(ColumnParallelLinear):
    """Megatron's column-parallel linear layer, from hidden states to logits or, given labels, to
    the loss.

    With `model.tie_embeddings`, the layer has no weight of its own, and the caller passes the
    embedding's weight.

    Args:
        config: the settings of `model` for Megatron.
        groups: the process groups of Megatron's layout.
        fused: compute the loss with Liger's kernels.
        z_loss: coefficient of the z-loss. In training, its gradient is added to that of the loss.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        fused: bool = False,
        z_loss: float = 0.0,
    ):
        super().__init__(
            model_config.hidden_size,
            model_config.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=True,
            skip_weight_param_allocation=model_config.tie_embeddings,
            tp_group=groups.tp,
        )
        self.fused = fused
        self.z_loss = z_loss
        self._z_loss_sum: Tensor | float = 0.0
        """Sum of the z-losses since the last call of `take_z_loss`."""

    def take_z_loss(self) -> Tensor | float:
        """Return the sum of the z-losses of all forward passes with gradients since the last
        call.
        """
        total = self._z_loss_sum
        self._z_loss_sum = 0.0
        return total

    def forward(
        self,
        hidden_states: Tensor,
        tied_weight: Tensor | None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map hidden states (s, B, C) to the logits (B, S, all V) or, with labels, to the loss.

        With `labels` (B, S), return the scalar loss and the loss of each token (B, S). The scalar
        is the mean over the tokens or, with `loss_weights` (B, S), their weighted sum.
        `tied_weight` (V, C) is the embedding's weight, or None if the layer has its own.
        """
        if labels is None:
            logits_SBV, _ = super().forward(hidden_states, tied_weight)
            return logits_SBV.transpose(0, 1).contiguous()

        weight = self.weight if tied_weight is None else tied_weight
        # Evaluation (without gradients) computes no z-loss: the logged sum is that of training.
        coefficient = self.z_loss if torch.is_grad_enabled() else 0.0
        loss, losses_BS, z_loss = linear_cross_entropy(
            hidden_states,
            weight,
            labels,
            loss_weights,
            self.tp_group,
            self.fused,
            z_loss=coefficient,
        )
        if coefficient:
            # Summed on the device; reading the value would block the host.
            self._z_loss_sum = self._z_loss_sum + z_loss
        return loss, losses_BS
