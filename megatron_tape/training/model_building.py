"""Build the model of a run, and freeze the parameters that it does not train."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable

import torch

from megatron_tape.config.schema import ExtensionConfig, RunConfig
from megatron_tape.model.backend import verified_backend, verified_kernels
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.model.lora import add_lora
from megatron_tape.model.names import EMBEDDING, kind_of
from megatron_tape.model.pipeline import Pipeline
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.run.watch import Watch
from megatron_tape.text import counted

logger = logging.getLogger(__name__)

ParameterFilter = Callable[[str, torch.nn.Parameter], bool]
"""Returns whether to train a parameter, given its name and the parameter."""


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype of the forward and backward passes."""
    if config.train.precision == "bf16":
        return torch.bfloat16
    return torch.float32


def build_model(
    config: RunConfig, layout: ParallelLayout, watch: Watch
) -> LanguageModel | Pipeline:
    """Verify the kernels, and return the run's model or this pipeline stage of it. All ranks call
    this together.

    The parameters are on the meta device.
    """
    _log_settings(config, layout)
    dtype = dtype_of(config)
    size = layout.tensor_parallel_size
    sequence_parallel = config.parallel.uses_sequence_parallel
    translated = transformer_config(config.model, size, sequence_parallel, dtype)
    watch.progress("choosing the attention backend")
    shifted_sparse = config.extension.attention == "shifted_sparse"
    allow_slow = config.train.allow_slow_attention
    packed = config.data.reset_attention_mask
    backend = verified_backend(config.model, layout, dtype, shifted_sparse, allow_slow, packed)
    model_config = dataclasses.replace(config.model, attention_backend=backend)
    fused = verified_kernels(config.model, layout, dtype, allow_slow)
    model_chunks = []
    for layers in config.parallel.model_chunks(config.model.num_layers)[
        layout.pipeline_rank :: layout.pipeline_size
    ]:
        model = LanguageModel(
            model_config,
            translated,
            layout.groups,
            layout.device,
            shifted_sparse,
            recompute=config.train.recompute,
            fused=fused,
            layers=layers,
            z_loss=config.optimizer.z_loss,
        )
        if config.extension.adds_lora:
            add_lora(model, config.model, config.extension)
        model_chunks.append(model)
    if layout.pipeline_size == 1:
        return model_chunks[0]
    return Pipeline(model_chunks, translated, layout.groups)


def _log_settings(config: RunConfig, layout: ParallelLayout) -> None:
    ranks = (
        f"{counted(layout.world_size, 'process', 'processes')}:"
        f" {config.parallel.describe(layout.world_size)}"
    )
    parameters = f"{parameter_count(config.model, config.extension):,}"
    encoding = config.model.position_encoding
    logger.info(
        "building a model of %s parameters, position encoding %s, on %s",
        parameters,
        encoding,
        ranks,
    )
    stage = config.deepspeed.zero_stage
    train = config.train
    logger.info(
        "training with ZeRO %d in %s, recomputation: %s", stage, train.precision, train.recompute
    )
    if train.precision != "bf16" or layout.device.type != "cpu":
        return
    if not any(
        torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")
    ):
        problem = "this CPU has no bf16 instructions, so fp32 is faster"
        logger.warning("warning: train.precision is bf16, but %s: --train.precision fp32", problem)


def parameter_filter(extension: ExtensionConfig) -> ParameterFilter:
    """Return the filter that selects the parameters of the kinds in `extension.trains`."""
    return lambda name, parameter: "all" in extension.trains or kind_of(name) in extension.trains


def freeze_parameters(model: LanguageModel | Pipeline, trains: ParameterFilter) -> None:
    """Freeze the parameters for which `trains` returns false.

    Raises ValueError if all parameters of a whole model would be frozen; a pipeline stage may be
    frozen completely.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name, parameter))
    if isinstance(model, LanguageModel) and not any(
        parameter.requires_grad for parameter in model.parameters()
    ):
        raise ValueError("all parameters of the model would be frozen; change extension.trains")
    if isinstance(model, Pipeline) and model.tied is not None:
        # Only the first stage has the parameter, but all stages need to know whether it is trained.
        model.tied.trained = trains(
            EMBEDDING, torch.nn.Parameter(torch.empty(model.tied.shape, device="meta"))
        )


def parameter_table(model: LanguageModel | Pipeline, layout: ParallelLayout) -> str:
    """Return a table with the numbers of trained and of all parameters of the whole model, by kind
    and in total.

    All ranks call this together, before ZeRO partitions the model.
    """
    trained: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        sharded = getattr(parameter, "tensor_model_parallel", False)
        for kind in (kind_of(name), "total"):
            numel = parameter.numel() * (layout.tensor_parallel_size if sharded else 1)
            total[kind] += numel
            trained[kind] += numel * parameter.requires_grad
    none: Counter[str] = Counter()
    trained, total = (
        sum(layout.gather_pipeline_stages(counts), none) for counts in (trained, total)
    )
    total["total"] = total.pop("total")  # the last row
    width = max(len(f"{number:,}") for number in total.values())
    lines = [f"{'parameters':<12}{'trained':>{width}}  {'of':>{width}}"]
    lines += [f"{kind:<12}{trained[kind]:>{width},}  {total[kind]:>{width},}" for kind in total]
    return "\n".join(lines)
