"""Output layer and cross-entropy, computed in chunks of tokens, so that the logits of all tokens
never exist at once.

The forward pass also computes the gradients, chunk by chunk, as Liger does (Hsu et al., 2024); the
backward pass only scales them. Recomputing logits in the backward pass would take another matrix
product. The vocabulary and the tokens may be sharded over a group of ranks. On GPUs, Liger's
kernels can compute the elementwise operations.

Axes: S all tokens of a sequence, s this rank's tokens of a sequence, B batch, N = S * B, n tokens
of a chunk, C hidden size, V this rank's shard of the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron_tape.ops.backends import choice
from megatron_tape.ops.chunks import chunk_size


def linear_cross_entropy(
    hidden_sBC: Tensor,
    weight_VC: Tensor,
    labels_BS: Tensor,
    weights_BS: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    fused: bool = False,
    first_label: int | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of logits `hidden_sBC` @ `weight_VC`^T, each token's loss (B, S), and the
    z-loss.

    The loss is the mean of the tokens' cross-entropies or, with `weights_BS`, their weighted sum,
    in at least float32. The z-loss is `z_loss` times the same mean or sum of
    log(sum(exp(logits)))^2 (PaLM, section 5). It is not added to the returned loss, but its
    gradient is added to the loss's gradient. Only the loss is differentiable.

    The ranks of `group` hold equal shards of the vocabulary, in the order of ranks, and return the
    same loss. If s < S, they also hold equal shards of the tokens. The gradient of `hidden_sBC` is
    summed over the group.

    With `fused`, Liger's kernels compute in float32; they require a GPU and the package
    liger-kernel. `first_label` is the label of the first row of `weight_VC`; default:
    rank * V.
    """
    if group is not None and group.size() == 1:
        group = None
    if first_label is None:
        first_label = 0 if group is None else group.rank() * weight_VC.shape[0]
    return _LinearCrossEntropy.apply(
        hidden_sBC,
        weight_VC,
        labels_BS,
        weights_BS,
        group,
        fused,
        first_label,
        z_loss,
        torch.is_grad_enabled(),
    )


