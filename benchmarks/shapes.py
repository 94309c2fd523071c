"""Models of which training steps are measured, and what one GPU gets of a step. Imports no torch."""

import argparse
from dataclasses import dataclass

from megatron_tape.config.data import DataConfig
from megatron_tape.config.schema import DeepSpeedConfig, OptimizerConfig, ParallelConfig, RunConfig
from megatron_tape.config.train import TrainConfig
from megatron_tape.position import model_config

ENCODINGS = ("rope", "tape")
"""What is compared."""
RIVALS = ("transformers", "megatron", "transformer_engine")
"""What one would train instead, in `benchmarks.rivals`; the last is Megatron-core with the layers of that package."""


@dataclass(frozen=True)
class Shape:
    """A model, and the sequences that one data-parallel rank trains on in a step."""

    layers: int
    heads: int
    head_dim: int
    seq_length: int
    vocab_size: int
    micro_batch: int
    accumulate: int
    """Micro-batches of a step."""
    ffn: int | None = None
    """Inner width of the MLP; None: four times the hidden size."""
    position_mlp: int | None = None
    """Inner width of TAPE's position MLP; None: four times the heads."""


SHAPES = {
    # pretrain/recipes/tape_155m.yaml: 163 M parameters, 131,072 tokens per GPU and step on the recipe's four GPUs.
    "155m-1k": Shape(12, 12, 64, 1024, 32000, micro_batch=32, accumulate=4, ffn=3072, position_mlp=48),
    # Llama-like: 1.345 G parameters with RoPE, 1.348 G with TAPE.
    "1.3b-4k": Shape(24, 16, 128, 4096, 32000, micro_batch=4, accumulate=4, ffn=5504),
    # 8 of Llama 2 7B's 32 layers: 1.881 G parameters with RoPE, 1.885 G with TAPE. 7 of the 8 layers rewrite TAPE's
    # state; in the whole model 31 of 32 do.
    "7b-8k": Shape(8, 32, 128, 8192, 32000, micro_batch=1, accumulate=4, ffn=11008),
    "cpu": Shape(12, 12, 64, 1024, 4096, micro_batch=1, accumulate=1),
    "toy": Shape(2, 4, 32, 32, 128, micro_batch=2, accumulate=2),
}


def run_config(encoding: str, shape: Shape, world_size: int, options: argparse.Namespace) -> RunConfig:
    """Return the settings of a run with `encoding`, which `checks.settings.validate` still has to accept.

    `options` are those of `benchmarks.train_step`.
    """
    width = shape.heads * shape.head_dim
    data_size = max(1, world_size // options.tensor_parallel)
    return RunConfig(
        model=model_config(
            {
                "position_encoding": encoding,
                "position": {"mlp_size": shape.position_mlp} if encoding == "tape" else {},
                "num_layers": shape.layers,
                "hidden_size": width,
                "ffn_hidden_size": 4 * width if shape.ffn is None else shape.ffn,
                "num_attention_heads": shape.heads,
                "seq_length": shape.seq_length,
                "vocab_size": shape.vocab_size,
                "attention_backend": options.tape_backend if encoding == "tape" else options.rope_backend,
            }
        ),
        data=DataConfig(prefix="random tokens"),
        optimizer=OptimizerConfig(weight_decay=0.01),
        parallel=ParallelConfig(tensor_model_parallel_size=options.tensor_parallel),
        deepspeed=DeepSpeedConfig(zero_stage=options.zero_stage),
        train=TrainConfig(
            steps=1000,
            micro_batch_size=shape.micro_batch,
            global_batch_size=shape.micro_batch * shape.accumulate * data_size,
            precision=options.precision,
            recompute=options.recompute,
        ),
    )
