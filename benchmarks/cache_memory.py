"""Measure the memory of the caches of exported models with and without sliding windows.

    python -m benchmarks.cache_memory [--length 32768] [--window 1024] [--output FILE.json]

Each model reads a prompt in chunks and generates some tokens. The figures are the bytes of all
storage that the cache holds, after the prompt and after these tokens. The models are small and
random: a cache's size depends only on the layers, the key/value heads, their size and the tokens.

A parity check comes first: a short prompt must have the same logits with a cache as without one.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.environment import Record
from benchmarks.timing import DTYPES, add_time_arguments
from megatron_tape import command_line
from megatron_tape.command_line import whole_number
from megatron_tape.huggingface.export.remote_code import write_code
from megatron_tape.huggingface.export.to_transformers import huggingface_config, write_json
from megatron_tape.position import encoding_of, model_config

MODELS: dict[str, dict] = {
    "rope": {"position_encoding": "rope"},
    "swan": {"position_encoding": "rope", "layers_without_positions": 4},
    "tape": {"position_encoding": "tape"},
}
"""The settings of `model` in which the models differ, by name."""
GENERATED = 16
"""Tokens that are generated after the prompt."""
TOY = {"length": 96, "window": 16, "chunk": 32}
"""Options that --toy sets."""


def build(name: str, window: int | None, arguments: argparse.Namespace) -> PreTrainedModel:
    """Return a random model, a key of MODELS, as it is exported: with a window in three of four
    layers, or in none.
    """
    windows = {}
    if window is not None:
        windows = {"sliding_window": window, "full_attention_every": 4}
    settings = dict(
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=128,
        num_attention_heads=2,
        seq_length=arguments.length,
        vocab_size=256,
        # With a gate, no model of transformers supports these models, so that all of them are
        # exported with the same code.
        attention_output_gate=True,
    )
    model = model_config(settings | windows | MODELS[name])
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = huggingface_config(model, model.vocab_size, arguments.precision)
        write_json(Path(folder) / "config.json", config)
        write_code(Path(folder), type(encoding_of(model)))
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        built = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
    return built.to(DTYPES[arguments.precision]).eval()


def read(model: PreTrainedModel, tokens: torch.Tensor, chunk: int, cache: DynamicCache):
    """Read `tokens` (1, S) into the cache, `chunk` tokens at a time, and return the logits of the
    last token.
    """
    for part in tokens.split(chunk, 1):
        output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of all storage that the layers of a cache hold."""
    storages = {}
    for layer in cache.layers:
        tensors = [layer.keys, layer.values]
        for of_encoding in layer.encoding_tensors.values():
            tensors.append(of_encoding.kept)
            if of_encoding.dropped_sum is not None:
                tensors.append(of_encoding.dropped_sum)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def check_parity(model: PreTrainedModel, arguments: argparse.Namespace) -> None:
    """Exit with a message if a cache changes the logits."""
    length = min(arguments.length, 2 * arguments.window)
    tokens = torch.randint(256, (1, length))
    expected = model(tokens, use_cache=False, logits_to_keep=1).logits.float()
    found = read(model, tokens, arguments.chunk, DynamicCache(config=model.config)).float()
    allowed = 1e-4 if arguments.precision == "fp32" else 0.05
    difference = (found - expected).abs().max().item()
    # Not `>`, which is false for NaN.
    if not difference <= allowed:
        sys.exit(f"error: logits with a cache differ by {difference:.1e}; nothing is measured")


def measure(arguments: argparse.Namespace, record: Record) -> None:
    """Measure all models without and with the window. Print and record each result."""
    rows: dict[str, dict] = {}
    tokens = torch.randint(256, (1, arguments.length))
    for name in MODELS:
        rows[name] = {}
        for window in (None, arguments.window):
            model = build(name, window, arguments)
            check_parity(model, arguments)
            cache = DynamicCache(config=model.config)
            read(model, tokens, arguments.chunk, cache)
            after_prompt = cache_bytes(cache)
            for _ in range(GENERATED):
                read(model, tokens[:, :1], 1, cache)
            after_tokens = cache_bytes(cache)

            label = "no window" if window is None else f"window {window}"
            rows[name][label] = {"prompt": after_prompt, "generated": after_tokens}
            print(
                f"{name}, {label}: {after_prompt / 2**20:.2f} MiB after {arguments.length} tokens,"
                f" {after_tokens / 2**20:.2f} MiB after {GENERATED} more",
                flush=True,
            )
            record.write({"bytes": rows})


def main() -> None:
    """Measure, print bytes, and write the record to the file that --output names."""
    default = "default: %(default)s"
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("--length", type=whole_number, default=32768, help=f"tokens of the prompt ({default})")
    add("--window", type=whole_number, default=1024, help=f"tokens of the window ({default})")
    add("--chunk", type=whole_number, default=2048, help=f"tokens read at a time ({default})")
    add_time_arguments(parser)
    arguments = parser.parse_args()
    if arguments.toy:
        vars(arguments).update(TOY)
    with torch.no_grad():
        measure(arguments, Record(arguments))


if __name__ == "__main__":
    command_line.run(main)
