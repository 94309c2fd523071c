"""Steps of RoPE, TAPE and rivals side by side: in which order, that they may be compared, and the results."""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.profiler import profile

from benchmarks.environment import Record
from benchmarks.measured_model import MeasuredModel, dtype_of, free_memory
from benchmarks.rivals import Rival
from benchmarks.shapes import ENCODINGS, Shape, run_config
from benchmarks.step_results import summarize
from benchmarks.timing import matmul_peak, reason
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.model.backend import verified_backend
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.planning.hardware import peak_flops
from megatron_tape.planning.parameters import parameter_count

EQUAL = 1e-4
"""Largest difference between the models' losses of a token in fp32, as root mean square in nats."""


def turns(order: str, rivals: list[str]) -> list[tuple[str, ...]]:
    """Return which models take steps in turn, one group after the other.

    `alternate` lets all models exist at once. Otherwise only one does, and TAPE, which needs the most memory, is first.
    `blocks` measures each model once and then again in reverse order, so that a steady drift changes all medians alike.
    """
    if order == "alternate":
        return [(*ENCODINGS, *rivals)]
    once = [(name,) for name in ("tape", "rope", *rivals)]
    return once if order == "once" else [*once, *reversed(once)]


class Comparison:
    """All measurements of one shape. Every rank creates one; rank 0 prints and writes the record."""

    def __init__(self, arguments: argparse.Namespace, shape: Shape, layout: ParallelLayout, rivals: list[str]):
        self.arguments, self.shape, self.layout, self.rivals = arguments, shape, layout, rivals
        self.on_gpu = layout.device.type == "cuda"
        self.record = Record("train_step", arguments) if layout.rank == 0 else None
        self.result: dict = {}
        self.gpu = torch.cuda.get_device_name(layout.device) if self.on_gpu else None
        self.peak = peak_flops(self.gpu) if self.on_gpu and arguments.precision == "bf16" else None

    def run(self) -> dict:
        """Measure, with smaller micro-batches if memory runs out; return the results. Raises ConfigError."""
        self.matmul = matmul_peak(dtype_of(self.config("rope")), self.layout.device)
        self.say(f"a large matrix product: {self.matmul / 1e12:.2f} TFLOP/s")
        while True:
            self._begin()
            try:
                self._measure()
                break
            except torch.OutOfMemoryError as error:
                why = f"of {self.shape.micro_batch} is too large: memory ran out ({reason(error)})"
            if self.layout.world_size > 1:
                # The other ranks may be waiting for this one anywhere.
                raise ConfigError("--micro-batch", why, "start again with a smaller one")
            self._halve(why)
        self.layout.any_rank(False)  # a rank that ends closes connections that others may still be using
        return self.result

    def config(self, encoding: str) -> RunConfig:
        """Return the run that is measured with `encoding`."""
        return run_config(encoding, self.shape, self.layout.world_size, self.arguments)

    def say(self, text: str) -> None:
        """Print a line of progress on rank 0."""
        if self.layout.rank == 0:
            print(text, flush=True)

    def _halve(self, why: str) -> None:
        """Train on the same sequences in smaller micro-batches; ConfigError if they already are as small as can be."""
        before, sequences = self.shape.micro_batch, self.shape.micro_batch * self.shape.accumulate
        if before == 1:
            raise ConfigError("--micro-batch", why, "try --recompute selective or full, or a smaller --shape")
        size = next(size for size in range(before // 2, 0, -1) if sequences % size == 0)
        self.shape = dataclasses.replace(self.shape, micro_batch=size, accumulate=sequences // size)
        self.say(f"micro-batches of {size} for both, as one {why}")
        free_memory()

    def _begin(self) -> None:
        self.first_losses: dict[str, torch.Tensor] = {}
        self.backends: dict[str, str] = {}
        self.profiled: set[str] = set()
        layout, arguments = self.layout, self.arguments
        self.result = {
            "shape": {"name": arguments.shape, **dataclasses.asdict(self.shape)},
            "run": {
                "precision": arguments.precision,
                "zero_stage": arguments.zero_stage,
                "recompute": arguments.recompute,
                "order": arguments.order,
                "processes": layout.world_size,
                "tensor_parallel": layout.tensor_parallel_size,
                "device": self.gpu or "cpu",
                "tokens_per_step": self.config("rope").train.global_batch_size * self.shape.seq_length,
            },
            "peak_flops": self.peak,
            "matmul_flops": self.matmul,
            "models": {},
            "blocks": [],
        }

    def _measure(self) -> None:
        """Take steps of the groups of models in order."""
        warmup, total = self.arguments.warmup, self.arguments.warmup + self.arguments.repetitions
        rivals = [name for name in self.rivals if self._trains(name)]
        for group, again in itertools.groupby(turns(self.arguments.order, rivals)):
            with ExitStack() as stack:
                models = [stack.enter_context(self._built(name)) for name in group]
                if self.first_losses.keys() >= set(ENCODINGS) and "parity" not in self.result:
                    self._check_parity()
                for _ in again:
                    blocks = [self._new_block(measured) for measured in models]
                    for repetition in range(total):
                        if repetition == warmup and self.on_gpu:
                            torch.cuda.reset_peak_memory_stats()
                        steps = [measured.step() for measured in models]
                        for block, step in zip(blocks, steps):
                            if repetition >= warmup:
                                block["seconds"].append(step.seconds)
                                block["losses"].append(step.loss)
                        taken = ", ".join(f"{name} {step.seconds:.4f} s" for name, step in zip(group, steps))
                        self.say(f"step {repetition + 1} of {total}: {taken}")
                    for block, measured in zip(blocks, models):
                        block["memory"] = measured.memory()
                    self._summarize()
                if self.arguments.profile:
                    for measured in models:
                        self._profile(measured)

    def _trains(self, rival: str) -> bool:
        """Return whether a rival can take a step; if it cannot, note why."""
        try:
            with self._built(rival) as measured:
                measured.step()
        except Exception as error:  # of other people's code, or too little memory
            self.result.setdefault("rejected_rivals", {})[rival] = reason(error)
            self.say(f"WARNING: {rival} is not measured: {reason(error)}")
            return False
        return True

    @contextmanager
    def _built(self, name: str) -> Iterator[MeasuredModel]:
        """Build a model; when the block ends, free its memory."""
        started = time.perf_counter()
        if name in ENCODINGS:
            config = self.config(name)
            measured = MeasuredModel(config, self.layout, self._backend(name, config))
            self.first_losses[name] = measured.first_losses
            if name == "rope":
                self.plain_losses = measured.plain_losses
        else:
            measured = Rival(name, self.config("rope"), self.layout)
        seconds = time.perf_counter() - started
        self.say(f"{name}: {parameter_count(measured.config.model):,} parameters, built in {seconds:.1f} s")
        try:
            yield measured
        finally:
            measured.release()

    def _backend(self, encoding: str, config: RunConfig) -> str:
        if encoding not in self.backends:
            self.backends[encoding] = verified_backend(config.model, self.layout, dtype_of(config), allow_slow=True)
        return self.backends[encoding]

    def _check_parity(self) -> None:
        """Exit without a figure if the models do not start out equal: with zero matrices, TAPE is RoPE.

        In bf16 they may differ by twice of what rounding does to RoPE: its losses with another attention show that.
        """
        rope, tape = (self.first_losses[encoding] for encoding in ENCODINGS)
        difference = _distance(tape, rope)
        allowed = EQUAL if self.arguments.precision == "fp32" else 2 * _distance(self.plain_losses, rope)
        self.result["parity"] = {"difference": difference, "allowed": allowed}
        if not difference <= allowed:
            message = f"before the first step, the models' losses of a token differ by {difference:.2g}, more "
            message += f"than {allowed:.2g}, so no figure is given"
            sys.exit(f"error: {message}" if self.layout.rank == 0 else 1)
        self.say(
            f"before the first step, the models' losses of a token differ by {difference:.2g} (allowed: {allowed:.2g})"
        )

    def _profile(self, measured: MeasuredModel) -> None:
        """Profile a step of TAPE and one of RoPE: print the longest kernels, and write a trace next to the record."""
        if measured.name not in ENCODINGS or measured.name in self.profiled:
            return
        self.profiled.add(measured.name)
        with profile() as profiler:
            measured.step()
        order = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        self.say(profiler.key_averages().table(sort_by=order, row_limit=20))
        if self.record and (path := self.record.path):
            profiler.export_chrome_trace(str(path.with_name(f"{path.stem}-{measured.name}.trace.json.gz")))

    def _new_block(self, measured: MeasuredModel) -> dict:
        block = {
            "model": measured.name,
            **measured.description(),
            "seconds": [],
            "losses": [],
            "memory": {},
        }
        self.result["blocks"].append(block)
        return block

    def _summarize(self) -> None:
        """Calculate what the blocks so far say, and write it once parity has been checked."""
        models = {encoding: self.config(encoding).model for encoding in ENCODINGS}
        summarize(self.result, models | dict.fromkeys(self.rivals, models["rope"]))
        if self.record and "parity" in self.result:
            self.record.write(self.result)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).square().mean().sqrt().item()
