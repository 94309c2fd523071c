"""A training step here beside what one would take instead: transformers' Llama, and Megatron-core's own GPTModel.

    python -m benchmarks.rivals [--shape cpu] [--layers 4] [--tokens 4096] [--record]

All train the same shape on the same tokens: RoPE and TAPE as in `benchmarks.train_step`, Llama with torch's SDPA, and
GPTModel with Megatron's local layers, these two with torch's fused AdamW and gradients clipped to a norm of 1. Their
steps alternate in one run, on one process. Each is given as a multiple of the faster of the two rivals, in seconds and
in what a forward pass keeps for its backward pass; weights, gradients and moments take the same of all. With
Transformer Engine installed, a GPU also measures GPTModel with its layers.
"""

import argparse
import dataclasses
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.environment import Record, add_record_arguments, positive, quieten_libraries
from benchmarks.shapes import ENCODINGS, SHAPES, Shape, run_config
from benchmarks.timing import device_here, seconds

RIVALS = ("transformers", "megatron", "megatron with Transformer Engine")
LEARNING_RATE, WEIGHT_DECAY, CLIPPED = 1e-4, 0.01, 1.0


class PlainSteps:
    """Steps of a module whose `loss(tokens, labels)` is a scalar, with a usual optimizer."""

    def __init__(self, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: list[dict[str, Tensor]]):
        self.module, self._loss, self._batches = module.train(), loss, batches
        settings = dict(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        self._adam = torch.optim.AdamW(module.parameters(), **settings)

    def step(self) -> None:
        """Take one optimizer step on all micro-batches."""
        for batch in self._batches:
            (self._loss(batch["tokens"], batch["labels"]) / len(self._batches)).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIPPED)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def activation_bytes(self) -> int:
        """Return the bytes that the forward pass of a micro-batch keeps for the backward pass, without the weights."""
        from benchmarks.measured_model import bytes_kept

        first = self._batches[0]
        return bytes_kept(self.module, lambda: self._loss(first["tokens"], first["labels"]))


def transformers_llama(shape: Shape, dtype: torch.dtype, device: torch.device, batches: list) -> PlainSteps:
    """Return steps of transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = shape.heads * shape.head_dim
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width if shape.ffn is None else shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.seq_length,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(device, dtype)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).logits.float().flatten(0, 1), labels.flatten())

    return PlainSteps(model, loss, batches)


def megatron_gpt(
    shape: Shape, dtype: torch.dtype, device: torch.device, batches: list, groups: object, engine: bool
) -> PlainSteps:
    """Return steps of Megatron-core's GPTModel, with its local layers or, with `engine`, Transformer Engine's."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import TransformerConfig

    width = shape.heads * shape.head_dim
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=width,
        num_attention_heads=shape.heads,
        ffn_hidden_size=4 * width if shape.ffn is None else shape.ffn,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        bias_dropout_fusion=device.type == "cuda",
        masked_softmax_fusion=device.type == "cuda",
        gradient_accumulation_fusion=False,
    )
    local = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec() if engine else local,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    ).to(device)
    positions = torch.arange(shape.seq_length, device=device)[None]
    mask = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool, device=device).triu(1)[None, None]

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(tokens, positions.expand_as(tokens), None if engine else mask, labels=labels).mean()

    return PlainSteps(model, loss, batches)


def compare(options: argparse.Namespace, shape: Shape) -> dict:
    """Return, by name, the seconds and activation bytes of steps, and their ratios to the faster rival's."""
    from benchmarks.measured_model import MeasuredModel, training_backend
    from megatron_tape.parallel.layout import initialize_distributed

    layout, dtype = initialize_distributed(), torch.bfloat16 if options.precision == "bf16" else torch.float32
    models: dict = {}
    for encoding in ENCODINGS:
        config = run_config(encoding, shape, 1, options)
        models[encoding] = MeasuredModel(config, layout, training_backend(config.model, layout, dtype)[0])
    batches = models["rope"].batches
    models["transformers"] = transformers_llama(shape, dtype, layout.device, batches)
    models["megatron"] = megatron_gpt(shape, dtype, layout.device, batches, layout.groups, engine=False)
    if layout.device.type == "cuda" and importlib.util.find_spec("transformer_engine"):
        models[RIVALS[2]] = megatron_gpt(shape, dtype, layout.device, batches, layout.groups, engine=True)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for repetition in range(options.warmup + options.repetitions):
        for name, model in models.items():
            spent = seconds(model.step, layout.device)
            if repetition >= options.warmup:
                taken[name].append(spent)
        said = ", ".join(f"{name} {values[-1]:.3f} s" for name, values in taken.items() if values)
        print(f"step {repetition + 1} of {options.warmup + options.repetitions}: {said}", file=sys.stderr, flush=True)
    found = {name: {"seconds": statistics.median(values)} for name, values in taken.items()}
    fastest = min((name for name in RIVALS if name in found), key=lambda name: found[name]["seconds"])
    for name, values in taken.items():
        # Steps of the same turn, so that a busy machine delays both.
        found[name]["ratio"] = statistics.median([own / other for own, other in zip(values, taken[fastest])])
        found[name]["activation_bytes"] = models[name].activation_bytes()
    return {"shape": dataclasses.asdict(shape), "fastest_rival": fastest, "steps": found}


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table; `--record` or `--output` also writes a record."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="155m-1k" if on_gpu else "cpu", help="model (default here: %(default)s)")
    add("--layers", type=positive, help="instead of the shape's")
    add("--tokens", type=positive, help="of a sequence, instead of the shape's")
    add("--micro-batch", type=positive, help="sequences, instead of the shape's")
    add("--precision", choices=("bf16", "fp32"), default="bf16" if on_gpu else "fp32", help="default: %(default)s")
    add("--warmup", type=positive, default=2, help="steps before those that count (default: %(default)s)")
    add("--repetitions", type=positive, default=7, help="steps that count (default: %(default)s)")
    add_record_arguments(parser)
    options = parser.parse_args(argv)
    fixed = {"zero_stage": 1 if options.precision == "bf16" else 0, "recompute": "none", "tensor_parallel": 1}
    vars(options).update(fixed, tape_backend="auto", rope_backend="auto")
    sizes = {"layers": options.layers, "seq_length": options.tokens, "micro_batch": options.micro_batch}
    shape = dataclasses.replace(SHAPES[options.shape], **{name: size for name, size in sizes.items() if size})
    quieten_libraries(0)
    os.environ.setdefault("DS_ACCELERATOR", device_here().type)
    record, result = Record("rivals", options), compare(options, shape)
    record.write(result)
    print(f"\n{'':<34}{'s/step':>10}{'/ rival':>10}{'MiB kept':>12}")
    for name, step in result["steps"].items():
        print(f"{name:<34}{step['seconds']:>10.3f}{step['ratio']:>10.2f}{step['activation_bytes'] / 2**20:>12,.1f}")


if __name__ == "__main__":
    main()
