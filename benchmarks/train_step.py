"""Compare training steps of TAPE with RoPE in the same engine, and with transformers' Llama.

    python -m benchmarks.train_step [--layers 4] [--tokens 4096]
    python -m benchmarks.train_step --shape 1.3b-4k --profile --output step.json
    torchrun --nproc-per-node 8 -m benchmarks.train_step --shape 1.3b-4k [--tensor-parallel 2]

A step is `Engine.train_step`, as in training: all micro-batches, averaging over ranks, clipping,
Adam. Data loading is excluded; every step trains on the same random tokens. With one process, a
Llama of the same sizes (benchmarks/baselines.py) trains on the same tokens, unless `--against` is
empty. On a CPU, the steps of all models alternate, and a ratio is the median over paired steps. On
a GPU, models are measured one after another. If RoPE and TAPE have different losses at
initialization, no figure is reported.

Model FLOPs are those of `planning.flops.flops_per_token`: matrix products forward and backward,
causal attention as half of all pairs, no recomputation. TAPE's include averaging the state and the
position update. MFU is model FLOP/s per GPU divided by the data sheet's bf16 peak
(megatron_tape/planning/hardware.py). `mfu_of_rope_flops` is RoPE's FLOPs in TAPE's time: it counts
TAPE's additional work as overhead. `of_matmul` is the rate divided by that of a large matrix
product on the same machine.

On a GPU, memory is torch's peak of allocated memory, listed with the estimated peak. On a CPU it is
the sum of weights, gradients, Adam's moments and saved activations.

With --profile, the record has the GPU's time by class of kernels, its idle time by phase and the
host's time for launches, in one step of each model of this project (benchmarks/trace_analysis.py).
A profiler slows down the host, so the GPU is idle for longer. Without a profiler, its idle time is
that of a timed step minus the busy time.
"""

import argparse
import dataclasses
import gzip
import importlib.util
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import profile

