"""Compare the cost of the task `perplexity` with that of a bare loop over the same windows of the same model.

    python -m benchmarks.perplexity [--record]

The loop calls transformers once for each window, keeps the logits of the tokens to score, and adds up their losses. The
task also measures the loss by position, for which it keeps all logits of each document's first window. Both take turns
in one process. On a CPU, their time is what one thread computes, so that other load hardly matters. No figure appears
unless both give the same loss within 1e-6.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.environment import Record, positive
from benchmarks.timing import DTYPES, TimeLimit, add_time_arguments, device_here
from megatron_tape.evaluation.base import ModelInfo
from megatron_tape.evaluation.tasks.perplexity import Perplexity
from megatron_tape.evaluation.transformers_model import HFModel

TOLERANCE = 1e-6
SIZES = {"cuda": (24, 16, 128, 32000), "cpu": (6, 6, 64, 16000), "toy": (2, 2, 16, 200)}
"""Layers, heads, width of a head and vocabulary."""


def build(arguments: argparse.Namespace) -> HFModel:
    """Return a Llama with random weights."""
    layers, heads, head_dim, vocabulary = SIZES["toy" if arguments.toy else device_here().type]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=heads * head_dim,
        intermediate_size=3 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=arguments.length,
    )
    torch.manual_seed(0)
    with device_here():
        model = LlamaForCausalLM(config)
    info = ModelInfo("llama", vocabulary, arguments.length, {}, has_tokenizer=False)
    return HFModel(info, model.to(DTYPES[arguments.precision]), None)


@torch.inference_mode()
def bare_loop(model: HFModel, task: Perplexity) -> float:
    """Return the loss in nats per token of the windows that `task` scores."""
    nats, scored = 0.0, 0
    for work in task.work.values():
        tokens = torch.from_numpy(work.document.tokens.astype(np.int64)).to(model.device)
        for window in work.windows:
            ids = tokens[window.start : window.stop]
            logits = model.model(ids[None, :-1], use_cache=False, logits_to_keep=window.scored).logits[0]
            nats += F.cross_entropy(logits.float(), ids[-window.scored :], reduction="sum").item()
            scored += window.scored
    return nats / scored


def main() -> None:
    """Check that both give the same loss, then time them in turns; `--record` or `--output` also writes a file."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=positive, default=1024, help="tokens of context (default: %(default)s)")
    parser.add_argument("--documents", type=positive, default=8 if on_gpu else 1, help="default here: %(default)s")
    parser.add_argument("--repetitions", type=positive, default=7, help="pairs of measurements (default: %(default)s)")
    add_time_arguments(parser)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.length, arguments.repetitions = 64, 3
    if not on_gpu:
        torch.set_num_threads(1)
    model, limit = build(arguments), TimeLimit(arguments.minutes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        random = np.random.default_rng(0)
        random.integers(model.info.vocab_size, size=4 * arguments.length, dtype=np.uint16).tofile(path)
        data = {f"document{number}": str(path) for number in range(arguments.documents)}
        task = Perplexity(Perplexity.Settings(data=data, lengths=[arguments.length]))
        units = task.units(model)

    def by_task() -> float:
        values = [task.evaluate(unit, model) for unit in units]
        return sum(value["nats"] for value in values) / sum(value["tokens"] for value in values)

    functions = {"task": by_task, "loop": lambda: bare_loop(model, task)}
    losses = {name: function() for name, function in functions.items()}
    if abs(losses["task"] - losses["loop"]) > TOLERANCE:
        sys.exit(f"error: the task's loss is {losses['task']}, the loop's {losses['loop']}, so no figure is given")
    print(f"parity: both give {losses['loop']:.6f} nats per token", flush=True)
    # Every loss is copied to the host, which waits for the GPU.
    clock = time.perf_counter if on_gpu else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in functions}
    while len(taken["loop"]) < arguments.repetitions and not limit.over():
        # Each goes first every other time.
        for name in (list(functions), list(functions)[::-1])[len(taken["loop"]) % 2]:
            started = clock()
            functions[name]()
            taken[name].append(clock() - started)
    ratio = statistics.median(task / loop for task, loop in zip(taken["task"], taken["loop"]))
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    print(
        f"perplexity at {arguments.length:,} tokens: the task takes {seconds['task']:.3f} s, a bare loop "
        f"{seconds['loop']:.3f} s; ratio {ratio:.3f}, the median of {len(taken['loop'])} pairs"
    )
    Record("perplexity", arguments).write({"seconds": seconds, "task_over_loop": ratio, "pairs": taken})


if __name__ == "__main__":
    main()
