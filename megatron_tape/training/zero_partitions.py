"""Read and write whole tensors of the training state, which ZeRO has partitioned."""

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor
from torch.nn import Parameter

from megatron_tape.parallel.partitions import local_storage


def whole_tensor(parameter: Parameter, key: str) -> Tensor:
    """Return the whole fp32 tensor `key` of a parameter: its `weight`, `exp_avg` and so on.

    Whole means this rank's tensor-parallel shard, merged from ZeRO's partitions. Collective over
    the ranks that hold the same shard.
    """
    # A frozen parameter has no fp32 copy in the optimizer, so convert the parameter itself.
    if not parameter.requires_grad:
        is_partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=is_partitioned):
            return parameter.detach().to(torch.float32, copy=True)
    if key == "weight":
        return safe_get_full_fp32_param(parameter)
    return safe_get_full_optimizer_state(parameter, key)


def set_local_elements(parameter: Parameter, key: str, value: Tensor) -> None:
    """Set this rank's partition of the fp32 tensor `key` of a trained parameter: its `weight`,
    `exp_avg` and so on.

    `value` is the whole tensor-parallel shard, on the parameter's device.
    """
    if not hasattr(parameter, "ds_id"):
        if key == "weight":
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)
        return

    # With ZeRO 3, DeepSpeed's functions for whole tensors fail on ranks whose partitions are
    # padded. Its functions for partitions require the padding.
    storage, offset = local_storage(parameter)
    partition = value.flatten()[offset : offset + len(storage)]
    padded = F.pad(partition, (0, parameter.partition_numel() - len(partition)))
    if key == "weight":
        safe_set_local_fp32_param(parameter, padded)
    else:
        safe_set_local_optimizer_state(parameter, padded, key)
