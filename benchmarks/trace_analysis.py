"""Analyze the Chrome trace of a profiled training step: where the GPU's time goes. Does not import
torch.

`analyze` sums the time of the GPU's kernels by class. The class of one of this project's kernels
follows from its file. Otherwise, it follows from the kernel's name or, for copies and elementwise
kernels, from the operations that enclose the launch. Kernels that no rule knows are of class
"other" and listed: add rules to `NAMES`.

The trace of a step without a GPU has no kernels. Operations that no others call stand for them.
"""

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "benchmark: step"
"""Name of the range around a step, from `torch.profiler.record_function`."""
PHASE = "benchmark: phase "
"""Prefix of the names of the ranges around the phases of a step; the phase's name follows."""
NO_PHASE = "outside of phases"
"""The phase of kernels that no range of a phase encloses."""
OPTIMIZER = "optimizer"
"""The phase and the class of the optimizer."""
OTHER = "other"
"""The class of kernels that no rule knows."""
MAX_LISTED = 25
"""Maximum number of kernels in each list of a record."""
MAX_CHARACTERS = 160
"""Characters of a kernel's name in these lists; names of templates are longer."""

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_USER_RANGE = "user_annotation"
_RANGE_CATEGORIES = ("cpu_op", _USER_RANGE)
# Such as cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx and hipModuleLaunchKernel.
_LAUNCH = re.compile(r"LaunchKernel|LaunchCooperativeKernel|GraphLaunch")
_COMMUNICATION = "communication"
_ACCUMULATION = "gradient accumulation"
_COPIES = "copies and casts"
_PRODUCTS = "matrix products"
_ELEMENTWISE = "other elementwise"


KERNELS = Path(__file__).parents[1] / "megatron_tape" / "ops" / "kernels"
"""The folder of this project's Triton kernels."""
CLASSES_BY_FILE = {
    "triton_attention": "attention",
    "triton_position_update": "position update",
    "triton_rotation": "rotation",
    "triton_split": "rotation",
    "triton_swiglu": "activation",
}
"""The class of the kernels in each file of `KERNELS`."""


def _rules(*rules: tuple[str, str], flags: int = 0) -> tuple[tuple[str, re.Pattern], ...]:
    """Return pairs of a class and the compiled pattern of its names."""
    return tuple((kind, re.compile(pattern, flags)) for kind, pattern in rules)


# The first pattern that is found in a kernel's name decides. Names that begin with aten:: are those
# of operations, in traces without a GPU.
NAMES = _rules(
    (_COMMUNICATION, r"nccl|rccl|gloo:|^c10d::"),
    # FlashAttention 2 to 4, cuDNN's kernels and torch's memory-efficient attention. Before the
    # matrix products, since FlashAttention-4's names contain "cutlass".
    (
        "attention",
        r"flash|fmha|sdpa|compute_dot_do_o|convert_dq_to_16bits|flex_attention"
        r"|scaled_dot_product",
    ),
    ("loss", r"liger|cross_entropy|nll_?loss|softmax"),
    # GammaBeta: the gradients of a norm's weights in torch.
    ("norms", r"(layer|rms)_?norm|GammaBeta"),
    (OPTIMIZER, r"multi_tensor_apply|adam"),
    (
        _PRODUCTS,
        r"gemm|gemv|nvjet|xmma|cutlass|splitk|wgmma|cublas|^cijk_|triton_tem_fused_(add)?(mm|bmm)"
        r"|^aten::(mm|addmm|bmm|baddbmm|addmm_|addbmm|mv|dot|matmul|linear)$",
    ),
    (
        _COPIES,
        r"^mem(cpy|set)|copy|CatArray|chunk_cat|FillFunctor|^aten::(cat|fill_|zero_|clone|to)$",
    ),
    (
        _ELEMENTWISE,
        r"elementwise|reduce_kernel|reduction|index|gather|scatter|embedding|compute_grad_weight"
        r"|scan|sort|^triton_(poi|red|per)_|distribution|^aten::",
    ),
    flags=re.IGNORECASE,
)

