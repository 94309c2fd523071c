"""The model of a run, as its settings and this machine determine it."""

import dataclasses
import logging

import torch

from megatron_tape.config.schema import RunConfig
from megatron_tape.model.backend import verified_backend, verified_kernels
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.model.lora import add_lora
from megatron_tape.model.pipeline import Pipeline
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.run.watch import Watch
from megatron_tape.text import counted

logger = logging.getLogger(__name__)


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype of the forward and backward pass."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def build_model(config: RunConfig, layout: ParallelLayout, watch: Watch) -> LanguageModel | Pipeline:
    """Return the run's model or this pipeline stage's part of it, after checking its kernels.

    It has no memory for its parameters yet.
    """
    _log_settings(config, layout)
    dtype, recompute = dtype_of(config), config.train.recompute
    size, sequence_parallel = layout.tensor_parallel_size, config.parallel.uses_sequence_parallel
    translated = transformer_config(config.model, size, sequence_parallel, dtype, recompute)
    watch.progress("choosing the attention backend")
    shifted_sparse = config.extension.attention == "shifted_sparse"
    allow_slow, packed = config.train.allow_slow_attention, config.data.reset_attention_mask
    backend = verified_backend(config.model, layout, dtype, shifted_sparse, allow_slow, packed)
    settings = dataclasses.replace(config.model, attention_backend=backend)
    fused = verified_kernels(config.model, layout, dtype, allow_slow)
    stretches = []
    for layers in config.parallel.stretches(config.model.num_layers)[layout.pipeline_rank :: layout.pipeline_size]:
        model = LanguageModel(
            settings,
            translated,
            layout.groups,
            layout.device,
            shifted_sparse,
            selective_recompute=recompute == "selective",
            fused=fused,
            layers=layers,
            z_loss=config.optimizer.z_loss,
        )
        if config.extension.adds_lora:
            add_lora(model, config.model, config.extension)
        stretches.append(model)
    return stretches[0] if layout.pipeline_size == 1 else Pipeline(stretches, translated, layout.groups)


def _log_settings(config: RunConfig, layout: ParallelLayout) -> None:
    ranks = f"{counted(layout.world_size, 'process', 'processes')}: {config.parallel.described(layout.world_size)}"
    parameters = f"{parameter_count(config.model, config.extension):,}"
    encoding = config.model.position_encoding
    logger.info("building a model of %s parameters, position encoding %s, on %s", parameters, encoding, ranks)
    stage, train = config.deepspeed.zero_stage, config.train
    logger.info("training with ZeRO %d in %s, recomputation: %s", stage, train.precision, train.recompute)
