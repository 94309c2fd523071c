"""Compare training steps of TAPE with RoPE in the same engine, and with Llama and GPTModel of other
libraries.

    python -m benchmarks.train_step [--layers 4] [--tokens 4096]
    python -m benchmarks.train_step --shape 1.3b-4k --profile --output step.json
    torchrun --nproc-per-node 8 -m benchmarks.train_step --shape 1.3b-4k [--tensor-parallel 2]

A step is `Engine.train_step`, as in training: all micro-batches, averaging over ranks, clipping,
Adam. Data loading is excluded; every step trains on the same random tokens. With one process,
models of the same sizes from transformers and Megatron-core (benchmarks/baselines.py) train on the
same tokens; `--against` selects them. On a CPU, the steps of all models alternate, and a ratio is
the median over paired steps. On a GPU, models are measured one after another. If RoPE and TAPE have
different losses at initialization, no figure is reported.

Model FLOPs are those of `planning.flops.flops_per_token`: matrix products forward and backward,
causal attention as half of all pairs, no recomputation. TAPE's include averaging the state and the
position update. MFU is model FLOP/s per GPU divided by the data sheet's bf16 peak
(megatron_tape/planning/hardware.py). `mfu_of_rope_flops` is RoPE's FLOPs in TAPE's time: it counts
TAPE's additional work as overhead. `of_matmul` is the rate divided by that of a large matrix
product on the same machine.

On a GPU, memory is torch's peak of allocated memory, listed with the estimated peak. On a CPU it is
the sum of weights, gradients, Adam's moments and saved activations.
"""

import argparse
import dataclasses
import importlib.util
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.profiler import profile

from benchmarks.baselines import BASELINES, Baseline
from benchmarks.environment import Record, add_record_arguments, quiet_libraries
from benchmarks.measured_model import (
    ENCODINGS,
    MAX_LOSS_ERROR,
    SHAPES,
    MeasuredModel,
    Shape,
    dtype_of,
    run_config,
)
from benchmarks.tables import step_table
from benchmarks.timing import matmul_peak, reason
from megatron_tape import command_line
from megatron_tape.command_line import whole_number
from megatron_tape.config.schema import ATTENTION_BACKENDS, RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.model.backend import verified_backend
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
    if bool(arguments.against) and world_size > 1:
        raise ConfigError(
            "--against", f"needs a single process, but {world_size} were started", "remove it"
        )
    sizes = {"world_size": world_size, "tensor_parallel": arguments.tensor_parallel}
    options = {
        "zero_stage": arguments.zero_stage,
        "recompute": arguments.recompute,
        "backend": arguments.backend,
    }
    configs = {
        name: run_config(name, shape, arguments.precision, **sizes, **options) for name in ENCODINGS
    }
    quiet_libraries(rank)
    if arguments.tensor_parallel > 1:
        os.environ.setdefault(
            "CUDA_DEVICE_MAX_CONNECTIONS", "1"
        )  # Megatron needs it to overlap collectives
    layout = initialize_distributed(arguments.tensor_parallel)
    try:
        result = Comparison(arguments, shape, configs, layout).run()
        layout.any_rank(
            False
        )  # wait for all ranks: one that exits closes connections that others use
    except BaseException:
        abort_process_groups()
        raise
    if rank == 0:
        print("\n".join(step_table({arguments.shape: result})))
        print(f"TAPE / RoPE: time {result['ratio_time']:.3f}, memory {result['ratio_memory']:.3f}")
        if "fastest_rival" in result:
            ratios = ", ".join(
                f"{name} {ratio:.3f}" for name, ratio in result["ratios_to_fastest_rival"].items()
            )
            print(f"time, as a multiple of {result['fastest_rival']}'s: {ratios}", flush=True)