# For kernels that copy, or are elementwise, or that no rule above knows, and for matrix products
# within attention and the position update: patterns of the names of
# the enclosing operations, among them our autograd functions. The innermost operation that a
# pattern matches decides.
OPERATIONS = _rules(
    ("loss", r"_LinearCrossEntropy|cross_entropy|nll_loss|NllLoss|log_softmax|LogSoftmax"),
    ("position update", r"_(Compact)?Update(Backward)?$"),
    ("rotation", r"_RotatedAndJoined|_Split(Backward)?$|_Phases|_WithModulus"),
    ("attention", r"[aA]ttention|FlashAttn"),
    ("activation", r"SwiGLU"),
    ("norms", r"rms_norm|layer_norm|RmsNorm|RMSNorm|LayerNorm"),
    (_ACCUMULATION, r"AccumulateGrad"),
)

CLASSES = (
    "attention",
    "position update",
    "rotation",
    _PRODUCTS,
    "norms",
    "activation",
    "loss",
    _ACCUMULATION,
    OPTIMIZER,
    _COMMUNICATION,
    _COPIES,
    _ELEMENTWISE,
    OTHER,
)
"""All classes, in the order of tables."""


@dataclass(frozen=True)
class Event:
    """An event of a trace with a duration. Times are in microseconds."""

    category: str
    name: str
    start: float
    end: float
    thread: tuple[Any, Any]
    """Process and thread; on a GPU, device and stream."""
    correlation: int | None
    """A number that a kernel shares with its launch."""

    @classmethod
    def parse(cls, event: dict) -> "Event":
        """Return an event of a Chrome trace whose `ph` is X."""
        start = float(event["ts"])
        return cls(
            category=event.get("cat", ""),
            name=event["name"],
            start=start,
            end=start + float(event["dur"]),
            thread=(event.get("pid"), event.get("tid")),
            correlation=event.get("args", {}).get("correlation"),
        )

    @property
    def duration(self) -> float:
        """Microseconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True)
class Kernel:
    """A kernel, with the event that launched it and what encloses the launch."""

    event: Event
    launch: Event
    """The kernel itself if the trace has no launch."""
    phase: str
    enclosing: list[str]
    """Names of the ranges and operations that enclose the launch, the innermost one last."""

    @functools.cached_property
    def kind(self) -> str:
        """The kernel's class."""
        return kernel_class(self.event.name, self.phase, self.enclosing)


def analyze(trace: dict, on_gpu: bool = True) -> dict:
    """Return where the time of a step goes, as JSON data. `trace` is a Chrome trace of
    `torch.profiler` with one step in the range `STEP`. Unless `on_gpu`, operations stand for
    kernels.

    Times are in seconds:
        seconds: duration of the profiled step
        busy_seconds: time in which at least one kernel ran
        idle_seconds: time without kernels, by the phase whose next kernel the GPU waited for, and
            at the end of the step
        seconds_by_class: sum of the durations of the kernels, by class
        kernels, launches: their numbers, which differ with CUDA graphs and copies
        launch_seconds, launch_median_seconds: mean and median time of the host for a launch; the
            mean includes waiting while the GPU's queue is full
        launch_gap_seconds: median time of the host between a launch and the next one
        largest_kernels: name, class, seconds and number of the kernels with the largest time
        unknown_kernels: those of class "other", if any

    Raises ValueError if the trace has no range `STEP` or no kernels.
    """
    events = [Event.parse(event) for event in trace["traceEvents"] if event.get("ph") == "X"]
    # A GPU's trace also has the range around the step's kernels.
    ranges = (event for event in events if event.category == _USER_RANGE)
    step = next((event for event in ranges if event.name == STEP), None)
    if step is None:
        raise ValueError(f"the trace has no range {STEP!r}")

    if on_gpu:
        executed = [event for event in events if event.category in _GPU_CATEGORIES]
    else:
        executed = _outermost_operations(events)
    kernels = [kernel for kernel in _kernels(executed, events) if _is_within(kernel.launch, step)]
    if not kernels:
        raise ValueError("the trace of the step has no kernels")
    kernels.sort(key=lambda kernel: kernel.event.start)

    by_class: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_class[kernel.kind] += kernel.event.duration
    idle = _idle_by_phase(kernels, step)
    listed = _listed_kernels(kernels)
    unknown = [entry for entry in listed if entry["class"] == OTHER]
    return {
        "seconds": _seconds(step.duration),
        "busy_seconds": _seconds(step.duration - sum(idle.values())),
        "idle_seconds": {phase: _seconds(time) for phase, time in idle.items()},
        "seconds_by_class": {
            kind: _seconds(by_class[kind]) for kind in CLASSES if kind in by_class
        },
        "kernels": len(kernels),
        **_launch_statistics(kernels),
        "largest_kernels": listed[:MAX_LISTED],
        "unknown_kernels": unknown[:MAX_LISTED],
    }


