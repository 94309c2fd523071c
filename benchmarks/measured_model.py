"""The models that benchmarks train on random tokens: their sizes, their memory, and timed optimizer
steps.
"""

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import profile, record_function, schedule

from benchmarks import trace_analysis
from benchmarks.timing import synchronized_time
from megatron_tape.checks.combinations import validate
from megatron_tape.config.data import DataConfig
from megatron_tape.config.schema import (
    DeepSpeedConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    replace_settings,
)
from megatron_tape.config.train import TrainConfig
from megatron_tape.model.backend import verified_kernels
from megatron_tape.model.initialization import initialize_weights, weight_initializations
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.model.layers import CoreAttention
from megatron_tape.model.names import kind_of
from megatron_tape.ops.activation_checkpointing import _RecordedCall
from megatron_tape.ops.backends import rows
from megatron_tape.ops.position_update import fused_update
from megatron_tape.parallel.layout import ParallelLayout, seed_everything
from megatron_tape.parallel.partitions import allocate
from megatron_tape.planning.memory import memory
from megatron_tape.planning.plan import Plan
from megatron_tape.position import model_config
from megatron_tape.training.engine import Engine

ENCODINGS = ("rope", "tape")
"""The encodings that `benchmarks.train_step` compares."""
MAX_LOSS_ERROR = 1e-4
"""Maximum of `rms_difference` of two models' token losses in fp32, in nats."""
LEARNING_RATE = 1e-4
COMPARED_TOKENS = 1024
"""Tokens at the beginning of a sequence whose losses are compared; later tokens do not affect these
losses.
"""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of one data-parallel rank's batch."""

    layers: int
    heads: int
    head_dim: int
    seq_length: int
    vocab_size: int
    micro_batch: int
    accumulate: int
    """Micro-batches per step."""
    ffn: int | None = None
    """Inner width of the MLP; None: four times the hidden size."""
    position_mlp: int | None = None
    """Inner width of TAPE's position MLP; None: four times the heads."""

    @property
    def batch(self) -> str:
        """The micro-batch size and the number of micro-batches per step, such as 32x4."""
        return f"{self.micro_batch}x{self.accumulate}"


# The first five sizes are layers, heads, head dimension, sequence length and vocabulary size.
SHAPES = {
    # pretrain/recipes/tape_155m.yaml: 163 M parameters, 131,072 tokens per GPU and step on the
    # recipe's four GPUs.
    "155m-1k": Shape(
        12, 12, 64, 1024, 32000, micro_batch=32, accumulate=4, ffn=3072, position_mlp=48
    ),
    # Llama-like: 1.345 G parameters with RoPE, 1.348 G with TAPE.
    "1.3b-4k": Shape(24, 16, 128, 4096, 32000, micro_batch=4, accumulate=4, ffn=5504),
    # 8 of Llama 2 7B's 32 layers: 1.881 G parameters with RoPE, 1.885 G with TAPE. 7 of the 8
    # layers rewrite TAPE's state; in the whole model 31 of 32 do.
    "7b-8k": Shape(8, 32, 128, 8192, 32000, micro_batch=1, accumulate=4, ffn=11008),
    "cpu": Shape(12, 12, 64, 1024, 4096, micro_batch=1, accumulate=1),
    "toy": Shape(2, 4, 32, 32, 128, micro_batch=2, accumulate=2),
}


