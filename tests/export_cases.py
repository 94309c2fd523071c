"""Train tiny models in several layouts on real text, and save their logits; see
huggingface/test_export.py.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from training_cases import RECIPE, option, run, tp, zero

from megatron_tape.checkpoint.opening import open_to_resume
from megatron_tape.checkpoint.restoring import load_weights
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.parallel.partitions import allocate

VOCABULARY = 400
PADDED = 416
LENGTH = 48
STEPS = 3


def settings(data):
    options = {
        "data.prefix": f"{data}/text",
        "data.tokenizer": f"{data}/tokenizer.model",
        "model.vocab_size": PADDED,
        "model.seq_length": LENGTH,
        "optimizer.lr": 0.02,
        "train.micro_batch_size": 1,
        "train.steps": STEPS,
        "train.eval_steps": 1,
        "train.eval_interval": STEPS,
        "logging.sample_tokens": 0,
        "logging.interval": 1,
    }
    return [option(key, value) for key, value in options.items()]


def cases():
    """Both tensor-parallel sizes, and among them the kinds of models.

    A checkpoint holds the same shares of the weights with every ZeRO stage; test_resuming.py
    compares all layouts.
    """
    kind = {
        "position.token_mixing": "per_head",
        "num_query_groups": 4,
        "tie_embeddings": "true",
        "position.gate_input": "attention",
    }
    return {
        "tp1_zero2_rope": [tp(1), zero(2), option("model.position_encoding", "rope")],
        "tp2_zero2_tied_per_head": [
            tp(2),
            zero(2),
            *(option(f"model.{key}", value) for key, value in kind.items()),
        ],
        "tp2_zero3": [tp(2), zero(3)],
    }


def logits(folder, name, overrides, text):
    """Return the trained model's logits at its last checkpoint."""
    arguments = ["--config", str(RECIPE), "--logging.directory", f"{folder}/{name}", *overrides]
    config = parse_run_config(arguments)
    layout = initialize_distributed(config.parallel.tensor_model_parallel_size)
    sequence_parallel = config.parallel.uses_sequence_parallel
    shape = transformer_config(config.model, layout.tensor_parallel_size, sequence_parallel)
    model = LanguageModel(config.model, shape, layout.groups)
    allocate(model, "cpu")
    load_weights(open_to_resume(config, layout), model, layout)
    with torch.no_grad():
        return model(text)


def main(folder, data):
    tokenizer = load_tokenizer(f"{data}/tokenizer.model")
    ids = tokenizer.encode(Path(data, "held_out.txt").read_text(encoding="utf-8"))
    text = torch.tensor(ids[: 2 * LENGTH]).view(2, LENGTH)
    saved = {"text": text}
    for name, overrides in cases().items():
        run(data, name, *settings(data), *overrides)
        saved[name] = logits(data, name, [*settings(data), *overrides], text)
    if dist.get_rank() == 0:
        save_file(
            {name: tensor.contiguous() for name, tensor in saved.items()},
            f"{data}/logits.safetensors",
        )
