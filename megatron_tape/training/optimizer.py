"""Build the optimizer, AdamW or Muon with AdamW, for DeepSpeed's ZeRO."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module, Parameter

from megatron_tape.config.schema import OptimizerConfig, RunConfig
from megatron_tape.model.names import kind_of
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import shard_shape
from megatron_tape.training.muon import AdamWAndMuon, is_matrix


def parameter_groups(
    model: Module,
    config: OptimizerConfig,
    largest: float = math.inf,
    gather_pipeline_stages: Callable[[Any], list[Any]] = lambda value: [value],
) -> list[dict]:
    """Group the trained parameters by `weight_decay`, `lr_scale` and, with Muon, by `muon`: whether
    Muon updates them.

    Groups with weight decay come first. Groups of more than `largest` elements are split in the
    order of the model. All pipeline stages have the same groups, because ZeRO runs collective
    operations over all stages for each group. A stage without parameters for a group adds a
    placeholder.

    By default, weight decay applies to matrices but not to vectors. `config.weight_decay_of`
    applies it to the vectors of a kind. A parameter's attribute `decay` overrides both, and a value
    in `config.weight_decay_of` for the parameter itself overrides the attribute.
    """
    groups: dict[tuple[bool, float, float, bool], list[Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        configured = _value_of(config.weight_decay_of, name)
        decays = getattr(parameter, "decay", None)
        if _position_key(name) in config.weight_decay_of:
            decays = True
        elif decays is None:
            decays = len(shard_shape(parameter)) > 1 or configured is not None

        weight_decay = 0.0
        if decays:
            weight_decay = config.weight_decay if configured is None else configured
        lr_scale = _value_of(config.lr_scale_of, name)
        by_muon = config.kind == "muon" and is_matrix(name)
        # Sorted by these keys, groups with weight decay come first.
        key = not decays, weight_decay, 1.0 if lr_scale is None else lr_scale, by_muon
        groups.setdefault(key, []).append(parameter)

    chunks = {key: _split(parameters, largest) for key, parameters in groups.items()}
    for counts in gather_pipeline_stages({key: len(of_key) for key, of_key in chunks.items()}):
        for key, count in counts.items():
            of_key = chunks.setdefault(key, [])
            of_key += [[model.add_empty()] for _ in range(count - len(of_key))]

    ordered = []
    for key in sorted(chunks):
        _, weight_decay, lr_scale, by_muon = key
        for chunk in chunks[key]:
            group = {"params": chunk, "weight_decay": weight_decay, "lr_scale": lr_scale}
            if by_muon:
                group["muon"] = True
            ordered.append(group)
    return ordered


def _split(parameters: list[Parameter], largest: float) -> list[list[Parameter]]:
    """Split the list into chunks of at most `largest` elements; a parameter with more is a chunk of
    its own.
    """
    chunks: list[list[Parameter]] = []
    free = 0.0
    for parameter in parameters:
        size = shard_shape(parameter).numel()
        if size > free:
            chunks.append([])
            free = largest
        chunks[-1].append(parameter)
        free -= size
    return chunks


def _value_of(values: dict[str, float], name: str) -> float | None:
    """Return the value for the parameter itself (`position.NAME`) or else for its kind, or None."""
    return values.get(_position_key(name), values.get(kind_of(name)))


def _position_key(name: str) -> str | None:
    """Return the key of a parameter of the encoding, such as `position.increments`; None for other
    parameters.
    """
    if kind_of(name) == "position":
        return f"position.{name.rpartition('.')[2]}"
    return None


def build_optimizer(
    model: Module, config: RunConfig, layout: ParallelLayout
) -> torch.optim.Optimizer:
    """Return the optimizer for `deepspeed.initialize`: AdamW or, with `optimizer.kind: muon`, Muon
    for matrices.
    """
    settings = config.optimizer
    largest = math.inf
    if config.deepspeed.zero_stage < 3:
        largest = config.deepspeed.reduce_bucket_size
    groups = parameter_groups(model, settings, largest, layout.gather_pipeline_stages)
    # The fused kernel reads and writes each tensor once; separate kernels would allocate
    # temporaries of its size.
    betas = settings.beta1, settings.beta2
    return AdamWAndMuon(groups, settings.lr, betas, settings.eps, fused=True)