class Comparison:
    """Measures all models at one shape. It runs on every rank; rank 0 prints and writes the
    record.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        shape: Shape,
        configs: dict[str, RunConfig],
        layout: ParallelLayout,
    ):
        self.arguments = arguments
        self.configs = configs
        self.layout = layout
        self.on_gpu = layout.device.type == "cuda"
        self.record = Record(arguments) if layout.rank == 0 else None
        gpu = torch.cuda.get_device_name(layout.device) if self.on_gpu else None
        peak = peak_flops(gpu) if gpu and arguments.precision == "bf16" else None
        self.first_losses: dict[str, Tensor] = {}
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

    def run(self) -> dict:
        """Measure all models and return the results. Raises ConfigError if RoPE and TAPE differ
        (`_check_parity`).
        """
        self.log(f"large matrix product: {self.result['matmul_flops'] / 1e12:.2f} TFLOP/s")
        baselines = [name for name in self.baselines() if self._can_train(name)]
        # On a GPU, TAPE comes first because it needs the most memory.
        if self.on_gpu:
            groups = [(name,) for name in ("tape", "rope", *baselines)]
        else:
            groups = [(*ENCODINGS, *baselines)]
        for group in groups:
            with ExitStack() as stack:
                models = {name: stack.enter_context(self._built(name)) for name in group}
                if self.first_losses.keys() >= set(ENCODINGS) and "parity" not in self.result:
                    self._check_parity()
                self._measure(models)
        return self.result

    def baselines(self) -> list[str]:
        """Return the baselines of --against; by default those that are installed, or none with
        several processes.
        """
        if self.arguments.against is not None:
            return self.arguments.against
        if self.layout.world_size == 1:
            return [name for name in BASELINES if importlib.util.find_spec(name)]
        return []

    def log(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.layout.rank == 0:
            print(text, flush=True)

    def _measure(self, models: dict[str, MeasuredModel]) -> None:
        """Time steps of these models, which alternate, and add the results."""
        warmup = self.arguments.warmup
        total = warmup + self.arguments.repetitions
        steps: dict[str, list] = {name: [] for name in models}
        for repetition in range(total):
            if repetition == warmup and self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            for name, measured in models.items():
                steps[name].append(measured.step())
            taken = ", ".join(f"{name} {done[-1].seconds:.4f} s" for name, done in steps.items())
            self.log(f"step {repetition + 1} of {total}: {taken}")
        for name, measured in models.items():
            counted = steps[name][warmup:]
            model = measured.config.model
            seconds = statistics.median(step.seconds for step in counted)
            speed = self._speed(flops_per_token(model), seconds)
            self.result["models"][name] = {
                **measured.description(),
                **speed,
                "seconds": [step.seconds for step in counted],
                "losses": [step.loss for step in counted],
                "memory": measured.memory(),
                "parameters": parameter_count(model),
            }
        self._compare()
        if self.arguments.profile:
            for measured in models.values():
                self._profile(measured)

    def _speed(self, flops: int, seconds: float) -> dict:
        """Return the speed of a model with `flops` model FLOPs per token and steps of `seconds`."""
        tokens = self.result["run"]["tokens_per_step"] / seconds
        rate = flops * tokens / self.layout.world_size
        peak = self.result["peak_flops"]
        mfu = rate / peak if peak else None
        return {
            "seconds_per_step": seconds,
            "tokens_per_second": tokens,
            "tflops": rate / 1e12,
            "mfu": mfu,
            "of_matmul": rate / self.result["matmul_flops"],
            "flops_per_token": flops,
        }

    def _compare(self) -> None:
        """Add the ratios between the models measured so far, and write the record once parity has
        been checked.
        """
        models = self.result["models"]
        if models.keys() >= set(ENCODINGS):
            rope = models["rope"]
            tape = models["tape"]
            tape["mfu_of_rope_flops"] = None
            if tape["mfu"]:
                flops_ratio = rope["flops_per_token"] / tape["flops_per_token"]
                tape["mfu_of_rope_flops"] = tape["mfu"] * flops_ratio
            self.result["ratio_time"] = self._ratio("tape", "rope")
            self.result["ratio_memory"] = tape["memory"]["peak"] / rope["memory"]["peak"]
        if baselines := [name for name in models if name not in ENCODINGS]:
            fastest = min(baselines, key=lambda name: models[name]["seconds_per_step"])
            self.result["fastest_rival"] = fastest
            self.result["ratios_to_fastest_rival"] = {
                name: self._ratio(name, fastest) for name in models
            }
        if self.record and "parity" in self.result:
            self.record.write(self.result)

    def _ratio(self, name: str, other: str) -> float:
        """Return the ratio of two models' step times. On a CPU, it is the median over pairs of
        alternating steps.
        """
        ours, others = (self.result["models"][each] for each in (name, other))
        if self.on_gpu:
            return ours["seconds_per_step"] / others["seconds_per_step"]
        return statistics.median(a / b for a, b in zip(ours["seconds"], others["seconds"]))

    def _can_train(self, baseline: str) -> bool:
        """Return whether a baseline can take a step; if not, record the reason."""
        try:
            with self._built(baseline) as measured:
                measured.step()
        except Exception as error:  # an error in a library, or out of memory
            self.result.setdefault("rejected_rivals", {})[baseline] = reason(error)
            self.log(f"warning: {baseline} is not measured: {reason(error)}")
            return False
        return True

    @contextmanager
    def _built(self, name: str) -> Iterator[MeasuredModel]:
        """Yield a new model, and free its memory after the block."""
        started = time.perf_counter()
        if name in ENCODINGS:
            config = self.configs[name]
            backend = verified_backend(config.model, self.layout, dtype_of(config), allow_slow=True)
            measured = MeasuredModel(config, self.layout, backend)
            self.first_losses[name] = measured.first_losses
            if name == "rope":
                self.plain_losses = measured.plain_losses
        else:
            measured = Baseline(name, self.configs["rope"], self.layout)
        seconds = time.perf_counter() - started
        self.log(
            f"{name}: {parameter_count(measured.config.model):,} parameters, built in"
            f" {seconds:.1f} s"
        )
        try:
            yield measured
        finally:
            measured.release()

    def _check_parity(self) -> None:
        """Raise ConfigError if RoPE and TAPE have different losses at initialization, where TAPE's
        matrices are zero.

        In bf16 they may differ by twice RoPE's rounding error, which is its difference from naive
        attention.
        """
        rope, tape = (self.first_losses[encoding] for encoding in ENCODINGS)
        difference = _distance(tape, rope)
        if self.arguments.precision == "fp32":
            allowed = MAX_LOSS_ERROR
        else:
            allowed = 2 * _distance(self.plain_losses, rope)
        self.result["parity"] = {"difference": difference, "allowed": allowed}
        problem = (
            f"of RoPE and TAPE differ by {difference:.2g} before the first step (allowed:"
            f" {allowed:.2g})"
        )
        if not difference <= allowed:
            raise ConfigError("token losses", f"{problem}, so nothing is measured")
        self.log(f"token losses {problem}")

    def _profile(self, measured: MeasuredModel) -> None:
        """Profile a step of TAPE or RoPE: print the slowest operations, and write a trace next to
        the record.
        """
        if measured.name not in ENCODINGS:
            return
        with profile() as profiler:
            measured.step()
        if self.on_gpu:
            order = "self_device_time_total"
        else:
            order = "self_cpu_time_total"
        self.log(profiler.key_averages().table(sort_by=order, row_limit=20))
        if self.record and (path := self.record.path):
            profiler.export_chrome_trace(
                str(path.with_name(f"{path.stem}-{measured.name}.trace.json.gz"))
            )


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Shape]:
    """Parse the command line. Return the options, and the shape that they describe."""
    on_gpu = torch.cuda.is_available()
    parser = command_line.Parser(prog="python -m benchmarks.train_step", description=__doc__)
    add = parser.add_argument
    shape = "155m-1k" if on_gpu else "cpu"
    add(
        "--shape", choices=SHAPES, default=shape, help="model and batch (default here: %(default)s)"
    )
    add("--layers", type=whole_number, metavar="N", help="number of layers (default: the shape's)")
    add("--tokens", type=whole_number, metavar="N", help="sequence length (default: the shape's)")
    add(
        "--micro-batch",
        type=whole_number,
        metavar="N",
        help="sequences per micro-batch (default: the shape's)",
    )
    add(
        "--accumulate",
        type=whole_number,
        metavar="N",
        help="micro-batches per step and rank (default: the shape's)",
    )
    precision = "bf16" if on_gpu else "fp32"
    add(
        "--precision", choices=("bf16", "fp32"), default=precision, help="default here: %(default)s"
    )
    add("--zero-stage", type=int, choices=(1, 2, 3), default=1, help="default: %(default)s")
    add(
        "--recompute",
        choices=("none", "selective", "full"),
        default="none",
        help="default: %(default)s",
    )
    add("--tensor-parallel", type=whole_number, default=1, metavar="T", help="default: %(default)s")
    add(
        "--backend",
        choices=ATTENTION_BACKENDS,
        default="auto",
        help="attention backend (default: %(default)s)",
    )
    against = f"baselines to measure: any of {', '.join(BASELINES)} (default: those installed)"
    add("--against", nargs="*", choices=BASELINES, metavar="NAME", help=against)
    add(
        "--warmup",
        type=whole_number,
        default=2,
        metavar="N",
        help="warm-up steps (default: %(default)s)",
    )
    repetitions = "timed steps per model (default: %(default)s)"
    add("--repetitions", type=whole_number, default=7, metavar="N", help=repetitions)
    profiled = "profile a step of TAPE and RoPE; with --output, write traces next to its file"
    add("--profile", action="store_true", help=profiled)
    add_record_arguments(parser)
    arguments = parser.parse_args(argv)
    sizes = {"layers": arguments.layers, "seq_length": arguments.tokens}
    sizes |= {"micro_batch": arguments.micro_batch, "accumulate": arguments.accumulate}
    return arguments, dataclasses.replace(
        SHAPES[arguments.shape], **{k: size for k, size in sizes.items() if size}
    )


if __name__ == "__main__":
    command_line.run(main)
