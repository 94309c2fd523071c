"""How a model begins under ZeRO 3, for groups of processes that other modules launch."""

import torch
from configurations import make_alone
from models import small_model

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.initialization import initialize_weights, initialized_whole, weight_initializations
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.model.lora import add_lora
from megatron_tape.model.weights import shard
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.parallel.partitions import allocate, own_memory, share_shape
from megatron_tape.training.engine import Engine, zero_partition

LORA = ExtensionConfig(trains=["lora"], lora_rank=3)
SEED = 6


def begin(tp, cp):
    """Build a model, draw its partitions on this rank, and give it to an engine.

    Returns the names of the parameters, of those whose partition is not a part of the whole weight's share, of those
    that are whole in memory, and of those whose share the engine has not got.
    """
    model = small_model(qkv_bias=True)
    layout = initialize_distributed(tp, context_parallel_size=cp)
    sizes = {"parallel__tensor_model_parallel_size": tp, "parallel__context_parallel_size": cp}
    sizes["train__global_batch_size"] = layout.data_parallel_size
    config = make_alone(model, deepspeed__zero_stage=3, **sizes)
    built = LanguageModel(model, transformer_config(model, tp, tp > 1), layout.groups)
    add_lora(built, model, LORA)
    assert all(parameter.is_meta for parameter in built.parameters())
    allocate(built, layout.device, zero_partition(config, layout))
    initials = weight_initializations(model, LORA)
    rank = layout.tensor_parallel_rank
    initialize_weights(built, initials, SEED, rank, tp)
    shares = {}
    for name, parameter in built.named_parameters():
        own_name = name.removeprefix("gpt.")
        shares[name] = shard(initialized_whole(own_name, initials[own_name], SEED), parameter, rank, tp)
    result = {"names": [*shares], "wrong": [], "whole": []}
    held = 0
    for name, parameter in built.named_parameters():
        memory, first = own_memory(parameter)
        expected = shares[name].flatten()[first : first + len(memory)]
        if share_shape(parameter) != shares[name].shape or not torch.equal(memory, expected):
            result["wrong"].append(name)
        if parameter.numel() or len(memory) > -(-shares[name].numel() // layout.replica_size):
            result["whole"].append(name)
        held += len(memory)
    state = Engine(built, config, layout).training_state(lambda _: True)
    result["wrong_in_engine"] = [name for name in shares if not torch.equal(state[f"weight/{name}"], shares[name])]
    result["fraction"] = held / sum(share.numel() for share in shares.values())
    return result


def assert_right(result, replicas):
    """Assert that every rank of `replicas` that hold the same share began with its part of the whole weights."""
    assert len(result["names"]) > 50
    assert not result["wrong"] and not result["whole"] and not result["wrong_in_engine"]
    assert abs(result["fraction"] - 1 / replicas) < 0.01