def run_config(
    encoding: str,
    shape: Shape,
    precision: str,
    world_size: int = 1,
    tensor_parallel: int = 1,
    zero_stage: int = 1,
    recompute: str = "none",
    backend: str = "auto",
) -> RunConfig:
    """Return the configuration of a run that trains a model of `shape`. Raises ConfigError if it is
    invalid.

    `precision` is fp32 or bf16, `world_size` the number of processes, `tensor_parallel` that of
    tensor-parallel ranks, and `backend` the one of attention. `zero_stage` and `recompute` are
    settings of the sections `deepspeed` and `train`.
    """
    width = shape.heads * shape.head_dim
    # Number of data-parallel ranks; `validate` refuses a world_size that is too small.
    data_size = max(1, world_size // tensor_parallel)
    position = {"mlp_size": shape.position_mlp} if encoding == "tape" else {}
    config = RunConfig(
        model=model_config(
            {
                "position_encoding": encoding,
                "position": position,
                "num_layers": shape.layers,
                "hidden_size": width,
                "ffn_hidden_size": shape.ffn or 4 * width,
                "num_attention_heads": shape.heads,
                "seq_length": shape.seq_length,
                "vocab_size": shape.vocab_size,
                "attention_backend": backend,
            }
        ),
        data=DataConfig(prefix="random tokens"),  # a stand-in; no data is read
        optimizer=OptimizerConfig(weight_decay=0.01),
        parallel=ParallelConfig(tensor_model_parallel_size=tensor_parallel),
        deepspeed=DeepSpeedConfig(zero_stage=zero_stage),
        train=TrainConfig(
            steps=1000,
            micro_batch_size=shape.micro_batch,
            global_batch_size=shape.micro_batch * shape.accumulate * data_size,
            precision=precision,
            recompute=recompute,
        ),
    )
    validate(config, world_size)
    return config


@dataclass
class Step:
    """The duration and the loss of one optimizer step."""

    seconds: float
    loss: float


class MeasuredModel:
    """A model with its optimizer, and the micro-batches that every step trains on.

    `first_losses` are the token losses at initialization. Afterwards, noise is added to the
    encoding's parameters. `attention_error` is the root mean square difference of the token losses
    from those with naive attention, in nats.
    """

    def __init__(self, config: RunConfig, layout: ParallelLayout, backend: str):
        self.config = config
        self.layout = layout
        self.backend = backend
        self.name = config.model.position_encoding
        dtype = dtype_of(config)
        # Megatron's configuration does not contain the attention backend.
        settings = dataclasses.replace(config.model, attention_backend=backend)
        megatron_config = transformer_config(
            config.model,
            config.parallel.tensor_model_parallel_size,
            config.parallel.uses_sequence_parallel,
            dtype,
        )

        seed_everything(config.train.seed)
        self.fused = verified_kernels(settings, layout, dtype)
        self.model = LanguageModel(
            settings,
            megatron_config,
            layout.groups,
            layout.device,
            recompute=config.train.recompute,
            fused=self.fused,
        )
        allocate(self.model, layout.device)
        initialize_weights(
            self.model,
            weight_initializations(settings),
            config.train.seed,
            layout.tensor_parallel_rank,
            layout.tensor_parallel_size,
        )
        self.batches = random_batches(config, layout)

        # At initialization, TAPE equals RoPE. Only with noise does an error of its attention show.
        self.first_losses = self._token_losses()
        self._perturb_encoding()
        perturbed_losses = self._token_losses()
        self._set_attention_backend("naive")
        self.attention_error = rms_difference(perturbed_losses, self._token_losses())
        self._set_attention_backend(backend)

        self.engine = Engine(self.model, config, layout)

    def step(self) -> Step:
        """Take one optimizer step on all micro-batches. Raises RuntimeError if the loss or the
        gradient is not finite.
        """
        started = synchronized_time(self.layout.device)
        result = self.engine.train_step(self.batches, LEARNING_RATE)
        elapsed = synchronized_time(self.layout.device) - started
        if result.skipped:
            raise RuntimeError(f"a step was skipped: {result}")
        return Step(elapsed, result.loss)

    def profiled_step(self) -> profile:
        """Take two steps and return the profiler of the second one. Its trace has the ranges of
        `trace_analysis`: the step and its phases.
        """
        clock = self.engine.clock
        original_phase = clock.phase

        @contextmanager
        def recorded_phase(name: str) -> Iterator[None]:
            """Record a phase of the step as a range of the trace, in addition to its time."""
            with record_function(f"{trace_analysis.PHASE}{name}"), original_phase(name):
                yield

        # The first step with a profiler is slower, so it is not recorded.
        steps = schedule(wait=0, warmup=1, active=1)
        with (
            mock.patch.object(clock, "phase", recorded_phase),
            profile(schedule=steps) as profiler,
        ):
            self.step()
            profiler.step()
            with record_function(trace_analysis.STEP):
                self.step()
        return profiler

    def _set_attention_backend(self, backend: str) -> None:
        """Let all layers use `backend` from now on."""
        for module in self.model.modules():
            if isinstance(module, CoreAttention):
                module.backend = backend

    def description(self) -> dict[str, str]:
        """Return the implementations of attention, the loss and, for TAPE, the position update."""
        loss = "liger" if self.fused.loss else "plain torch"
        names = {"attention": self.backend, "loss": loss}
        if self.model.updating_encodings():
            is_fused = self.model.encoding.update_function() is fused_update
            names["position_update"] = "triton" if is_fused else "plain torch"
        return names

    def activation_bytes(self) -> int:
        """Return the bytes of activations that a micro-batch saves for the backward pass."""
        return activation_bytes(self.model, functools.partial(self.model, **self.batches[0]))

    def memory(self) -> dict[str, int]:
        """Return the measured peaks (see `peaks`) and the peak that planning.memory estimates, as
        `estimated_peak`, in bytes.
        """
        # The estimate depends on the backend that `auto` has chosen.
        config = replace_settings(
            self.config, {"model.attention_backend": self.model.attention_backend}
        )
        estimated = memory(Plan(config, self.layout.world_size))
        state_bytes = estimated.weights + estimated.gradients + estimated.optimizer
        return self.peaks(state_bytes) | {"estimated_peak": estimated.peak}

    def peaks(self, state_bytes: int) -> dict[str, int]:
        """Return the measured peaks of memory in bytes, as `peak` and, on a GPU, `reserved`.

        On a GPU, they are the peaks of torch's allocator since the last reset. On a CPU, the peak
        is `state_bytes`, of weights, gradients and optimizer state, plus the saved activations.
        """
        if self.layout.device.type == "cuda":
            return {
                "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        return {"peak": state_bytes + self.activation_bytes()}

    def release(self) -> None:
        """Free the memory of the model and its optimizer, which cannot be used afterwards."""
        # DeepSpeed's hooks would otherwise keep the model alive.
        self.engine.deepspeed_engine.destroy()
        del self.engine, self.batches, self.model
        free_memory()

    @torch.no_grad()
    def _token_losses(self) -> Tensor:
        """Return the losses (COMPARED_TOKENS,) of the first tokens of one sequence, in fp32 on the
        CPU.
        """
        tokens = self.batches[0]["tokens"][:1, :COMPARED_TOKENS]
        labels = self.batches[0]["labels"][0, :COMPARED_TOKENS]
        self.model.eval()
        logits = self.model(tokens)[0].float()
        self.model.train()
        return F.cross_entropy(logits, labels, reduction="none").cpu()

    @torch.no_grad()
    def _perturb_encoding(self) -> None:
        """Add noise to the encoding's parameters, since TAPE's zero matrices would hide errors."""
        generator = torch.Generator().manual_seed(1)
        for name, parameter in self.model.named_parameters():
            if kind_of(name) == "position":
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.add_(noise.to(parameter.device, parameter.dtype))


def activation_bytes(model: torch.nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the bytes that `forward()` saves for the backward pass, not counting the model's
    weights.
    """
    # The addresses of the weights' memory, and the bytes of saved memory by address. Several
    # operations may save the same memory, or views of it, which must count once.
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved_bytes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and return what it saves instead."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        # Detached: an operation that saves its own result would otherwise create a reference cycle.
        return tensor.detach()

    def pack_recorded_call(call: _RecordedCall, saved: Tensor) -> Tensor | int:
        """Count a tensor that activation checkpointing saves. Such tensors do not reach the
        autograd hooks below.
        """
        packed = original_pack(call, saved)
        # A tensor that is recomputed is replaced by an index, which takes no memory.
        if isinstance(packed, int):
            return packed
        return pack(packed)

    def checkpoint_and_count(block: Callable, *arguments: Any, **options: Any) -> Tensor:
        """Count the tensors that a block of rows keeps until it is recomputed: the variables of its
        closure.
        """
        # Without gradients, nothing is recomputed, so nothing is kept.
        cells = block.__closure__ if torch.is_grad_enabled() else ()
        for cell in cells:
            contents = cell.cell_contents
            tensors = contents if isinstance(contents, tuple) else (contents,)
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    pack(tensor)
        return original_checkpoint(block, *arguments, **options)

    original_pack = _RecordedCall._pack
    original_checkpoint = rows.checkpoint
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with (
        hooks,
        mock.patch.object(_RecordedCall, "_pack", pack_recorded_call),
        mock.patch.object(rows, "checkpoint", checkpoint_and_count),
    ):
        # The result keeps the graph alive, so that no address is used twice.
        loss = forward()
    del loss
    return sum(saved_bytes.values())


def rms_difference(a: Tensor, b: Tensor) -> float:
    """Return the root mean square difference of two tensors."""
    return (a - b).square().mean().sqrt().item()


def free_memory() -> None:
    """Free the memory of deleted models: collect reference cycles, and empty torch's cache of GPU
    memory.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype in which the configuration's model computes."""
    if config.train.precision == "bf16":
        return torch.bfloat16
    return torch.float32


def random_batches(config: RunConfig, layout: ParallelLayout) -> list[dict[str, Tensor]]:
    """Return a step's micro-batches of random tokens and labels (B, S); they depend only on the
    data-parallel rank.
    """
    model = config.model
    train = config.train
    generator = torch.Generator().manual_seed(layout.data_parallel_rank)
    count = train.global_batch_size // (train.micro_batch_size * layout.data_parallel_size)
    # One more token, since labels are the next tokens.
    shape = (train.micro_batch_size, model.seq_length + 1)
    batches = []
    for _ in range(count):
        ids = torch.randint(model.vocab_size, shape, generator=generator).to(layout.device)
        batches.append({"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    return batches
