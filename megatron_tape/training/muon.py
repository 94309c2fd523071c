"""Muon (Jordan et al., 2024) for the matrices of the decoder layers, and AdamW for all other
parameters.

Muon's update is the orthogonalized momentum times 0.2 sqrt(max(rows, columns)) (Liu et al., 2025,
"Muon is scalable"). Its root mean square is about that of AdamW's update, so both can use the same
learning rate and weight decay. Fused matrices are split as in Hugging Face's checkpoints: queries,
keys, values, and the gate and up projections of the MLP are orthogonalized separately.

Orthogonalization requires unsharded matrices, but ZeRO 1 and 2 shard each flat group of parameters
over the ranks. All ranks therefore gather the momentum of a group, and each rank orthogonalizes the
matrices with elements in its shard. Tensor-parallel ranks gather the shards of a matrix, and all of
them orthogonalize the whole matrix.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_tape.config.schema import ModelConfig
from megatron_tape.model.names import MATRICES, kind_of
from megatron_tape.model.weights import from_megatron, shard, to_megatron, unshard
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import is_sharded

MOMENTUM = 0.95
"""Decay of the momentum in each step."""
MOMENTUM_BUFFER = "momentum_buffer"
"""Key of the momentum in the optimizer's state, as in `torch.optim.Muon`."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the Newton-Schulz polynomial a x + b x^3 + c x^5 (Jordan et al.)."""
STEPS = 5
"""Number of Newton-Schulz iterations."""


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return approximately U V^T for a matrix with singular value decomposition U S V^T.

    Uses Jordan's quintic Newton-Schulz iteration, in the dtype of the matrix.
    """
    a, b, c = COEFFICIENTS
    # The Gram matrix is smaller if the matrix is wide.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    # The iteration converges for singular values of at most about 1.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        # x = (a + b G + c G^2) x, where G is the Gram matrix.
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def is_matrix(name: str) -> bool:
    """Return whether Muon updates the parameter of this name in a `LanguageModel`."""
    return kind_of(name) in MATRICES


class Matrix(NamedTuple):
    """A matrix that Muon updates: this rank's tensor-parallel shard of it."""

    name: str
    parameter: Parameter
    first: int
    """Offset of the shard's first element in its flat parameter group."""


class Matrices:
    """Computes Muon's update of the flat fp32 tensors that the optimizer updates.

    Each of these tensors is this rank's ZeRO partition of a parameter group, which may begin or end
    within a matrix.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        model_config: ModelConfig,
        layout: ParallelLayout,
        dtype: torch.dtype,
        zero: Any,
    ):
        """Find the matrices in each parameter group.

        Args:
            parameters: the trained parameters by name.
            model_config: the model's settings, by which fused matrices are split.
            layout: this process's ranks and groups.
            dtype: the dtype of the orthogonalization.
            zero: the optimizer that `deepspeed.initialize` returns under ZeRO 1 and 2.
        """
        self._model_config = model_config
        self._layout = layout
        self._dtype = dtype
        self._process_group = zero.dp_process_group
        matrix_names = {
            parameter: name for name, parameter in parameters.items() if is_matrix(name)
        }
        self._matrices: dict[Tensor, list[Matrix]] = {}
        # ZeRO lays out the parameters of a group one after another in the flat tensor of the group.
        for flat, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups):
            matrices = []
            first = 0
            for parameter in group:
                if parameter in matrix_names:
                    matrices.append(Matrix(matrix_names[parameter], parameter, first))
                first += parameter.numel()
            self._matrices[flat] = matrices

    def update(self, tensor: Tensor, direction: Tensor) -> Tensor:
        """Return the update of `tensor`, to be multiplied by the learning rate.

        `tensor` is this rank's flat partition of a parameter group, and `direction` its momentum.
        Padding gets an update of 0. All ranks call this together.
        """
        # The momentum of the whole group. All offsets below are offsets in it.
        numel = direction.numel()
        local = direction.to(self._dtype)
        whole = local.new_empty(numel * self._process_group.size())
        dist.all_gather_into_tensor(whole, local, group=self._process_group)

        # This rank's partition is [begin, begin + numel).
        begin = self._process_group.rank() * numel
        result = torch.zeros_like(direction)
        for matrix in self._matrices[tensor]:
            end = matrix.first + matrix.parameter.numel()
            low = max(matrix.first, begin)
            high = min(end, begin + numel)
            # The partition has the elements [low, high) of the matrix, or none if low >= high.
            if low < high:
                momentum = whole[matrix.first : end].view(matrix.parameter.shape)
                update = self._orthogonal(matrix, momentum).reshape(-1)
                part = update[low - matrix.first : high - matrix.first]
                result[low - begin : high - begin] = part
        return result

    def _orthogonal(self, matrix: Matrix, momentum: Tensor) -> Tensor:
        """Return this rank's tensor-parallel shard of a matrix's update, given its shard of the
        momentum.
        """
        layout = self._layout
        parameter = matrix.parameter
        size = layout.tensor_parallel_size
        name = matrix.name
        shards = [momentum]
        if size > 1 and is_sharded(parameter):
            shards = [torch.empty_like(momentum) for _ in range(size)]
            dist.all_gather(shards, momentum.contiguous(), group=layout.groups.tp)

        # Each part of a fused matrix, such as the queries, is orthogonalized by itself.
        updates = {}
        momenta = from_megatron(name, unshard(shards, parameter), self._model_config)
        for key, part in momenta.items():
            # The factor gives the update about the root mean square of AdamW's.
            factor = 0.2 * math.sqrt(max(part.shape))
            updates[key] = factor * orthogonalize(part)
        whole = to_megatron(updates, name, self._model_config)
        return shard(whole, parameter, layout.tensor_parallel_rank, size)


class AdamWAndMuon(torch.optim.AdamW):
    """AdamW, and Muon for the parameter groups whose key `muon` is true."""

    matrices: Matrices | None = None
    """Computes Muon's updates. Set it before the first step if a group uses Muon."""

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters with a gradient. `closure` is ignored."""
        groups = self.param_groups
        adamw_groups = []
        for group in groups:
            if not group["muon"]:
                adamw_groups.append(group)
                continue
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._muon_step(tensor, group["lr"], group["weight_decay"])

        # `AdamW.step` updates all groups in `param_groups`, so it must not see those of Muon.
        self.param_groups = adamw_groups
        try:
            if adamw_groups:
                super().step()
        finally:
            self.param_groups = groups

    def _muon_step(self, tensor: Tensor, lr: float, weight_decay: float) -> None:
        """Update a flat tensor with Nesterov momentum and decoupled weight decay."""
        state = self.state[tensor]
        if MOMENTUM_BUFFER not in state:
            state[MOMENTUM_BUFFER] = torch.zeros_like(tensor)
        momentum = state[MOMENTUM_BUFFER].lerp_(tensor.grad, 1 - MOMENTUM)
        nesterov = tensor.grad.lerp(momentum, MOMENTUM)
        update = self.matrices.update(tensor, nesterov)
        tensor.mul_(1 - lr * weight_decay)
        tensor.add_(update, alpha=-lr)
