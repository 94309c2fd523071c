"""What the check of training trains on: text, a tokenizer, an indexed dataset, weights to begin with, and settings."""

import contextlib
import io
import json
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.programs import ROOT

ENCODINGS = ("tape", "rope")


@dataclass(frozen=True)
class Size:
    """A small model that the fused kernels support, and how long it is trained."""

    layers: int
    heads: int
    head_dim: int
    seq_length: int
    batch: int
    micro_batch: int
    """On one process; on several, each gets its share of the batch at once."""
    steps: int
    text_bytes: int
    document: int
    """Characters of a document; a sequence of training holds several documents."""
    vocab_size: int = 1024


ON_GPU = Size(
    layers=4, heads=4, head_dim=64, seq_length=256, batch=8, micro_batch=4, steps=20, text_bytes=1_000_000, document=300
)
TOY = Size(
    layers=2, heads=2, head_dim=32, seq_length=16, batch=2, micro_batch=2, steps=2, text_bytes=100_000, document=20
)


def settings(size: Size, folder: Path, encoding: str) -> dict:
    """Return the settings that all runs of an encoding share, by section."""
    width = size.heads * size.head_dim
    return {
        "model": {
            "position_encoding": encoding,
            "num_layers": size.layers,
            "hidden_size": width,
            "ffn_hidden_size": 3 * width,
            "num_attention_heads": size.heads,
            "seq_length": size.seq_length,
            "vocab_size": size.vocab_size,
            "unpadded_vocab_size": size.vocab_size,
        },
        "data": {
            "prefix": str(folder / "data"),
            "split": "900,100,0",
            "tokenizer": str(folder / "tokenizer.model"),
            "cache_directory": str(folder / "index"),
        },
        # The rate moves TAPE's matrices at every step. AdamW's usual eps of 1e-8 would turn gradients that are nothing
        # but rounding errors into whole steps, and equal runs would drift apart.
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0, "eps": 1e-6},
        "schedule": {"kind": "constant"},
        "train": {
            "steps": size.steps,
            "global_batch_size": size.batch,
            "micro_batch_size": size.micro_batch,
            "precision": "fp32",
            "eval_interval": size.steps,
            "eval_steps": 1,
            "hang_timeout": 300,
        },
        "checkpoint": {"interval": 1000, "resume": str(folder / f"start-{encoding}")},
        "logging": {"interval": 1, "sample_tokens": 1, "tensorboard": False},
    }


def prepare(folder: Path, size: Size) -> None:
    """Write the inputs of all cases into `folder`: real text, tokenized by this project's tools, and weights."""
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer.model"
    with open(corpus, "w", encoding="utf-8") as file:
        written = 0
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")[: size.text_bytes - written]
            for start in range(0, len(text), size.document):
                file.write(json.dumps({"text": text[start : start + size.document]}) + "\n")
            written += len(text)
    _tool("train_tokenizer", "--input", corpus, "--vocab-size", size.vocab_size, "--output", tokenizer)
    _tool(
        "preprocess_data", "--input", corpus, "--tokenizer", tokenizer, "--output-prefix", folder / "data",
        "--append-eod",
    )  # fmt: skip
    for encoding in ENCODINGS:
        write_start(folder, size, encoding)
    (folder / "size.json").write_text(json.dumps(asdict(size)), encoding="utf-8")


def write_start(folder: Path, size: Size, encoding: str) -> None:
    """Write a recipe, and a checkpoint to begin with, whose weights bf16 can hold and none of which are zero.

    TAPE's matrices usually start at zero, at which it is RoPE; errors in what they multiply would not show.
    """
    import torch

    from megatron_tape.config.schema import ModelConfig
    from megatron_tape.huggingface.imports.new_checkpoint import write_imported
    from megatron_tape.io.strict_yaml import dump
    from megatron_tape.model.names import POSITION, whole_shapes

    recipe = settings(size, folder, encoding)
    (folder / f"{encoding}.yaml").write_text(dump(recipe), encoding="utf-8")
    model = ModelConfig(**recipe["model"])
    weights = {}
    for name, shape in whole_shapes(model).items():
        generator = torch.Generator().manual_seed(len(weights) if POSITION in name else hash_of(name))
        if POSITION in name:
            scale = 0.5 * shape[-1] ** -0.5
        else:
            scale = 0.1 if len(shape) == 1 else 0.05
        weight = torch.randn(shape, generator=generator) * scale
        weights[name] = (weight + 1 if len(shape) == 1 and POSITION not in name else weight).bfloat16().float()
    with contextlib.redirect_stderr(io.StringIO()):  # it says how to train from them
        write_imported(folder / f"start-{encoding}", model, weights, "weights drawn at random")
    torch.save(weights, folder / f"start-{encoding}.pt")


def hash_of(name: str) -> int:
    """Return a seed that depends on the name alone, so that TAPE and RoPE share their other weights."""
    return int.from_bytes(name.encode(), "little") % 2**31


def _tool(name: str, *options: object) -> None:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"tools/{name}.py ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
