"""Tests that weight initialization gives the same values in every layout, and that each rank draws
only its shard.
"""

import pytest
import torch
from models import build, small_model

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model import initialization
from megatron_tape.model.initialization import (
    initialize_weights,
    initialized_whole,
    weight_initializations,
)
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.weights import shard
from megatron_tape.parallel.partitions import local_storage, write_shard
from megatron_tape.position import BUILT_IN

LORA = ExtensionConfig(trains=["lora"], lora_rank=4)
ENCODINGS = [encoding.name for encoding in BUILT_IN]


class ShardedParameter(torch.nn.Parameter):
    """A parameter sharded as in Megatron, which can be partitioned as in ZeRO 3."""

    def sharded(self, axis, stride):
        self.tensor_model_parallel = True
        self.partition_dim = axis
        self.partition_stride = stride
        return self

    def partitioned(self, rank, size):
        self.ds_numel = self.numel()
        self.ds_shape = self.shape
        self.ds_zero_partition_rank = rank
        self.ds_tensor = torch.full(
            (-(-self.numel() // size),),
            torch.nan,
        )
        self.ds_tensor.ds_numel = len(self.ds_tensor)
        self.data = torch.empty(0)
        return self


def uninitialized_shard(declared, axis, stride, rank, size):
    """Return an uninitialized shard of a parameter, or the whole parameter if `axis` is None."""
    whole = torch.full(declared.shape, torch.nan)
    if axis is None:
        return ShardedParameter(whole)
    parameter = ShardedParameter(torch.empty(0)).sharded(axis, stride)
    return ShardedParameter(shard(whole, parameter, rank, size)).sharded(axis, stride)


def initialized(parameter, declared, rank, size):
    holder = torch.nn.Module()
    holder.register_parameter("x", parameter)
    initialize_weights(holder, {"x": declared}, 5, rank, size)
    return local_storage(parameter)[0].clone()


@pytest.mark.parametrize(
    "shape, axis, stride, kind",
    [
        ((24, 10), 0, 1, "value"),
        ((24, 10), 0, 2, "std"),
        ((9, 20), 1, 1, "std"),
        ((9, 20), 1, 1, "bound"),
        ((8, 3, 5), 0, 1, "value"),
        ((3, 8, 5), 1, 1, "value"),
        ((6, 4), 1, 1, "value"),
        ((12,), 0, 1, "value"),
        ((7, 5), None, 1, "value"),
    ],
)
def test_shards_and_partitions_equal_slices_of_the_whole_parameter(
    monkeypatch, shape, axis, stride, kind
):
    numbers = torch.arange(float(torch.Size(shape).numel())).view(shape).tolist()
    declared = initialization.Initialization(shape, **{kind: numbers if kind == "value" else 0.5})
    whole = initialized_whole("x", declared, 5)
    for chunk, size, partitions in ((10**6, 1, 1), (45, 2, 3), (1, 4, 7), (10**6, 4, 100)):
        monkeypatch.setitem(initialization.CHUNKS, "cpu", chunk)
        for rank in {0, size - 1}:
            parameter = uninitialized_shard(declared, axis, stride, rank, size)
            expected = shard(whole, parameter, rank, size)
            assert torch.equal(initialized(parameter, declared, rank, size), expected.flatten())
            parts = []
            for part in range(partitions):
                empty = [uninitialized_shard(declared, axis, stride, rank, size) for _ in range(2)]
                drawn, written = (x.partitioned(part, partitions) for x in empty)
                parts.append(initialized(drawn, declared, rank, size))
                write_shard(written, expected)
                assert torch.equal(local_storage(written)[0], parts[-1])
            assert torch.equal(torch.cat(parts), expected.flatten())


def test_initial_values_follow_megatron_and_peft():
    model = small_model(
        qkv_bias=True, qk_norm=True, attention_output_gate=True, hidden_size=64, ffn_hidden_size=128
    )
    initials = weight_initializations(model, LORA)
    built, _ = build(model, randomize=False, lora=LORA)
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    declared = {name: initial.shape for name, initial in initials.items()}
    assert shapes == declared == parameter_shapes(model, LORA)
    without_lora = ExtensionConfig(trains=["norms"], lora_rank=4)
    assert parameter_shapes(model, without_lora) == parameter_shapes(model)
    deviations = {
        "embedding.weight": 0.1,
        "output.weight": 0.1,
        "linear_qkv.weight": 0.1,
        "linear_gate.weight": 0.1,
        "linear_fc1.weight": 0.1,
        "linear_proj.weight": 0.1 / 6**0.5,
        "linear_fc2.weight": 0.1 / 6**0.5,
        "position.x_proj": 0.1,
        "q_A": (64 * 3) ** -0.5,
        "o_A": (64 * 3) ** -0.5,
    }
    checked = set()
    for name, parameter in built.named_parameters():
        if ending := next((ending for ending in deviations if name.endswith(ending)), None):
            checked.add(ending)
            assert parameter.std().item() == pytest.approx(deviations[ending], rel=0.2)
        elif name.endswith(("layernorm.weight", "qkv.bias", "_B", "down_proj")):
            assert parameter.eq(1.0 if "norm" in name else 0.0).all()
    assert checked == set(deviations)