def class_differences(ours: dict, others: dict) -> dict[str, float]:
    """Return the seconds of each class in the record `ours`, minus those in `others`. Both are of
    `analyze`.
    """
    our_seconds = ours["seconds_by_class"]
    other_seconds = others["seconds_by_class"]
    return {
        kind: our_seconds.get(kind, 0.0) - other_seconds.get(kind, 0.0)
        for kind in CLASSES
        if kind in our_seconds or kind in other_seconds
    }


def kernel_class(name: str, phase: str = NO_PHASE, enclosing: Iterable[str] = ()) -> str:
    """Return the class of a kernel, one of `CLASSES`.

    `phase` is the phase of the step, and `enclosing` has the names of the operations that enclose
    its launch, the innermost one last.
    """
    kind = own_kernels().get(name) or _first_match(NAMES, name)
    if kind == _COMMUNICATION:
        return kind
    # The optimizer's kernels are mostly elementwise: norms, casts and fills of all weights.
    if phase == OPTIMIZER:
        return OPTIMIZER
    # Small gradients are added together by a kernel for many tensors, as in an optimizer.
    if kind == OPTIMIZER and phase != NO_PHASE:
        return _ACCUMULATION
    if kind not in (_COPIES, _ELEMENTWISE, _PRODUCTS, None):
        return kind

    for operation in reversed(list(enclosing)):
        specific = _first_match(OPERATIONS, operation)
        # Other products, such as those of the output layer, are a class of their own.
        if kind == _PRODUCTS and specific not in ("attention", "position update"):
            continue
        if specific is not None:
            return specific
    return kind or OTHER


