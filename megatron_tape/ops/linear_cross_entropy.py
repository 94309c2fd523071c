"""Output layer and cross-entropy, computed in chunks of tokens, so that the logits of all tokens never exist at once.

The forward pass also computes the gradient of each chunk, as Liger's kernels do (Hsu et al., 2024); the backward pass
only scales it. Recomputing logits in the backward pass would take another matrix product. The vocabulary and the tokens
may be sharded over a group of ranks. On GPUs, Liger's kernels replace the elementwise operations.

Axes: S all tokens of a sequence, s tokens of this rank, B batch, C hidden size, V this rank's shard of the vocabulary,
n tokens of a chunk.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_tape.ops.chunks import chunk_size


def linear_cross_entropy(
    hidden_sBC: Tensor,
    weight_VC: Tensor,
    labels_BS: Tensor,
    weights_BS: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    fused: bool = False,
    first: int | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of logits `hidden_sBC` @ `weight_VC`^T, each token's loss (B, S), and the z-loss.

    The loss is the mean cross-entropy of the tokens or, with `weights_BS`, the weighted sum, at least in float32. The
    z-loss is `z_loss` times the same mean or sum of log(sum(exp(logits)))^2 (PaLM, section 5). Its value is not part of
    the loss, but its gradient is part of the loss's gradient. The z-loss and the tokens' losses are not differentiable.

    Each rank of `group` holds an equal shard of the vocabulary, in order of rank, and gets the same loss. If s is less
    than S, each rank also holds an equal chunk of the tokens. The gradient of `hidden_sBC` is summed over the group.

    `fused` uses Liger's kernels, which compute in float32 and need a GPU and the package liger-kernel. `first` is the
    label of the first row of `weight_VC`, by default that of this rank's shard.
    """
    one = group is None or group.size() == 1
    gradient = torch.is_grad_enabled()
    if first is None:
        first = 0 if one else group.rank() * weight_VC.shape[0]
    return _LinearCrossEntropy.apply(
        hidden_sBC, weight_VC, labels_BS, weights_BS, None if one else group, fused, first, z_loss, gradient
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, weights, group, fused, first, z_loss, gradient):
        sharded_tokens = hidden.shape[0] < labels.shape[1]
        whole = _gathered(hidden, group) if sharded_tokens else hidden
        of_hidden, of_weight = (gradient and needed for needed in ctx.needs_input_grad[:2])
        by_token = labels.T.flatten()
        factors = None if weights is None else weights.T.flatten().to(_wide(hidden))
        sums = _Sums(whole.flatten(0, 1), weight, by_token, factors, group, fused, first, z_loss)
        losses, d_hidden, d_weight = sums.run(of_hidden, of_weight)
        if d_hidden is not None:
            d_hidden = d_hidden.view_as(whole)
            if sharded_tokens:
                d_hidden = _reduce_scattered(d_hidden, group)
            elif group is not None:
                dist.all_reduce(d_hidden, group=group)
        ctx.save_for_backward(d_hidden, d_weight)
        loss = losses.mean() if factors is None else (losses * factors).sum()
        losses = losses.view(labels.T.shape).T.contiguous()
        ctx.mark_non_differentiable(losses, sums.z_loss)
        return loss, losses, sums.z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, *_):
        # In place, since both have the size of the gradients; autograd then refuses a second backward pass.
        return (*(None if x is None else x.mul_(d_loss) for x in ctx.saved_tensors), *(None,) * 7)


class _Sums:
    """Computes the losses of N tokens and the gradients of the loss."""

    def __init__(
        self,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        factors_N: Tensor | None,
        group: dist.ProcessGroup | None,
        fused: bool,
        first: int,
        z_loss: float,
    ):
        self._hidden, self._weight, self._labels, self._group = hidden_NC, weight_VC, labels_N, group
        N, wide = hidden_NC.shape[0], _wide(hidden_NC)
        self._factors = torch.full_like(labels_N, 1 / N, dtype=wide) if factors_N is None else factors_N
        self._kernels = None
        if fused:
            from megatron_tape.ops.kernels import liger

            self._kernels = liger
        self._first = first
        own = labels_N - first
        self._elsewhere = (own < 0) | (own >= weight_VC.shape[0])
        self._own = own.masked_fill(self._elsewhere, 0)
        self._z_factor, self.z_loss = z_loss, torch.zeros((), dtype=wide, device=hidden_NC.device)

    def run(self, of_hidden: bool, of_weight: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the losses (N,) and, if requested, the gradients of the hidden states and of the weight."""
        hidden, weight = self._hidden, self._weight
        N, size = hidden.shape[0], chunk_size(weight.shape[0])
        losses = hidden.new_empty(N, dtype=_wide(hidden))
        d_hidden, d_weight = torch.empty_like(hidden) if of_hidden else None, None
        for start in range(0, N, size):
            chunk = slice(start, min(start + size, N))
            logits = hidden[chunk] @ weight.T
            if self._kernels is None:
                logits = logits.to(_wide(hidden))
            losses[chunk], exponentials, sums = self._losses(logits, chunk)
            del logits
            if not (of_hidden or of_weight):
                continue
            d_logits = self._d_logits(exponentials, sums, chunk).to(hidden.dtype)
            del exponentials
            if of_hidden:
                torch.mm(d_logits, weight, out=d_hidden[chunk])
            if of_weight:
                d_weight = _added(d_weight, d_logits.T, hidden[chunk], last=N <= size)
        return losses, d_hidden, None if d_weight is None else d_weight.to(weight.dtype)

    def _losses(self, logits_nV: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses (n,), the exponentials (in place of wide logits), and the divisors of their gradient."""
        largest = logits_nV.amax(-1).to(self._factors.dtype)
        if self._group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        if self._kernels is not None:
            found, sums, of_label = self._kernels.exponentials(logits_nV, largest, self._labels[chunk], self._first)
        else:
            logits_nV.sub_(largest[:, None])
            of_label = logits_nV.gather(1, self._own[chunk, None])[:, 0].masked_fill(self._elsewhere[chunk], 0.0)
            found = logits_nV.exp_()
            sums = found.sum(-1)
        both = torch.stack([of_label, sums])
        if self._group is not None:
            dist.all_reduce(both, group=self._group)
        losses, sums = both[1].log() - both[0], both[1]
        if self._z_factor:
            log_z = both[1].log() + largest
            self.z_loss += self._z_factor * (self._factors[chunk] * log_z.square()).sum()
            # Its gradient is 2 `z_loss` log_z times the softmax, to which these sums scale the exponentials.
            sums = sums / (1 + 2 * self._z_factor * log_z)
        return losses, found, sums

    def _d_logits(self, exponentials_nV: Tensor, sums: Tensor, chunk: slice) -> Tensor:
        """Return the gradient of the logits, computed in place of their exponentials."""
        factors = self._factors[chunk]
        if self._kernels is not None:
            return self._kernels.to_gradients(exponentials_nV, sums, self._labels[chunk], factors, self._first)
        exponentials_nV.mul_((factors / sums)[:, None])
        of_label = -factors.masked_fill(self._elsewhere[chunk], 0.0)
        return exponentials_nV.scatter_add_(1, self._own[chunk, None], of_label[:, None])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _added(total: Tensor | None, left: Tensor, right: Tensor, last: bool) -> Tensor:
    """Return total + left @ right, in float32 unless it is the only product."""
    if total is None:
        product = left @ right
        return product if last else product.to(_wide(right))
    # The product of bf16 matrices is rounded, the sum is not.
    return total.addmm_(left, right) if total.dtype == right.dtype else total.add_(left @ right)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _reduce_scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(share, x, group=group)
    return share