from benchmarks import trace_analysis
from benchmarks.baselines import BASELINE, COMPILED, Baseline
from benchmarks.environment import Record, add_record_arguments, quiet_libraries
from benchmarks.measured_model import (
    ENCODINGS,
    MAX_LOSS_ERROR,
    SHAPES,
    MeasuredModel,
    Shape,
    Step,
    dtype_of,
    free_memory,
    rms_difference,
    run_config,
)
from benchmarks.tables import kernel_table, profile_table, results_by_batch, step_table
from benchmarks.timing import describe_error, matmul_peak, median_ratio
from megatron_tape import command_line
from megatron_tape.command_line import whole_number
from megatron_tape.config.schema import ATTENTION_BACKENDS, RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.model.backend import verified_backend
from megatron_tape.ops.backends.choice import unsupported
from megatron_tape.parallel.launcher import rank_and_size
from megatron_tape.parallel.layout import (
    ParallelLayout,
    abort_process_groups,
    initialize_distributed,
)
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.hardware import peak_flops
from megatron_tape.planning.parameters import parameter_count


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write the record to the file that --output names."""
    arguments, shape = parse(argv)
    rank, world_size = rank_and_size()
    if arguments.against and world_size > 1:
        raise ConfigError(
            "--against", f"needs a single process, but {world_size} were started", "remove it"
        )

    shapes = [shape]
    for micro_batch, accumulate in arguments.more_batches:
        changed = dataclasses.replace(shape, micro_batch=micro_batch, accumulate=accumulate)
        shapes.append(changed)
    # Before there is a process group, since a configuration may be refused.
    configs = [configurations(arguments, each, world_size) for each in shapes]

    quiet_libraries(rank)
    if arguments.tensor_parallel > 1:
        # Megatron needs it to overlap collectives.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    layout = initialize_distributed(arguments.tensor_parallel)
    try:
        result = measure(arguments, shapes, configs, layout)
        # Only to wait for all ranks, since a rank that exits closes connections that others use.
        layout.any_rank(False)
    except BaseException:
        abort_process_groups()
        raise

    if rank == 0:
        print_tables(arguments.shape, result)


def configurations(
    arguments: argparse.Namespace, shape: Shape, world_size: int
) -> dict[str, RunConfig]:
    """Return the configurations of all models of this project by the model's name: the encodings,
    and RoPE with each backend of --rope-backends, such as `rope flash_attn`.
    """
    backends = dict.fromkeys(ENCODINGS, arguments.backend)
    for backend in arguments.rope_backends:
        backends[f"rope {backend}"] = backend
    configs = {}
    for name, backend in backends.items():
        # A name begins with that of the encoding.
        encoding = name.split()[0]
        configs[name] = run_config(
            encoding,
            shape,
            arguments.precision,
            world_size,
            arguments.tensor_parallel,
            arguments.zero_stage,
            arguments.recompute,
            backend,
        )
    return configs


def measure(
    arguments: argparse.Namespace,
    shapes: list[Shape],
    configs: list[dict[str, RunConfig]],
    layout: ParallelLayout,
) -> dict:
    """Measure the first shape, and then those of --more-batches. Return the result of the first
    shape, which contains those of the others as `batches`.

    `configs` has the configurations of each shape (see `configurations`). The result of a batch
    that does not fit into memory has an `error`.
    """
    record = Record(arguments) if layout.rank == 0 else None
    traces = None
    if record and record.path:
        traces = record.path.with_suffix("")
    result: dict = {}

    def write() -> None:
        """Write all results so far, on rank 0."""
        if record:
            record.write(result)

    first = Comparison(arguments, shapes[0], configs[0], layout, write, traces)
    # Assigned before the run, during which `write` writes it.
    result = first.result
    first.run()

    # Further batches compare only TAPE and RoPE: the rivals have been measured with the first one.
    without_rivals = argparse.Namespace(**vars(arguments) | {"against": []})
    for shape, shape_configs in zip(shapes[1:], configs[1:]):
        encodings = {name: shape_configs[name] for name in ENCODINGS}
        batch_traces = None
        if traces:
            batch_traces = traces.with_name(f"{traces.name}-{shape.batch}")
        comparison = Comparison(without_rivals, shape, encodings, layout, write, batch_traces)
        comparison.log(f"micro-batch size x micro-batches: {shape.batch}")
        batches = result.setdefault("batches", {})
        batches[shape.batch] = comparison.result
        try:
            comparison.run()
        except torch.OutOfMemoryError as error:
            # If this rank went on to the next batch, the others would wait for it.
            if layout.world_size > 1:
                raise
            comparison.result["error"] = describe_error(error)
            comparison.log(comparison.result["error"])
        free_memory()
        write()

    # Last, because compiling takes longest.
    if arguments.compile_baseline:
        first.measure_compiled()
    return result


def print_tables(label: str, result: dict) -> None:
    """Print the tables and ratios of a result of `measure`. `label` names the shape."""
    results = results_by_batch(label, result)
    print("\n".join(step_table(results)))
    for each_label, each in results.items():
        if "profiles" in each:
            print("", *profile_table(each_label, each), sep="\n")
    print(f"TAPE / RoPE: time {result['ratio_time']:.3f}, memory {result['ratio_memory']:.3f}")
    # The ratios to the baseline, if it was measured.
    for name, ratio in result.get("ratios_to_fastest_rival", {}).items():
        print(f"{name} / {BASELINE}: time {ratio:.3f}", flush=True)


class Comparison:
    """Measures all models at one shape. It runs on every rank; rank 0 prints and writes the
    record.

    Args:
        configs: configurations of this project's models by name (see `configurations`).
        write: writes the record, after `result` has changed.
        traces: beginning of the paths of traces; None: traces are not kept.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        shape: Shape,
        configs: dict[str, RunConfig],
        layout: ParallelLayout,
        write: Callable[[], None],
        traces: Path | None,
    ):
        self.arguments = arguments
        self.configs = configs
        self.layout = layout
        self.write = write
        self.traces = traces
        self.on_gpu = layout.device.type == "cuda"
        self.first_losses: dict[str, Tensor] = {}
        self.attention_errors: dict[str, float] = {}

        gpu = None
        peak = None
        if self.on_gpu:
            gpu = torch.cuda.get_device_name(layout.device)
            # The peaks of `peak_flops` are those of bf16.
            if arguments.precision == "bf16":
                peak = peak_flops(gpu)
        self.result: dict = {
            "shape": {"name": arguments.shape, **dataclasses.asdict(shape)},
            "run": {
                "precision": arguments.precision,
                "zero_stage": arguments.zero_stage,
                "recompute": arguments.recompute,
                "processes": layout.world_size,
                "tensor_parallel": layout.tensor_parallel_size,
                "device": gpu or "cpu",
                "tokens_per_step": configs["rope"].train.global_batch_size * shape.seq_length,
            },
            "peak_flops": peak,
            "matmul_flops": matmul_peak(dtype_of(configs["rope"]), layout.device),
            "models": {},
        }

    def run(self) -> None:
        """Measure all models. Raises ConfigError if RoPE and TAPE differ (`_check_parity`)."""
        self.log(f"large matrix product: {self.result['matmul_flops'] / 1e12:.2f} TFLOP/s")
        rivals = self._rivals()
        if self.on_gpu:
            # One after another, since a GPU may hold only one model. TAPE comes first because it
            # needs the most memory.
            for name in ("tape", "rope"):
                self._measure_together([name])
            # If `auto` has chosen a backend of --rope-backends, this model has been measured.
            measured_already = f"rope {self.result['models']['rope']['attention']}"
            for name in rivals:
                if name != measured_already:
                    self._measure_rival(name)
            return
        # Steps of all models alternate, so a model that cannot take a step is left out before.
        names = [*ENCODINGS, *(name for name in rivals if self._can_step(name))]
        self._measure_together(names)

    def measure_compiled(self) -> None:
        """Measure the baseline compiled by torch.compile, if its package is installed."""
        if importlib.util.find_spec(BASELINE):
            self._measure_rival(COMPILED)

    def _rivals(self) -> list[str]:
        """Return the names of the models to compare with: RoPE with other backends that can run
        here, and the baseline.
        """
        rivals = []
        for name in self.configs:
            if name in ENCODINGS:
                continue
            config = self.configs[name]
            problem = unsupported(
                config.model.attention_backend,
                self.layout.device,
                dtype_of(config),
                config.model.head_dim,
            )
            if problem:
                self.log(f"{name} is not measured: the backend {problem}")
            else:
                rivals.append(name)

        # The list that follows --against, which has the baseline or nothing. It is None if the
        # option is not given.
        is_requested = self.arguments.against
        # By default, a single process measures the baseline if the package BASELINE is installed.
        if is_requested is None:
            is_requested = self.layout.world_size == 1 and importlib.util.find_spec(BASELINE)
        if is_requested:
            rivals.append(BASELINE)
        return rivals

    def _can_step(self, name: str) -> bool:
        """Return whether a rival can take a step. If it cannot, record the reason."""
        try:
            with self._build_model(name) as measured:
                measured.step()
        except Exception as error:  # an error in a library, or out of memory
            self._reject(name, error)
            return False
        return True

    def _measure_rival(self, name: str) -> None:
        """Measure a rival alone. If it fails, record the reason."""
        try:
            self._measure_together([name])
        except Exception as error:  # an error in a library, or out of memory
            self._reject(name, error)
            self.write()
        free_memory()

    def _reject(self, name: str, error: Exception) -> None:
        """Record why a rival is not measured."""
        problem = describe_error(error)
        self.result.setdefault("rejected_rivals", {})[name] = problem
        self.log(f"warning: {name} is not measured: {problem}")

    def _measure_together(self, names: list[str]) -> None:
        """Build these models, and measure steps that alternate between them."""
        with ExitStack() as stack:
            models = {name: stack.enter_context(self._build_model(name)) for name in names}
            # Once, as soon as RoPE and TAPE have both been built.
            if len(self.first_losses) == len(ENCODINGS) and "parity" not in self.result:
                self._check_parity()
            self._measure(models)

    def log(self, text: str) -> None:
        """Print `text` on rank 0."""
        if self.layout.rank == 0:
            print(text, flush=True)

    def _measure(self, models: dict[str, MeasuredModel]) -> None:
        """Time steps of these models, which alternate, and add the results to the record."""
        warmup = self.arguments.warmup
        total = warmup + self.arguments.repetitions
        steps: dict[str, list] = {name: [] for name in models}
        for repetition in range(total):
            # The recorded peak of memory is that of the timed steps.
            if repetition == warmup and self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            for name, measured in models.items():
                steps[name].append(measured.step())
            times = ", ".join(f"{name} {done[-1].seconds:.4f} s" for name, done in steps.items())
            self.log(f"step {repetition + 1} of {total}: {times}")
        for name, measured in models.items():
            self._add_result(measured, steps[name][warmup:])
        self._add_ratios()
        # Last, because a profiler slows down steps.
        if self.arguments.profile:
            for measured in models.values():
                self._profile(measured)

    def _add_result(self, measured: MeasuredModel, steps: list[Step]) -> None:
        """Add the speed and the memory of a model to the results. `steps` are its timed steps."""
        model = measured.config.model
        flops = flops_per_token(model)
        seconds = statistics.median(step.seconds for step in steps)
        tokens_per_second = self.result["run"]["tokens_per_step"] / seconds
        # Per GPU.
        flops_per_second = flops * tokens_per_second / self.layout.world_size
        peak = self.result["peak_flops"]
        self.result["models"][measured.name] = {
            **measured.description(),
            "seconds_per_step": seconds,
            "tokens_per_second": tokens_per_second,
            "tflops": flops_per_second / 1e12,
            # None if the peak is not known.
            "mfu": peak and flops_per_second / peak,
            "of_matmul": flops_per_second / self.result["matmul_flops"],
            "flops_per_token": flops,
            "seconds": [step.seconds for step in steps],
            "losses": [step.loss for step in steps],
            "memory": measured.memory(),
            "parameters": parameter_count(model),
        }

    def _add_ratios(self) -> None:
        """Add the ratios between the models measured so far. Write the record if parity has been
        checked.
        """
        models = self.result["models"]
        if {"rope", "tape"} <= models.keys():
            rope = models["rope"]
            tape = models["tape"]
            tape["mfu_of_rope_flops"] = None
            if tape["mfu"]:
                flops_ratio = rope["flops_per_token"] / tape["flops_per_token"]
                tape["mfu_of_rope_flops"] = tape["mfu"] * flops_ratio
            self.result["ratio_time"] = self._time_ratio("tape", "rope")
            self.result["ratio_memory"] = tape["memory"]["peak"] / rope["memory"]["peak"]
        if BASELINE in models:
            # The keys are those of older records, which had several baselines.
            self.result["fastest_rival"] = BASELINE
            self.result["ratios_to_fastest_rival"] = {
                name: self._time_ratio(name, BASELINE) for name in models
            }
        if "parity" in self.result:
            self.write()

    def _time_ratio(self, name: str, other: str) -> float:
        """Return the step time of the model `name` divided by that of the model `other`. On a CPU,
        it is the median over pairs of alternating steps.
        """
        ours, others = (self.result["models"][each] for each in (name, other))
        if self.on_gpu:
            return ours["seconds_per_step"] / others["seconds_per_step"]
        return median_ratio(ours["seconds"], others["seconds"])

    @contextmanager
    def _build_model(self, name: str) -> Iterator[MeasuredModel]:
        """Yield a new model and free its memory after the block. `name` is a key of `configs`, or
        that of the baseline, `BASELINE` or `COMPILED`.

        Keeps the losses of RoPE and TAPE for `_check_parity`.
        """
        started = time.perf_counter()
        if name in self.configs:
            config = self.configs[name]
            backend = verified_backend(config.model, self.layout, dtype_of(config), allow_slow=True)
            measured = MeasuredModel(config, self.layout, backend)
            # Its name so far is that of its encoding; the name of a rival also has the backend.
            measured.name = name
            if name in ENCODINGS:
                self.first_losses[name] = measured.first_losses
                self.attention_errors[name] = measured.attention_error
        else:
            measured = Baseline(self.configs["rope"], self.layout, compiled=name == COMPILED)
        seconds = time.perf_counter() - started
        self.log(
            f"{name}: {parameter_count(measured.config.model):,} parameters in {seconds:.1f} s"
        )
        try:
            yield measured
        finally:
            measured.release()

    def _check_parity(self) -> None:
        """Raise ConfigError if RoPE and TAPE have different losses at initialization, where TAPE's
        matrices are zero.

        In bf16 they may differ by twice RoPE's rounding error. Its estimate is the difference of
        RoPE's losses from those with naive attention.
        """
        rope, tape = (self.first_losses[encoding] for encoding in ENCODINGS)
        difference = rms_difference(tape, rope)
        allowed = MAX_LOSS_ERROR
        if self.arguments.precision == "bf16":
            allowed = 2 * self.attention_errors["rope"]
        self.result["parity"] = {"difference": difference, "allowed": allowed}
        difference_text = f"of RoPE and TAPE differ by {difference:.2g} before the first step"
        # Not `>`, which is false for NaN.
        if not difference <= allowed:
            raise ConfigError(
                "token losses",
                f"{difference_text}, not at most {allowed:.2g}, so nothing is measured",
            )
        self.log(f"token losses {difference_text} (allowed: {allowed:.2g})")

    def _profile(self, measured: MeasuredModel) -> None:
        """Profile a step: add the analysis to the results, print the kernels that took the most
        time, and keep the trace if there is a record. Do nothing for the baseline.

        If this fails, record the reason, so that other models are still measured.
        """
        if measured.name not in self.configs:
            return
        try:
            profiler = measured.profiled_step()
            if self.layout.rank == 0:
                self._analyze(measured.name, profiler)
        except Exception as error:
            self.result.setdefault("failed_profiles", {})[measured.name] = describe_error(error)
        if "parity" in self.result:
            self.write()

    def _analyze(self, name: str, profiler: profile) -> None:
        """Add the analysis of a profiled step to the results."""
        with tempfile.TemporaryDirectory() as folder:
            prefix = self.traces or Path(folder) / "step"
            file_name = f"{prefix.name}-{name.replace(' ', '-')}.trace.json.gz"
            path = prefix.with_name(file_name)
            profiler.export_chrome_trace(str(path))
            with gzip.open(path) as file:
                trace = json.load(file)

        profiles = self.result.setdefault("profiles", {})
        profiles[name] = trace_analysis.analyze(trace, self.on_gpu)
        self.log("\n".join(kernel_table(profiles[name])))
        if {"rope", "tape"} <= profiles.keys():
            differences = trace_analysis.class_differences(profiles["tape"], profiles["rope"])
            self.result["profile_differences"] = differences