@functools.cache
def own_kernels() -> dict[str, str]:
    """Return the class of each of this project's Triton kernels by the kernel's name, that of its
    function.
    """
    classes = {}
    for file, kind in CLASSES_BY_FILE.items():
        source = (KERNELS / f"{file}.py").read_text(encoding="utf-8")
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+)\(", source, re.MULTILINE):
            classes[name] = kind
    return classes


def _first_match(rules: tuple[tuple[str, re.Pattern], ...], name: str) -> str | None:
    """Return the class of the first rule whose pattern is found in `name`, or None."""
    for kind, pattern in rules:
        if pattern.search(name):
            return kind
    return None


def _kernels(executed: list[Event], events: list[Event]) -> Iterator[Kernel]:
    """Yield the kernels `executed`, with their launches among the `events` of the trace."""
    launches = {}
    for event in events:
        if event.category in _LAUNCH_CATEGORIES and event.correlation is not None:
            launches[event.correlation] = event

    ranges = [event for event in events if event.category in _RANGE_CATEGORIES]
    phases = [event for event in ranges if event.name.startswith(PHASE)]
    pairs = [(event, launches.get(event.correlation, event)) for event in executed]
    enclosing = _enclosing_names([launch for _, launch in pairs], ranges)
    for event, launch in pairs:
        yield Kernel(event, launch, _phase_of(launch, phases), enclosing[launch])


def _outermost_operations(events: list[Event]) -> list[Event]:
    """Return the operations of torch's library that no other of its operations calls."""
    outermost = []
    operations = [event for event in events if event.name.startswith("aten::")]
    for thread_operations in _by_thread(operations).values():
        # The end of the last outermost operation; those that it calls start before.
        end = float("-inf")
        for operation in thread_operations:
            if operation.start >= end:
                outermost.append(operation)
                end = operation.end
    return outermost


def _by_thread(events: list[Event]) -> dict[tuple, list[Event]]:
    """Return the events of each thread in the order of their starts; of two that start at the same
    time, the longer one is first.
    """
    threads = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        threads[event.thread].append(event)
    return threads


def _enclosing_names(launches: list[Event], ranges: list[Event]) -> dict[Event, list[str]]:
    """Return the names of the ranges on the same thread that enclose each launch, the innermost
    one last.
    """
    names = {}
    ranges_by_thread = _by_thread(ranges)
    for thread, thread_launches in _by_thread(launches).items():
        upcoming = iter(ranges_by_thread.get(thread, []))
        following = next(upcoming, None)
        # Ranges that have started and may not have ended, the innermost one last.
        started: list[Event] = []
        for launch in thread_launches:
            while following is not None and following.start <= launch.start:
                started = [each for each in started if each.end > following.start]
                started.append(following)
                following = next(upcoming, None)
            names[launch] = [each.name for each in started if each.end > launch.start]
    return names


def _phase_of(launch: Event, phases: list[Event]) -> str:
    """Return the innermost phase at the time of a launch. Autograd launches on other threads than
    the one that the phases are on.
    """
    current = [phase for phase in phases if _is_within(launch, phase)]
    if not current:
        return NO_PHASE
    innermost = max(current, key=lambda phase: phase.start)
    return innermost.name.removeprefix(PHASE)


def _is_within(event: Event, outer: Event) -> bool:
    """Return whether an event starts while `outer` lasts."""
    return outer.start <= event.start < outer.end


def _idle_by_phase(kernels: list[Kernel], step: Event) -> dict[str, float]:
    """Return the microseconds of a step without kernels, by the phase of the kernel that follows.

    `kernels` are in the order of their starts.
    """
    idle: defaultdict[str, float] = defaultdict(float)
    # The time until which the GPU is busy with the kernels so far.
    busy_until = step.start
    for kernel in kernels:
        idle[kernel.phase] += max(0.0, kernel.event.start - busy_until)
        busy_until = max(busy_until, kernel.event.end)
    idle["end of step"] = max(0.0, step.end - busy_until)
    return dict(idle)


def _listed_kernels(kernels: list[Kernel]) -> list[dict]:
    """Return name, class, total seconds and number of all kernels, the largest time first.

    A name may be listed several times, since elementwise kernels belong to several classes.
    """
    durations = defaultdict(list)
    for kernel in kernels:
        durations[kernel.event.name, kernel.kind].append(kernel.event.duration)
    listed = [
        {
            "name": name[:MAX_CHARACTERS],
            "class": kind,
            "seconds": _seconds(sum(times)),
            "number": len(times),
        }
        for (name, kind), times in durations.items()
    ]
    return sorted(listed, key=lambda entry: -entry["seconds"])


def _launch_statistics(kernels: list[Kernel]) -> dict:
    """Return the number of launches and the host's times for them, those of `analyze`."""
    # A set, since all kernels of a CUDA graph have one launch. Copies have other calls than
    # launches, and operations on a CPU have none.
    launches = {
        kernel.launch
        for kernel in kernels
        if kernel.event.category not in _GPU_CATEGORIES or _LAUNCH.search(kernel.launch.name)
    }
    in_order = sorted(launches, key=lambda launch: launch.start)
    gaps = [
        max(0.0, following.start - launch.end) for launch, following in zip(in_order, in_order[1:])
    ]
    if not gaps:
        return {"launches": len(launches)}
    durations = [launch.duration for launch in in_order]
    return {
        "launches": len(launches),
        "launch_seconds": _seconds(statistics.mean(durations)),
        "launch_median_seconds": _seconds(statistics.median(durations)),
        "launch_gap_seconds": _seconds(statistics.median(gaps)),
    }


def _seconds(microseconds: float) -> float:
    """Return seconds, rounded to nanoseconds, which traces have."""
    return round(microseconds / 1e6, 9)