class _LinearCrossEntropy(Function):
    """The differentiable form of `linear_cross_entropy`, with the same arguments in the same order.

    If `grad_enabled`, the forward pass computes the gradients of `hidden` and `weight`.
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        labels,
        weights,
        group,
        fused,
        first_label,
        z_loss,
        grad_enabled,
    ):
        sharded_tokens = hidden.shape[0] < labels.shape[1]
        hidden_SBC = hidden
        if sharded_tokens:
            hidden_SBC = hidden.new_empty(labels.shape[1], *hidden.shape[1:])
            dist.all_gather_into_tensor(hidden_SBC, hidden.contiguous(), group=group)

        # Transposed, since the sequence is the first axis of hidden states, but not of labels.
        factors_N = None if weights is None else weights.T.flatten().to(_loss_dtype(hidden))
        labels_N = labels.T.flatten()
        hidden_NC = hidden_SBC.flatten(0, 1)
        chunked = _ChunkedLoss(
            hidden_NC, weight, labels_N, factors_N, group, fused, first_label, z_loss
        )
        # `needs_input_grad` alone does not suffice: in evaluation, parameters still require
        # gradients, but `grad_enabled` is False.
        needs_d_hidden, needs_d_weight, *_ = ctx.needs_input_grad
        losses, d_hidden, d_weight = chunked.run(
            grad_enabled and needs_d_hidden, grad_enabled and needs_d_weight
        )

        # Each rank has the gradient from its own shard of the vocabulary.
        if d_hidden is not None:
            d_hidden = d_hidden.view_as(hidden_SBC)
            if sharded_tokens:
                shard = torch.empty_like(hidden, memory_format=torch.contiguous_format)
                dist.reduce_scatter_tensor(shard, d_hidden, group=group)
                d_hidden = shard
            elif group is not None:
                dist.all_reduce(d_hidden, group=group)
        ctx.save_for_backward(d_hidden, d_weight)

        loss = losses.mean() if factors_N is None else (losses * factors_N).sum()
        losses = losses.view(labels.T.shape).T.contiguous()
        ctx.mark_non_differentiable(losses, chunked.z_loss)
        return loss, losses, chunked.z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, *_):
        # Scaled in place, since the saved gradients are the large tensors here. Autograd then
        # refuses a second backward pass.
        gradients = (None if x is None else x.mul_(d_loss) for x in ctx.saved_tensors)
        # The seven arguments after `hidden` and `weight` have no gradients.
        return (*gradients, *(None,) * 7)


class _ChunkedLoss:
    """Computes the losses of N tokens and the gradients of the loss, chunk by chunk.

    The loss is the sum of the tokens' losses times `factors_N`; None stands for 1 / N. The ranks of
    `group` shard the vocabulary; this rank's shard `weight_VC` begins at label `first_label`. With
    `fused`, Liger's kernels compute. `z_loss` is the coefficient of the z-loss.
    """

    def __init__(
        self,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        factors_N: Tensor | None,
        group: dist.ProcessGroup | None,
        fused: bool,
        first_label: int,
        z_loss: float,
    ):
        self._hidden = hidden_NC
        self._weight = weight_VC
        self._labels = labels_N
        self._group = group
        N = hidden_NC.shape[0]
        dtype = _loss_dtype(hidden_NC)
        if factors_N is None:
            self._factors = torch.full_like(labels_N, 1 / N, dtype=dtype)
        else:
            self._factors = factors_N

        self._kernels = None
        """The module `ops.kernels.liger`, or None to compute in plain torch."""
        if fused:
            # Imported here, since liger-kernel is an optional package.
            from megatron_tape.ops.kernels import liger

            self._kernels = liger

        self._first_label = first_label
        # The labels' rows in this shard of the weight; any row will do for labels of other shards.
        rows = labels_N - first_label
        self._in_other_shard = (rows < 0) | (rows >= weight_VC.shape[0])
        self._rows = rows.masked_fill(self._in_other_shard, 0)

        self._z_factor = z_loss
        """The coefficient of the z-loss."""
        self.z_loss = torch.zeros((), dtype=dtype, device=hidden_NC.device)
        """The z-loss of all chunks so far."""

    def run(
        self, needs_d_hidden: bool, needs_d_weight: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the losses (N,) and, if needed, the gradients of the hidden states (N, C) and the
        weight (V, C).
        """
        hidden = self._hidden
        weight = self._weight
        N = hidden.shape[0]
        generation = choice.generation(hidden.device)
        size = chunk_size(weight.shape[0], generation)
        losses = hidden.new_empty(N, dtype=_loss_dtype(hidden))
        d_hidden = torch.empty_like(hidden) if needs_d_hidden else None
        d_weight = None

        for start in range(0, N, size):
            chunk = slice(start, min(start + size, N))
            logits = hidden[chunk] @ weight.T
            # Liger's kernels convert each element themselves.
            if self._kernels is None:
                logits = logits.to(losses.dtype)
            losses[chunk], exponentials, divisors = self._losses(logits, chunk)
            # Deleted as soon as possible: chunks of logits are the largest tensors here.
            del logits
            if not (needs_d_hidden or needs_d_weight):
                continue

            d_logits = self._d_logits(exponentials, divisors, chunk).to(hidden.dtype)
            del exponentials
            if needs_d_hidden:
                torch.mm(d_logits, weight, out=d_hidden[chunk])
            if needs_d_weight:
                if d_weight is None:
                    d_weight = d_logits.T @ hidden[chunk]
                    if N > size:
                        # Each product of bf16 matrices is rounded to bf16, but their sum is not.
                        d_weight = d_weight.to(losses.dtype)
                # If the sum has the dtype of the products, `addmm_` needs no temporary tensor.
                elif d_weight.dtype == hidden.dtype:
                    d_weight.addmm_(d_logits.T, hidden[chunk])
                else:
                    d_weight += d_logits.T @ hidden[chunk]
        return losses, d_hidden, None if d_weight is None else d_weight.to(weight.dtype)

    def _losses(self, logits_nV: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses (n,), exponentials (n, V) and divisors (n,).

        The exponentials may overwrite the logits. Divided by the divisors, they are the softmax or,
        with the z-loss, the softmax times the factor that the z-loss adds to its gradient.
        """
        # Softmax does not change if all logits of a token are reduced by their maximum, and exp
        # then cannot overflow.
        largest = logits_nV.amax(-1).to(self._factors.dtype)
        if self._group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        if self._kernels is not None:
            exps, sums, label_logits = self._kernels.exponentials(
                logits_nV, largest, self._labels[chunk], self._first_label
            )
        else:
            logits_nV.sub_(largest[:, None])
            # The sum over the shards needs zeros for labels of other shards.
            label_logits = logits_nV.gather(1, self._rows[chunk, None])[:, 0].masked_fill(
                self._in_other_shard[chunk], 0.0
            )
            exps = logits_nV.exp_()
            sums = exps.sum(-1)

        # One collective adds up both tensors over the shards of the vocabulary.
        reduced = torch.stack([label_logits, sums])
        if self._group is not None:
            dist.all_reduce(reduced, group=self._group)
        label_logits, sums = reduced
        losses = sums.log() - label_logits

        divisors = sums
        if self._z_factor:
            log_z = sums.log() + largest
            self.z_loss += self._z_factor * (self._factors[chunk] * log_z.square()).sum()
            # The z-loss adds 2 `z_loss` log_z times the softmax to the gradient; the softmax is
            # exponentials / sums.
            divisors = sums / (1 + 2 * self._z_factor * log_z)
        return losses, exps, divisors

    def _d_logits(
        self,
        exponentials_nV: Tensor,
        divisors: Tensor,
        chunk: slice,
    ) -> Tensor:
        """Return the gradient of the logits (n, V), which overwrites their exponentials.

        Exponentials and divisors (n,) are those of `_losses`.
        """
        factors = self._factors[chunk]
        if self._kernels is not None:
            return self._kernels.to_gradients(
                exponentials_nV,
                divisors,
                self._labels[chunk],
                factors,
                self._first_label,
            )
        # The gradient of a token's loss is softmax minus 1 at the label.
        exponentials_nV.mul_((factors / divisors)[:, None])
        at_label = -factors.masked_fill(self._in_other_shard[chunk], 0.0)
        return exponentials_nV.scatter_add_(1, self._rows[chunk, None], at_label[:, None])


def _loss_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the loss is computed: that of x, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
