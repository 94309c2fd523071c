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

_GroupKey = tuple[bool, float, float, bool]
"""What the parameters of a group share: whether they have no weight decay, the weight decay, the
scale of the learning rate, and whether Muon updates them. The first value sorts groups with weight
decay before the others."""


def parameter_groups(
    model: Module,
    config: OptimizerConfig,
    largest: float = math.inf,
    gather_pipeline_stages: Callable[[Any], list[Any]] = lambda value: [value],
) -> list[dict]:
    """Return the trained parameters in groups with the keys `params`, `weight_decay`, `lr_scale`
    and `muon` (whether Muon updates them).

    Groups with weight decay come first. Groups of more than `largest` elements are split in the
    order of the model.

    All pipeline stages have the same groups, because ZeRO runs collective operations over all
    stages for each group. A stage without parameters for a group adds an empty parameter.
    `gather_pipeline_stages` returns the values that all stages pass.
    """
    groups: dict[_GroupKey, list[Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(_group_key(name, parameter, config), []).append(parameter)

    chunks = {key: _split(parameters, largest) for key, parameters in groups.items()}
    # If another stage has more chunks for a key, this stage adds chunks with one empty parameter
    # until it has as many.
    chunk_counts = {key: len(key_chunks) for key, key_chunks in chunks.items()}
    for stage_counts in gather_pipeline_stages(chunk_counts):
        for key, count in stage_counts.items():
            key_chunks = chunks.setdefault(key, [])
            while len(key_chunks) < count:
                key_chunks.append([model.add_empty()])

    ordered = []
    for key in sorted(chunks):
        _, weight_decay, lr_scale, by_muon = key
        for chunk in chunks[key]:
            ordered.append(
                {
                    "params": chunk,
                    "weight_decay": weight_decay,
                    "lr_scale": lr_scale,
                    "muon": by_muon,
                }
            )
    return ordered


def _group_key(name: str, parameter: Parameter, config: OptimizerConfig) -> _GroupKey:
    """Return the key of the group that a parameter belongs to.

    By default, weight decay applies to matrices but not to vectors. `config.weight_decay_of`
    applies it to the vectors of a kind. A parameter's attribute `decay` overrides both, and a value
    in `config.weight_decay_of` for the parameter itself overrides the attribute.
    """
    configured = _value_of(config.weight_decay_of, name)
    decays = getattr(parameter, "decay", None)  # None: the parameter has no such attribute
    if _position_key(name) in config.weight_decay_of:
        decays = True
    elif decays is None:
        decays = len(shard_shape(parameter)) > 1 or configured is not None

    weight_decay = 0.0
    if decays:
        weight_decay = config.weight_decay
        if configured is not None:
            weight_decay = configured
    lr_scale = _value_of(config.lr_scale_of, name)
    if lr_scale is None:
        lr_scale = 1.0
    by_muon = config.kind == "muon" and is_matrix(name)
    return not decays, weight_decay, lr_scale, by_muon


def _split(parameters: list[Parameter], largest: float) -> list[list[Parameter]]:
    """Split the list, in its order, into chunks of at most `largest` tensor elements.

    A parameter with more elements is a chunk of its own.
    """
    chunks: list[list[Parameter]] = []
    free = 0.0  # elements that the last chunk can still take
    for parameter in parameters:
        size = shard_shape(parameter).numel()
        if size > free:
            chunks.append([])
            free = largest
        chunks[-1].append(parameter)
        free -= size
    return chunks


def _value_of(values: dict[str, float], name: str) -> float | None:
    """Return the value for parameter `name` in a setting like `optimizer.lr_scale_of`, or None.

    The setting's keys are kinds of parameters, or `position.NAME`, which takes precedence.
    """
    return values.get(_position_key(name), values.get(kind_of(name)))


def _position_key(name: str) -> str | None:
    """Return the key of a parameter of the encoding, such as `position.increments`; None for other
    parameters.
    """
    if kind_of(name) == "position":
        return f"position.{name.rpartition('.')[2]}"
    return None


def build_optimizer(
    model: Module,
    config: RunConfig,
    layout: ParallelLayout,
) -> torch.optim.Optimizer:
    """Return the optimizer for `deepspeed.initialize`: AdamW, with Muon for matrices if
    `optimizer.kind` is muon.
    """
    settings = config.optimizer
    largest = math.inf
    # ZeRO 1 and 2 average each group with one reduce-scatter (see `ScatteredGradients`).
    if config.deepspeed.zero_stage < 3:
        largest = config.deepspeed.reduce_bucket_size
    groups = parameter_groups(model, settings, largest, layout.gather_pipeline_stages)
    betas = settings.beta1, settings.beta2
    # The fused kernel reads and writes each tensor once; separate kernels would allocate
    # temporaries of its size.
    return AdamWAndMuon(
        groups,
        settings.lr,
        betas,
        settings.eps,
        fused=True,
    )
