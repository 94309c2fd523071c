"""Initialization under ZeRO 3; parallel/test_two_processes.py checks every returned value."""

import torch
from configurations import make_alone
from models import small_model

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.initialization import (
    initialize_weights,
    initialized_whole,
    weight_initializations,
)
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.model.lora import add_lora
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.parallel.partitions import allocate, local_storage, shard_shape
from megatron_tape.training.engine import Engine, zero_partition

LORA = ExtensionConfig(trains=["lora"], lora_rank=3)
SEED = 6


def begin(cp):
    """Build a model, draw its partitions on this rank, and give it to an engine.

    Returns the names of the parameters, of those whose partition is not a part of the whole weight,
    of those that are whole in memory, and of those that the engine has not got; and the share of
    all numbers that this rank holds.
    """
    model = small_model(qkv_bias=True)
    layout = initialize_distributed(1, context_parallel_size=cp)
    sizes = {
        "parallel__context_parallel_size": cp,
        "train__global_batch_size": layout.data_parallel_size,
    }
    config = make_alone(model, deepspeed__zero_stage=3, **sizes)
    built = LanguageModel(model, transformer_config(model, 1, False), layout.groups)
    add_lora(built, model, LORA)
    assert all(parameter.is_meta for parameter in built.parameters())
    allocate(built, layout.device, zero_partition(config, layout))
    initials = weight_initializations(model, LORA)
    initialize_weights(built, initials, SEED, 0, 1)
    whole = {name: initialized_whole(name, initial, SEED) for name, initial in initials.items()}
    result = {"names": [*whole], "wrong": [], "whole": []}
    held = 0
    for name, parameter in built.named_parameters():
        memory, first = local_storage(parameter)
        expected = whole[name].flatten()[first : first + len(memory)]
        if shard_shape(parameter) != whole[name].shape or not torch.equal(memory, expected):
            result["wrong"].append(name)
        if parameter.numel() or len(memory) > -(-whole[name].numel() // layout.replica_size):
            result["whole"].append(name)
        held += len(memory)
    state = Engine(built, config, layout).training_state()
    owned = [name for name in whole if layout.replica_rank == 0]
    result["wrong_in_engine"] = [
        name for name in owned if not torch.equal(state[f"weight/{name}"], whole[name])
    ]
    result["fraction"] = held / sum(weight.numel() for weight in whole.values())
    return result
