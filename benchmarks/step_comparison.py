"""RoPE's and TAPE's steps side by side: in which order they are taken, that they may be compared, and the results."""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.environment import recorder, settings
from benchmarks.measured_model import MeasuredModel, Step, candidates, dtype_of, free_memory, training_backend
from benchmarks.shapes import ENCODINGS, Shape, run_config
from benchmarks.step_profile import profiled
from benchmarks.step_results import PHASES, peak_flops, summarize
from benchmarks.timing import matmul_peak, reason
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.planning.memory import memory
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.planning.plan import Plan

BLOCKS = ("rope", "tape", "tape", "rope")
"""A steady drift changes both medians alike, and TAPE is built only once."""
EQUAL = 1e-4
"""Largest difference between the models' losses of a token in fp32, as root mean square in nats."""
ROOM = 1.2
"""How much more memory than the estimate a GPU should have: for its context, NCCL and fragmentation."""
TRIED = 3
"""Measured steps of each backend that RoPE tries."""


class Comparison:
    """All measurements of one shape. Every rank creates one; rank 0 prints and writes the record."""

    def __init__(self, arguments: argparse.Namespace, shape: Shape, layout: ParallelLayout):
        self.arguments, self.shape, self.layout = arguments, shape, layout
        self.on_gpu = layout.device.type == "cuda"
        self.record = recorder("train_step", arguments) if layout.rank == 0 else None
        self.result: dict = {}
        self.too_large: list[dict] = []
        self.gpu = torch.cuda.get_device_name(layout.device) if self.on_gpu else None
        self.peak = peak_flops(self.gpu) if self.on_gpu and arguments.precision == "bf16" else None

    def run(self) -> dict:
        """Measure, with smaller micro-batches if memory runs out; return the results. Raises ConfigError."""
        self.matmul = matmul_peak(dtype_of(self.config("rope")), self.layout.device)
        self.say(f"a large matrix product: {self.matmul / 1e12:.2f} TFLOP/s")
        self.fit_estimate()
        while True:
            self._begin()
            try:
                self._alternate() if self.arguments.order == "alternate" else self._blocks()
                break
            except torch.OutOfMemoryError as error:
                why = reason(error)
            if self.layout.world_size > 1:
                # The other ranks may be waiting for this one anywhere.
                raise ConfigError("--micro-batch", self._out_of_memory(why), "start again with a smaller one")
            self._halve(self._out_of_memory(why))
        if self.arguments.profile:
            self._profile()
        self.layout.any_rank(False)  # a rank that ends closes connections that others may still be using
        return self.result

    def config(self, encoding: str) -> RunConfig:
        """Return the run that is measured with `encoding`."""
        return run_config(encoding, self.shape, self.layout.world_size, self.arguments)

    def say(self, text: str) -> None:
        """Print a line of progress on rank 0."""
        if self.layout.rank == 0:
            print(text, flush=True)

    def fit_estimate(self) -> None:
        """Make micro-batches smaller until the estimate of memory fits the GPU."""
        if not self.on_gpu:
            return
        total = torch.cuda.get_device_properties(self.layout.device).total_memory
        while self.shape.micro_batch > 1:
            needed = max(memory(Plan(self.config(name), self.layout.world_size)).peak for name in ENCODINGS)
            if ROOM * needed <= total:
                return
            gib = f"{needed / 2**30:.1f} GiB estimated, and the GPU has {total / 2**30:.1f} GiB"
            self._halve(f"of {self.shape.micro_batch} is too large: {gib}")

    def _out_of_memory(self, why: str) -> str:
        return f"of {self.shape.micro_batch} is too large: memory ran out ({why})"

    def _halve(self, why: str) -> None:
        """Train on the same sequences in smaller micro-batches; ConfigError if they already are as small as can be."""
        before, sequences = self.shape.micro_batch, self.shape.micro_batch * self.shape.accumulate
        if before == 1:
            fix = "try --recompute selective or full, fewer --layers or a shorter --seq-length"
            raise ConfigError("--micro-batch", why, fix)
        size = next(size for size in range(before // 2, 0, -1) if sequences % size == 0)
        self.too_large.append({"micro_batch": before, "why": why})
        self.shape = dataclasses.replace(self.shape, micro_batch=size, accumulate=sequences // size)
        self.say(f"micro-batches of {size} for both, as one {why}")
        free_memory()

    def _begin(self) -> None:
        self.first_losses: dict[str, torch.Tensor] = {}
        self.backends: dict[str, str] = {}
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
                "too_large": self.too_large,
            },
            "peak_flops": self.peak,
            "matmul_flops": self.matmul,
            "encodings": {},
            "blocks": [],
        }

    def _alternate(self) -> None:
        """Take steps of both models in turn."""
        self._choose_backend()
        with self._built("rope") as rope, self._built("tape") as tape:
            self._check_parity()
            models = {"rope": rope, "tape": tape}
            blocks = {name: self._new_block(measured) for name, measured in models.items()}
            warmup, total = self.arguments.warmup, self.arguments.warmup + self.arguments.repetitions
            for repetition in range(total):
                for name, measured in models.items():
                    step = measured.step()
                    if repetition >= warmup:
                        _add(blocks[name], step)
                self.say(f"{repetition + 1} of {total} pairs of steps")
                if repetition >= warmup:
                    self._summarize()
            for name, measured in models.items():
                blocks[name]["memory"] = measured.memory()
            self._summarize()

    def _blocks(self) -> None:
        """Take several steps of one model after the other, of which only one exists at a time."""
        with self._built("tape") as tape:  # which needs more memory: it runs out here, if at all
            tape.step()
        self._choose_backend()
        for encoding, group in itertools.groupby(BLOCKS):
            with self._built(encoding) as measured:
                if not self.result["blocks"]:
                    self._check_parity()
                for _ in group:
                    self._block(measured)

    def _block(self, measured: MeasuredModel) -> None:
        arguments = self.arguments
        block = self._new_block(measured)
        for _ in range(arguments.warmup):
            measured.step()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for repetition in range(arguments.repetitions):
            _add(block, measured.step())
            if repetition >= 2 and self._any(time.perf_counter() - started > arguments.block_seconds):
                break
        block["memory"] = measured.memory()
        self._summarize()
        seconds = statistics.median(block["seconds"])
        number = len(self.result["blocks"])
        self.say(
            f"block {number} of {len(BLOCKS)}: {block['encoding']}, {len(block['seconds'])} steps of {seconds:.4f} s"
        )

    @contextmanager
    def _built(self, encoding: str, backend: str | None = None) -> Iterator[MeasuredModel]:
        """Build a model; when the block ends, free its memory."""
        started, config = time.perf_counter(), self.config(encoding)
        measured = MeasuredModel(config, self.layout, backend or self._backend(encoding, config))
        self.first_losses[encoding] = measured.first_losses
        if encoding == "rope":
            self.plain_losses = measured.plain_losses
        seconds = time.perf_counter() - started
        self.say(f"{encoding}: {parameter_count(config.model):,} parameters, built in {seconds:.1f} s")
        try:
            yield measured
        finally:
            measured.release()

    def _backend(self, encoding: str, config: RunConfig) -> str:
        if encoding not in self.backends:
            self.backends[encoding], why = training_backend(config.model, self.layout, dtype_of(config))
            if why:
                self.result["fell_back"] = why
                self.say(f"WARNING: {encoding} is measured with {self.backends[encoding]}: {why}")
        return self.backends[encoding]

    def _choose_backend(self) -> None:
        """Let RoPE attend with the fastest backend, if that was asked for."""
        if self.arguments.rope_backend != "fastest":
            return
        config = self.config("rope")
        untried, rejected = candidates(config.model, self.layout, dtype_of(config))
        seconds: dict[str, float] = {}
        while untried:
            try:
                with self._built("rope", name := untried[0]) as rope:
                    for name in untried:
                        rope.use(name)
                        taken = [rope.step().seconds for _ in range(1 + TRIED)][1:]
                        seconds[name] = self._slowest(statistics.median(taken))
            except Exception as error:  # the engine may be left in the middle of a step
                rejected[name] = reason(error)
                self.say(f"RoPE cannot attend with {name}: {rejected[name]}")
                if not seconds and name == untried[-1]:
                    raise
            untried = [name for name in untried if name not in seconds and name not in rejected]
        self.result["rope_backends"] = {"seconds_per_step": seconds, "rejected": rejected}
        self.backends["rope"] = min(seconds, key=seconds.__getitem__)
        compared = ", ".join(f"{name} {taken:.4f} s" for name, taken in seconds.items())
        self.say(f"RoPE attends with {self.backends['rope']}, the fastest here: {compared}")

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

    def _any(self, flag: bool) -> bool:
        return self.layout.any_rank(flag) if self.layout.world_size > 1 else flag

    def _slowest(self, seconds: float) -> float:
        """Return the longest time of all ranks, so that they choose alike."""
        value = torch.tensor(seconds, dtype=torch.float64, device=self.layout.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()

    def _profile(self) -> None:
        found = self.result["profile"] = {}
        for encoding in reversed(ENCODINGS):
            path = self.record and self.record.path
            trace = path.with_name(f"{path.stem}-{encoding}.trace.json.gz") if path else None
            try:
                with self._built(encoding) as measured:
                    measured.step()
                    measured.step()
                    found[encoding] = profiled(measured, trace)
            except Exception as error:  # what was measured stays
                found[encoding] = {"failed": reason(error)}
            self._write()

    def _new_block(self, measured: MeasuredModel) -> dict:
        block = {
            "encoding": measured.config.model.position_encoding,
            **measured.description(),
            "seconds": [],
            "phases": {phase: [] for phase in PHASES},
            "losses": [],
            "memory": {},
        }
        self.result["blocks"].append(block)
        return block

    def _summarize(self) -> None:
        """Calculate what the blocks so far say, and write it."""
        summarize(self.result, {encoding: self.config(encoding).model for encoding in ENCODINGS})
        self._write()

    def _write(self) -> None:
        if self.record:
            order = ("ratio_time", "ratio_memory", "encodings")
            first = {key: self.result[key] for key in order if key in self.result}
            self.record.write({**first, **self.result, "arguments": settings(self.arguments)})


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


def _add(block: dict, step: Step) -> None:
    block["seconds"].append(step.seconds)
    block["losses"].append(step.loss)
    for phase, seconds in step.phases.items():
        block["phases"][phase].append(seconds)
