"""Build the model of a run, and freeze the parameters that it does not train."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch.nn import Parameter

from megatron_tape.config.schema import ExtensionConfig, RunConfig
from megatron_tape.model.backend import verified_backend, verified_kernels
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.model.lora import add_lora
from megatron_tape.model.names import EMBEDDING, kind_of
from megatron_tape.model.pipeline import Pipeline
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import is_sharded
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.run.watch import Watch
from megatron_tape.text import counted

logger = logging.getLogger(__name__)

ParameterFilter = Callable[[str, Parameter], bool]
"""Returns whether to train a parameter, given its name and the parameter."""


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype of the forward and backward passes."""
    if config.train.precision == "bf16":
        return torch.bfloat16
    return torch.float32


def build_model(
    config: RunConfig, layout: ParallelLayout, watch: Watch
) -> LanguageModel | Pipeline:
    """Return the run's model or, with several pipeline stages, this rank's stage of it.

    Its parameters are on torch's meta device; `parallel.partitions.allocate` gives them memory.
    Verifies the kernels before. All ranks call this together.
    """
    _log_settings(config, layout)
    dtype = dtype_of(config)
    megatron_config = transformer_config(
        config.model, layout.tensor_parallel_size, config.parallel.uses_sequence_parallel, dtype
    )
    watch.progress("choosing the attention backend")
    shifted_sparse = config.extension.attention == "shifted_sparse"
    allow_slow = config.train.allow_slow_attention
    packed = config.data.reset_attention_mask
    backend = verified_backend(config.model, layout, dtype, shifted_sparse, allow_slow, packed)
    model_config = dataclasses.replace(config.model, attention_backend=backend)
    fused = verified_kernels(config.model, layout, dtype, allow_slow)

    model_chunks = []
    # `every_chunk` has the layers of each chunk of the model. With virtual stages, a rank has
    # several chunks: every pipeline_size-th one from its own stage on.
    every_chunk = config.parallel.model_chunks(config.model.num_layers)
    for layers in every_chunk[layout.pipeline_rank :: layout.pipeline_size]:
        model = LanguageModel(
            model_config,
            megatron_config,
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
    return Pipeline(model_chunks, megatron_config, layout.groups)


def _log_settings(config: RunConfig, layout: ParallelLayout) -> None:
    """Log the model's size and the layout, and warn if bf16 is slower than fp32 on this CPU."""
    train = config.train
    logger.info(
        "building a model of %s parameters, position encoding %s, on %s: %s",
        f"{parameter_count(config.model, config.extension):,}",
        config.model.position_encoding,
        counted(layout.world_size, "process", "processes"),
        config.parallel.describe(layout.world_size),
    )
    logger.info(
        "training with ZeRO %d in %s, recomputation: %s",
        config.deepspeed.zero_stage,
        train.precision,
        train.recompute,
    )

    # torch's names of bf16 instructions; the last one is that on Arm CPUs.
    bf16_instructions = ("avx512_bf16", "amx_bf16", "bf16")
    if train.precision == "bf16" and layout.device.type == "cpu":
        if not any(map(torch.cpu.get_capabilities().get, bf16_instructions)):
            logger.warning(
                "warning: train.precision is bf16, but this CPU has no bf16 instructions, so fp32"
                " is faster: --train.precision fp32"
            )


def parameter_filter(extension: ExtensionConfig) -> ParameterFilter:
    """Return the filter that selects the parameters of the kinds in `extension.trains`."""
    return lambda name, parameter: "all" in extension.trains or kind_of(name) in extension.trains


def freeze_parameters(model: LanguageModel | Pipeline, trains: ParameterFilter) -> None:
    """Freeze the parameters for which `trains` returns false.

    Raises ValueError if this would freeze a whole model. A pipeline stage may be frozen completely.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name, parameter))
    if isinstance(model, LanguageModel) and not any(
        parameter.requires_grad for parameter in model.parameters()
    ):
        raise ValueError("all parameters of the model would be frozen; change extension.trains")
    if isinstance(model, Pipeline) and model.tied is not None:
        # All stages need to know whether the tied embedding is trained, but only the first stage
        # has the parameter. So pass a parameter without data to `trains`.
        model.tied.trained = trains(
            EMBEDDING, Parameter(torch.empty(model.tied.shape, device="meta"))
        )


def parameter_table(model: LanguageModel | Pipeline, layout: ParallelLayout) -> str:
    """Return a table with the numbers of trained and of all parameters of the whole model, by kind
    and in total.

    All ranks call this together, before ZeRO partitions the model.
    """
    trained: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        numel = parameter.numel()
        # This rank has one shard of the parameter.
        if is_sharded(parameter):
            numel *= layout.tensor_parallel_size
        for kind in (kind_of(name), "total"):
            total[kind] += numel
            trained[kind] += numel * parameter.requires_grad

    trained = sum(layout.gather_pipeline_stages(trained), Counter())
    total = sum(layout.gather_pipeline_stages(total), Counter())
    total["total"] = total.pop("total")  # move the key to the end, as the last row
    width = len(f"{total['total']:,}")
    lines = [f"{'parameters':<12}{'trained':>{width}}  {'of':>{width}}"]
    lines += [f"{kind:<12}{trained[kind]:>{width},}  {total[kind]:>{width},}" for kind in total]
    return "\n".join(lines)