def batch_of(text: str) -> tuple[int, int]:
    """Parse a micro-batch size and a number of micro-batches per step and rank, such as 64x2."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is not a batch such as 64x2")
    return int(match[1]), int(match[2])


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Shape]:
    """Parse the command line, or `argv` if it is not None. Return the options, and the shape that
    they describe.
    """
    on_gpu = torch.cuda.is_available()
    parser = command_line.Parser(prog="python -m benchmarks.train_step", description=__doc__)
    default = "default: %(default)s"
    add = parser.add_argument
    shape = "155m-1k" if on_gpu else "cpu"
    add("--shape", choices=SHAPES, default=shape, help=f"model and batch ({default})")
    for option, meaning in (
        ("layers", "number of layers"),
        ("tokens", "sequence length"),
        ("micro-batch", "sequences per micro-batch"),
        ("accumulate", "micro-batches per step and rank"),
    ):
        described = f"{meaning} (default: the shape's)"
        add(f"--{option}", type=whole_number, metavar="N", help=described)
    precision = "bf16" if on_gpu else "fp32"
    add("--precision", choices=("bf16", "fp32"), default=precision, help=default)
    add("--zero-stage", type=int, choices=(1, 2, 3), default=1, help=default)
    add("--recompute", choices=("none", "selective", "full"), default="none", help=default)
    add("--tensor-parallel", type=whole_number, default=1, metavar="T", help=default)
    add("--backend", choices=ATTENTION_BACKENDS, default="auto", help=f"of attention; {default}")
    against = f"measure {BASELINE}' Llama, or nothing but TAPE and RoPE (default: if installed)"
    add("--against", nargs="*", choices=[BASELINE], metavar="NAME", help=against)
    add("--warmup", type=whole_number, default=2, metavar="N", help=f"warm-up steps ({default})")
    repetitions = f"timed steps per model ({default})"
    add("--repetitions", type=whole_number, default=7, metavar="N", help=repetitions)
    batches = "also measure TAPE and RoPE with these micro-batch sizes and micro-batches per step"
    add("--more-batches", nargs="+", type=batch_of, metavar="MxN", default=[], help=batches)
    backends = "also measure RoPE with these attention backends, where they can run"
    rope_backends = [name for name in ATTENTION_BACKENDS if name != "auto"]
    add(
        "--rope-backends",
        nargs="+",
        choices=rope_backends,
        metavar="NAME",
        default=[],
        help=backends,
    )
    compiled = f"also measure {BASELINE}' Llama with torch.compile, if it is installed"
    add("--compile-baseline", action="store_true", help=compiled)
    profiled = "profile a step of TAPE and RoPE; with --output, write traces next to its file"
    add("--profile", action="store_true", help=profiled)
    add_record_arguments(parser)
    arguments = parser.parse_args(argv)

    sizes = {
        "layers": arguments.layers,
        "seq_length": arguments.tokens,
        "micro_batch": arguments.micro_batch,
        "accumulate": arguments.accumulate,
    }
    changed = {name: size for name, size in sizes.items() if size}
    return arguments, dataclasses.replace(SHAPES[arguments.shape], **changed)


if __name__ == "__main__":
    command_line.run(main)
