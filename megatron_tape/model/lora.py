"""LoRA layers: for a projection W with input x, the output is W x + (alpha / r) B A x with low-rank
matrices A and B.

"LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022). Megatron fuses the projections q,
k and v into one matrix, but each of q, k, v and o has factors A and B of its own, as in peft.
Sequence parallelism communicates only r elements per token.

Axes: S all tokens of a sequence, s this rank's tokens, B batch, C hidden size, h this rank's heads,
D head dimension, r the LoRA rank, n the number of adapted projections among q, k and v.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.language_model import LanguageModel
from megatron_tape.model.shapes import Factor, lora_factors
from megatron_tape.parallel.token_layout import TokenLayout


def add_lora(
    model: LanguageModel,
    model_config: ModelConfig,
    extension: ExtensionConfig,
) -> None:
    """Add LoRA layers to the projections in `extension.lora_targets`. B starts at 0, so the output
    does not change yet.

    Like the model's other parameters, the factors are created on torch's meta device (see
    `model.initialization`).
    """
    factors = lora_factors(model_config, extension)
    scale = extension.lora_scale
    layout = model.token_layout
    for layer in model.layers.values():
        for path, lora_class in (
            ("self_attention.linear_qkv", QKVLora),
            ("self_attention.linear_proj", OutputLora),
        ):
            prefix = f"{path}.lora."
            linear_factors = {
                name.removeprefix(prefix): factor
                for name, factor in factors.items()
                if name.startswith(prefix)
            }
            if linear_factors:
                linear = layer.get_submodule(path)
                linear.lora = lora_class(linear_factors, model_config, scale, layout, model.dtype)
                # A hook, so that Megatron's code and the names of its weights stay as they are.
                linear.register_forward_hook(_add_update)


def _add_update(
    linear: nn.Module,
    inputs: tuple,
    outputs: tuple[Tensor, Tensor | None],
):
    """Return the outputs of Megatron's `linear`, (output, bias), with the LoRA update added."""
    output, bias = outputs
    return linear.lora(inputs[0], output), bias


class Lora(nn.Module):
    """This rank's shards of the LoRA factors that adapt one of Megatron's linear layers; `scale` is
    alpha / r.
    """

    def __init__(
        self,
        factors: dict[str, Factor],
        model_config: ModelConfig,
        scale: float,
        token_layout: TokenLayout,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.scale = scale
        self.token_layout = token_layout
        self.group_heads = model_config.num_attention_heads // model_config.query_groups
        """Query heads per key/value group."""
        self.head_dim = model_config.head_dim
        self.local_groups = model_config.query_groups // token_layout.model_group.size()
        """Key/value groups of this tensor-parallel rank."""
        for name, factor in factors.items():
            shard = torch.empty(factor.shape, dtype=dtype, device="meta")
            dim = factor.partition_dim
            if dim is not None:
                shard = token_layout.tensor_parallel_shard(shard, dim).contiguous()
            weight = nn.Parameter(shard)
            # A replicated factor processes only its rank's tokens, so its gradient must be summed
            # like that of a norm.
            weight.sequence_parallel = token_layout.sequence_parallel and dim is None
            if dim is not None:
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
            self.register_parameter(name, weight)

    def _updated(self, output: Tensor, narrow: Tensor, up: Tensor) -> Tensor:
        """Return `output` (S, B, X) plus the update: scale * `narrow` (S, B, R) @ `up`^T.

        `up` (X, R) holds the factors B.
        """
        return torch.addmm(
            output.flatten(0, 1),
            narrow.flatten(0, 1),
            up.T,
            alpha=self.scale,
        ).view_as(output)


class QKVLora(Lora):
    """LoRA of the column-parallel projection to q, k and v: each A is replicated, each B is sharded
    by heads.
    """

    def forward(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        """Return the projection's `output` plus the LoRA update for hidden states (s, B, C).

        `output` (S, B, X) contains this rank's queries, keys and values in Megatron's order.
        """
        # One product for all targets, with n r results per token.
        targets = [target for target in "qkv" if hasattr(self, f"{target}_A")]
        factors = [getattr(self, f"{target}_A") for target in targets]
        narrow = F.linear(hidden_states, torch.cat(factors))

        # As in Megatron's column-parallel layer; both functions sum the gradient over the ranks.
        if self.token_layout.sequence_parallel:
            enter = gather_from_sequence_parallel_region
        else:
            enter = copy_to_tensor_model_parallel_region
        narrow = enter(narrow, group=self.token_layout.model_group)
        return self._updated(output, narrow, self._fused_b(targets))

    def _fused_b(self, targets: list[str]) -> Tensor:
        """Return B of all targets as one matrix (X, n r), its rows in Megatron's order: by group,
        then q, k, v.
        """
        # All B have the same rank, dtype and device.
        some_b = getattr(self, f"{targets[0]}_B")
        rank = some_b.shape[1]
        blocks = []
        for target, heads in {"q": self.group_heads, "k": 1, "v": 1}.items():
            if target in targets:
                block = getattr(self, f"{target}_B").unflatten(0, (self.local_groups, -1))
                # The columns that multiply the results of the other targets' A are zero.
                before = targets.index(target)
                after = len(targets) - 1 - before
                blocks.append(F.pad(block, (before * rank, after * rank)))
            else:
                # Rows of a projection that LoRA does not adapt.
                shape = self.local_groups, heads * self.head_dim, len(targets) * rank
                blocks.append(some_b.new_zeros(shape))
        return torch.cat(blocks, dim=1).flatten(0, 1)


class OutputLora(Lora):
    """LoRA of the row-parallel output projection of attention: A is sharded along its input, B
    replicated.
    """

    def forward(self, heads: Tensor, output: Tensor) -> Tensor:
        """Return the projection's `output` (s, B, C) plus the LoRA update for this rank's heads (S,
        B, h D).
        """
        # Each rank has the product with its own heads; the sum over the ranks is the whole product.
        narrow = F.linear(heads, self.o_A)
        if self.token_layout.sequence_parallel:
            leave = reduce_scatter_to_sequence_parallel_region
        else:
            leave = reduce_from_tensor_model_parallel_region
        narrow = leave(narrow, group=self.token_layout.model_group)
        return self._updated(output, narrow, self.o_B)
