"""Compare step time and peak memory of TAPE and RoPE: the same model, batch and optimizer, in one process.

    python -m benchmarks.train_step [--record]

Steps alternate and medians are reported; no figure appears unless both models start with the same loss. Memory peaks at
the end of the forward pass: weights, gradients, Adam's moments, and what the backward pass needs. It is added up from
the tensors themselves, since both models share one process and therefore one resident size.
"""

import argparse
import resource
import statistics
import sys
import time

import torch

from benchmarks.environment import record
from megatron_tape.config.schema import ModelConfig, OptimizerConfig
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.parallel.layout import ParallelLayout, initialize_distributed, seed_everything
from megatron_tape.training.optimizer import parameter_groups


class Contestant:
    """A model that takes training steps on one fixed batch."""

    def __init__(self, encoding: str, arguments: argparse.Namespace, layout: ParallelLayout):
        self.model_config = ModelConfig(
            position_encoding=encoding,
            num_layers=arguments.layers,
            hidden_size=arguments.heads * arguments.head_dim,
            ffn_hidden_size=4 * arguments.heads * arguments.head_dim,
            num_attention_heads=arguments.heads,
            seq_length=arguments.seq_length,
            vocab_size=arguments.vocab_size,
        )
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.precision]
        seed_everything(0, layout)
        model = LanguageModel(
            self.model_config, transformer_config(self.model_config, dtype=dtype), layout.groups, layout.device
        )
        self.model = model.to(layout.device)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, OptimizerConfig(weight_decay=0.01)), lr=1e-4)
        shape = (arguments.batch, arguments.seq_length + 1)
        self.tokens = torch.randint(arguments.vocab_size, shape, device=layout.device)

    def step(self) -> float:
        """Take one step and return its loss."""
        loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def activation_bytes(self) -> int:
        """Return the bytes that one forward pass keeps for the backward pass, without the weights."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        del loss
        return sum(kept.values())

    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients and Adam's moments."""
        return sum(4 * parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


def check_parity(contestants: dict[str, Contestant]) -> None:
    """Exit if the models do not start out equal (with zero matrices, TAPE is RoPE); then move TAPE's off zero."""
    tokens = contestants["rope"].tokens
    with torch.no_grad():
        losses = {name: c.model(tokens[:, :-1], tokens[:, 1:]).item() for name, c in contestants.items()}
    if abs(losses["tape"] - losses["rope"]) > 1e-4:
        sys.exit(f"error: the models differ before the first step, so no figure is given: {losses}")
    generator = torch.Generator().manual_seed(1)
    for update in contestants["tape"].model.position_updates():
        for parameter in update.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.data.add_(noise.to(parameter.device, parameter.dtype))


def measure(arguments: argparse.Namespace) -> dict:
    """Alternate the contestants' steps and return medians and ratios."""
    layout = initialize_distributed()
    contestants = {name: Contestant(name, arguments, layout) for name in ("rope", "tape")}
    check_parity(contestants)
    seconds = {name: [] for name in contestants}
    for repetition in range(arguments.warmup + arguments.repetitions):
        for name, contestant in contestants.items():
            started = time.perf_counter()
            contestant.step()
            if repetition >= arguments.warmup:
                seconds[name].append(time.perf_counter() - started)
        print(f"{repetition + 1}/{arguments.warmup + arguments.repetitions}", end="\r", file=sys.stderr)
    peak = {name: c.state_bytes() + c.activation_bytes() for name, c in contestants.items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    paired = statistics.median(t / r for t, r in zip(seconds["tape"], seconds["rope"]))
    return {
        "seconds_per_step": median,
        "seconds_per_step_all": seconds,
        "memory_bytes": peak,
        "ratio_time": paired,
        "ratio_memory": peak["tape"] / peak["rope"],
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Print the two ratios; `--record` also writes them to benchmarks/results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/train_step-*.json")
    arguments = parser.parse_args()
    result = measure(arguments)
    for name, value in result["seconds_per_step"].items():
        memory = result["memory_bytes"][name] / 2**20
        print(f"{name}: {value:.3f} s per step, {memory:.0f} MiB of weights, gradients, Adam state and activations")
    print(f"TAPE / RoPE: time {result['ratio_time']:.3f}, memory {result['ratio_memory']:.3f}")
    if arguments.record:
        record("train_step", {"arguments": vars(arguments), **result})


if __name__ == "__main__":
    main()
