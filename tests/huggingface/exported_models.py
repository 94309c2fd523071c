"""Exports of small models of both families (TAPE's classes, and encodings with their file) for
tests.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from models import build, small_model, whole_weights
from safetensors.torch import load_file, save_file
from toy_encodings import TOYS
from transformers import AutoModelForCausalLM

from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.huggingface.imports.new_checkpoint import write_imported
from megatron_tape.position import BUILT_IN, ENCODINGS

# Settings with which 16 tokens reach every branch.
CHANGES = {
    "t5": {"t5_num_buckets": 6, "t5_max_distance": 9},
    "fire": {"fire_threshold": 3.0},
    "xpos": {"xpos_scale_base": 8.0},
    "cope": {"cope_max_position": 5},
    "selective_rope": {"selective_rope_bias": True},
    "selective_rope_fox": {"selective_rope_rank": 5},
    "wall": {"wall_bias_start": 1.0, "wall_scalar_gate": True, "wall_sink": True},
}
LEARNED = {"increments": "learned"}
VARIANTS = {
    "rope_learned": ("rope", LEARNED),
    "tape_learned": ("tape", LEARNED | {"state_norm": "unit"}),
    "tape_signed": ("tape", {"increments": "signed", "layers_without_positions": 2}),
}
NAMES = (*(encoding.name for encoding in BUILT_IN), *VARIANTS, *TOYS)
"""Encodings that can be exported with their file; this must work for TAPE and RoPE, too."""
OWN_CLASSES = "tape_classes"
"""TAPE in its own format."""
PLAIN_ROPE = "rope_plain"
"""RoPE as a Llama model."""
AS_EXPORTED = {OWN_CLASSES: "tape", PLAIN_ROPE: "rope"}


@dataclass
class Encoded:
    model: object
    """Its settings."""
    built: torch.nn.Module
    """The model of this project."""
    checkpoint: Path
    directory: Path
    loaded: torch.nn.Module
    """The export, as transformers loads it."""


def export_with_code(name, *arguments, **options):
    """Export a model with its encoding's file, even if the encoding has another export format."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ENCODINGS[name], "exports_to", "code")
        export(*arguments, **{"tokenizer": "none"} | options)


def make(folder, name, label=None, dtype="fp32", max_shard_size=10**9, tokenizer="none", **changes):
    """Build a model whose encoding's parameters are far from their initial values, export and load
    it.
    """
    label = label or f"model_{name}"
    own = name in AS_EXPORTED
    name = AS_EXPORTED.get(name, name)
    name, settings = VARIANTS.get(name, (name, CHANGES.get(name, {})))
    model = small_model(
        position_encoding=name, **({"unpadded_vocab_size": 64} | settings | changes)
    )
    built, _ = build(model)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in built.named_parameters():
            if ".position." in key and name != "tape":
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    checkpoint = folder / "checkpoints" / label
    directory = folder / label
    write_imported(checkpoint, model, whole_weights(built, model), "a random model")
    write = export if own else partial(export_with_code, name)
    write(checkpoint, directory, tokenizer=tokenizer, dtype=dtype, max_shard_size=max_shard_size)
    loaded, found = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        found
    )
    return Encoded(model, built.eval(), checkpoint, directory, loaded.eval())


def write_no_bytes(directory):
    """Make an export's model never choose single-byte tokens."""
    pieces = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"][
        "vocab"
    ]
    with changed_weights(directory) as weights:
        weights["lm_head.weight"][
            [index for piece, index in pieces.items() if piece.startswith("<0x")]
        ] = 0


@contextmanager
def changed_weights(directory):
    """Yield the weights of an export by name, and save their changes."""
    yield (weights := load_file(directory / "model.safetensors"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
