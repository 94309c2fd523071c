"""Build the optimizer, AdamW or Muon with AdamW, for DeepSpeed's ZeRO."""

import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_tape.config.schema import OptimizerConfig, RunConfig
from megatron_tape.model.names import kind_of
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import shard_shape
from megatron_tape.training.muon import AdamWAndMuon, is_matrix


def parameter_groups(
    model: torch.nn.Module,
    config: OptimizerConfig,
    largest: float = math.inf,
    gather_stages: Callable[[Any], list[Any]] = lambda value: [value],
) -> list[dict]:
    """Group the trained parameters by `weight_decay`, `lr_scale` and, with Muon, whether it updates them (`muon`).

    Groups with weight decay come first. Groups of more than `largest` elements are split in the order of the model. All
    pipeline stages have the same groups, since ZeRO runs collectives over all stages for each group; a stage without
    parameters for a group adds a placeholder.

    Weight decay applies to matrices, and to vectors only if `config.weight_decay_of` has a value for their kind. A
    parameter's attribute `decay` overrides this, unless `config.weight_decay_of` has a value for that parameter.
    """
    groups: dict[tuple[bool, float, float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        given, scale = _value_of(config.weight_decay_of, name), _value_of(config.lr_scale_of, name)
        decays = True if _own_name(name) in config.weight_decay_of else getattr(parameter, "decay", None)
        if decays is None:
            decays = len(shard_shape(parameter)) > 1 or given is not None
        weight_decay = (config.weight_decay if given is None else given) if decays else 0.0
        by_muon = config.kind == "muon" and is_matrix(name)
        values = not decays, weight_decay, 1.0 if scale is None else scale, by_muon
        groups.setdefault(values, []).append(parameter)
    parts = {key: _parts(parameters, largest) for key, parameters in groups.items()}
    for counts in gather_stages({key: len(found) for key, found in parts.items()}):
        for key, count in counts.items():
            found = parts.setdefault(key, [])
            found += [[model.add_empty()] for _ in range(count - len(found))]
    return [
        {"params": part, "weight_decay": weight_decay, "lr_scale": lr_scale} | ({"muon": True} if by_muon else {})
        for (_, weight_decay, lr_scale, by_muon), found in sorted(parts.items(), key=lambda item: item[0])
        for part in found
    ]


def _parts(parameters: list[torch.nn.Parameter], largest: float) -> list[list[torch.nn.Parameter]]:
    """Split the parameters into parts of at most `largest` elements, unless a single parameter has more."""
    parts: list[list[torch.nn.Parameter]] = []
    room = 0.0
    for parameter in parameters:
        size = shard_shape(parameter).numel()
        if size > room:
            parts.append([])
            room = largest
        parts[-1].append(parameter)
        room -= size
    return parts


def _value_of(values: dict[str, float], name: str) -> float | None:
    """Return the value for the parameter itself (`position.NAME`), or that for its kind, or None."""
    return values.get(_own_name(name), values.get(kind_of(name)))


def _own_name(name: str) -> str | None:
    """Return the key of a parameter of the encoding, such as `position.increments`; None for other parameters."""
    return f"position.{name.rpartition('.')[2]}" if kind_of(name) == "position" else None


def build_optimizer(model: torch.nn.Module, config: RunConfig, layout: ParallelLayout) -> torch.optim.Optimizer:
    """Return the optimizer to pass to `deepspeed.initialize`: AdamW, with Muon for matrices if configured."""
    settings, zero = config.optimizer, config.deepspeed
    largest = zero.reduce_bucket_size if zero.zero_stage < 3 else math.inf
    groups = parameter_groups(model, settings, largest, layout.gather_stages)
    # The fused kernel reads and writes each tensor once, where separate kernels would need temporaries of that size.
    return AdamWAndMuon(groups, settings.lr, (settings.beta1, settings.beta2), settings.eps, fused=True)
