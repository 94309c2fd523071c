"""One profiled training step: its time by part of the model, its most expensive kernels, and a trace of it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measured_model import MeasuredModel, surrounded

KERNELS = 20
"""How many kernels are listed."""
PARTS = ("attention", "projections", "position update", "MLP", "norms", "embedding", "logits and loss", "optimizer")
REST = "other"
"""Residual additions, gradients that are added up and averaged, and what belongs to no part."""


def profiled(measured: MeasuredModel, trace: Path | None) -> dict:
    """Profile one step; write a Chrome trace, compressed with gzip, if `trace` is given.

    Returns the seconds by part of the model, forward and backward together, and the most expensive kernels (on a CPU:
    operators) with their seconds and calls. Profiling slows a step down; a GPU's kernels take as long as without.
    """
    on_gpu = measured.layout.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with surrounded(_places(measured)), profile(activities=activities) as profiler:
        seconds = measured.step().seconds
    result = {"seconds": seconds, "by_part": by_part(profiler.events(), on_gpu)}
    result["kernels"] = _kernels(profiler.key_averages(), on_gpu)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
        result["trace"] = trace.name
    return result


def _places(measured: MeasuredModel) -> Iterator[tuple[Any, str, AbstractContextManager]]:
    def place(owner: Any, method: str, part: str):
        return owner, method, lambda: record_function(part)

    gpt = measured.model.gpt
    for layer in gpt.decoder.layers:
        yield place(layer.self_attention, "forward", "projections")
        yield place(layer.self_attention.core_attention, "forward", "attention")
        yield place(layer.mlp, "forward", "MLP")
        yield place(layer.position, "forward", "position update")
        yield place(layer.position, "enter", "position update")
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            yield place(norm, "forward", "norms")
    yield place(gpt.decoder.final_layernorm, "forward", "norms")
    yield place(gpt.embedding, "forward", "embedding")
    yield place(gpt.output_layer, "forward", "logits and loss")
    yield place(measured.engine.deepspeed_engine, "step", "optimizer")


def by_part(events: list, on_gpu: bool) -> dict[str, float]:
    """Add up the seconds of each part: of GPU kernels by the operator that launched them, otherwise of operators.

    An operator belongs to the innermost part that it runs in. One that runs backward belongs to the part of the forward
    operator with the same sequence number, which autograd counts in every thread.
    """
    forward: dict[tuple[int, int], str] = {}
    parts: dict[int, str | None] = {}

    def part_of(event: Any) -> str | None:
        if id(event) not in parts:
            if event.name in PARTS:
                found = event.name
            elif event.fwd_thread and event.sequence_nr >= 0:
                found = forward.get((event.fwd_thread, event.sequence_nr))
            else:
                found = None if event.cpu_parent is None else part_of(event.cpu_parent)
            parts[id(event)] = found
        return parts[id(event)]

    seconds: Counter[str] = Counter(dict.fromkeys((*PARTS, REST), 0.0))
    for event in sorted((e for e in events if e.device_type == DeviceType.CPU), key=lambda e: e.time_range.start):
        part = part_of(event)
        if part is not None and event.sequence_nr >= 0 and not event.fwd_thread:
            forward[event.thread, event.sequence_nr] = part
        taken = sum(kernel.duration for kernel in event.kernels) if on_gpu else event.self_cpu_time_total
        seconds[part or REST] += taken / 1e6
    if on_gpu:
        launched = sum(e.time_range.elapsed_us() for e in events if _is_kernel(e)) / 1e6
        seconds[REST] = launched - sum(seconds[part] for part in PARTS)
    return dict(seconds)


def _kernels(averages: Any, on_gpu: bool) -> list[dict]:
    wanted = [x for x in averages if (_is_kernel(x) if on_gpu else x.key not in PARTS)]
    taken = (lambda x: x.self_device_time_total) if on_gpu else (lambda x: x.self_cpu_time_total)
    longest = sorted(wanted, key=taken, reverse=True)[:KERNELS]
    return [{"name": x.key[:200], "seconds": taken(x) / 1e6, "calls": x.count} for x in longest]


def _is_kernel(event: Any) -> bool:
    """Return whether this is a kernel, a copy or a fill on a GPU, and not the shadow of a range of the host."""
    if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
        return False
    name = getattr(event, "name", None) or event.key
    return name not in PARTS and not name.startswith("Optimizer.")
