"""How fast GPUs compute, and how they are linked: assumed from data sheets, or measured. Imports no torch.

A rate is what programs reach, not a peak. What is assumed of a peak is a round figure of what is usual for large
sizes; `python -m benchmarks.rates` measures the same rates where there are GPUs.
"""

import dataclasses
import re
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path

from typing_extensions import TypedDict

from megatron_tape.config.schema import is_positive
from megatron_tape.errors import FileError
from megatron_tape.io.records import read_record
from megatron_tape.ops.backends.table import BLACKWELL, HOPPER, OTHER_GPU
from megatron_tape.planning.communication import ALL_REDUCE, ALL_TO_ALL, BROADCAST, SEND


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU, and the links between many of them. Bandwidths are those of one GPU in one direction."""

    name: str
    generation: str
    """As the table of attention backends names it."""
    memory: float
    """GiB that a process can use."""
    peak: float
    """Dense bf16 FLOP/s of the data sheet, of which the MFU is a share."""
    matmul: float
    """FLOP/s of large matrix products in bf16."""
    attention: float
    """FLOP/s of attention in bf16, forward and backward together, by the fastest library for this kind."""
    state_attention: float
    """The same of our own kernel."""
    memory_bandwidth: float
    """Bytes/s that elementwise operations read and write."""
    intra_node_bandwidth: float
    """Bytes/s to GPUs of the same node."""
    inter_node_bandwidth: float
    """Bytes/s to GPUs of other nodes."""
    intra_node_latency: float = 3e-6
    """Seconds of one hop of a collective inside a node."""
    inter_node_latency: float = 1e-5
    """Seconds of one hop of a collective between nodes."""
    operation_start: float = 5e-6
    """Seconds that the host needs to start one operation."""
    node_size: int = 8
    """GPUs of a node."""
    measured: tuple[str, ...] = ()
    """The rates among these that were measured; the others are assumed."""


RATES = ("matmul", "attention", "state_attention", "memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth")
RATES += ("intra_node_latency", "inter_node_latency", "operation_start")
"""What can be measured."""
MATMUL, MEMORY_BANDWIDTH, INTRA_NODE, INTER_NODE = 0.65, 0.85, 0.8, 0.85
"""Assumed shares of a data sheet's figures that programs reach."""


# FLOP/s, bytes/s of memory and of NVLink (a direction is half of what is stated): NVIDIA's data sheets of the SXM
# modules. Between nodes: one 400 Gb/s adapter for each GPU, as in DGX H100, and 200 Gb/s, as in DGX A100. Attention:
# FlashAttention-3 (Shah et al., 2024) reports up to 740 TFLOP/s forward and 580 backward on H100, and FlashAttention-2
# (Dao, 2023) up to 225 in training on A100; shorter sequences and narrower heads reach less, and B200 is a guess. Our
# kernel has been measured nowhere. Its machine code for H100 suggests 380 to 450 TFLOP/s forward and 220 to 300
# backward; the middle of both, weighted by products, is 290. B200 is given a similar share of the library's rate, and
# A100, for which Triton's kernels come close to the libraries', a larger one.
KINDS = {
    name: Hardware(
        name,
        generation,
        memory,
        peak,
        MATMUL * peak,
        attention * peak,
        state_attention * peak,
        MEMORY_BANDWIDTH * memory_bandwidth,
        INTRA_NODE * intra_node,
        INTER_NODE * inter_node,
    )
    for name, generation, memory, peak, attention, state_attention, memory_bandwidth, intra_node, inter_node in (
        ("H100", HOPPER, 80, 989.4e12, 0.55, 0.29, 3.35e12, 450e9, 50e9),
        ("H200", HOPPER, 140, 989.4e12, 0.55, 0.29, 4.8e12, 450e9, 50e9),
        ("B200", BLACKWELL, 178, 2250e12, 0.45, 0.25, 7.7e12, 900e9, 50e9),
        ("A100-80GB", OTHER_GPU, 80, 312e12, 0.6, 0.5, 2.039e12, 300e9, 25e9),
        ("A100-40GB", OTHER_GPU, 40, 312e12, 0.6, 0.5, 1.555e12, 300e9, 25e9),
    )
}
"""Kinds of GPUs by name, for predictions."""
# Half of what is stated with sparsity: NVIDIA's data sheets of GH200, HGX B300 (36 PFLOP/s, 8 GPUs), GB200 NVL72 and
# GB300 NVL72 (360 PFLOP/s, 72 GPUs); AMD's of MI300X, without sparsity.
PEAKS = {name.split("-")[0]: kind.peak for name, kind in KINDS.items()} | {
    "GH200": 989.4e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "MI300X": 1307.4e12,
}
"""Dense bf16 FLOP/s by the part of a GPU's name that states its kind."""


def peak_flops(gpu: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU, given its name as CUDA states it; None if its kind is not known."""
    if re.search("MIG|PCIe|NVL", gpu):  # a part of a GPU, or a slower kind of the same name
        return None
    return next((peak for kind, peak in PEAKS.items() if _is(gpu, kind)), None)


def _is(gpu: str, kind: str) -> bool:
    """Return whether a GPU, named as CUDA states it, is of a kind; a GB200 is no B200."""
    return re.search(rf"\b{kind}\b", gpu) is not None


class Rates(TypedDict):
    """A file of measured rates. `python -m benchmarks.rates` writes one."""

    gpu: str
    """The GPU that was measured, as CUDA names it."""
    rates: dict[str, float]
    """Any of `RATES`, in their units."""


def with_rates(hardware: Hardware, path: str | Path) -> Hardware:
    """Return `hardware` with the measured rates of a file in place of assumed ones. Raises FileError."""
    try:
        found = read_record(path, Rates)
    except OSError as error:
        raise FileError(str(path), f"cannot be read: {error.strerror}", "write it with benchmarks.rates") from None
    for name, value in found["rates"].items():
        if name not in RATES:
            raise FileError(str(path), f"gives {name}", f"choose from {', '.join(RATES)}")
        if not is_positive(value):
            raise FileError(str(path), f"gives {name} {value}", "it must be a number above 0")
    measured = {name for name in KINDS if _is(found["gpu"], name.split("-")[0])}
    if measured and hardware.name not in measured:
        problem = f"was measured on {found['gpu']}, but --gpu is {hardware.name}"
        raise FileError(str(path), problem, "give what was measured")
    name = hardware.name if measured else f"{hardware.name} with rates of {found['gpu']}"
    return dataclasses.replace(hardware, **found["rates"], name=name, measured=tuple(found["rates"]))


@dataclass(frozen=True)
class Group:
    """A process group: every `stride`-th rank, `size` of them. Ranks fill one node after the other.

    If it has several dimensions, `neighbours` of its ranks are only `near` apart, and `stride` is the mean.
    """

    size: int
    stride: int
    neighbours: int = 1
    near: int = 1

    def seconds(self, kind: str, size: int, calls: int, hardware: Hardware) -> float:
        """Return the time of `calls` collectives of one kind, which together have `size` bytes, as `Traffic` counts.

        All-gathers and reduce-scatters go around a ring, an all-reduce takes two of them and goes up and down a tree.
        The members in a node share their links to other nodes; an all-to-all sends each message over its own.
        """
        neighbours = min(self.neighbours, hardware.node_size // self.near)
        here = min(self.size, max(1, neighbours, hardware.node_size // self.stride))
        nodes = ceil(self.size / here)
        if kind in (SEND, BROADCAST):
            # Between some neighbours lies the edge of a node, for which all others wait.
            link = "inter" if nodes > 1 else "intra"
            bandwidth, latency = (getattr(hardware, f"{link}_node_{what}") for what in ("bandwidth", "latency"))
            return size / bandwidth + calls * latency
        if kind == ALL_TO_ALL:
            in_node = size * (here - 1) / self.size / hardware.intra_node_bandwidth
            between_nodes = size * (self.size - here) / self.size / hardware.inter_node_bandwidth
            latency = hardware.inter_node_latency if nodes > 1 else hardware.intra_node_latency
            return max(in_node, between_nodes) + calls * latency
        bandwidth = hardware.intra_node_bandwidth
        bandwidth = bandwidth if nodes == 1 else min(bandwidth, here * hardware.inter_node_bandwidth)
        once = size * (self.size - 1) / self.size / bandwidth
        hops = log2(nodes) if kind == ALL_REDUCE else nodes - 1
        latency = (here - 1) * hardware.intra_node_latency + hops * hardware.inter_node_latency
        return (once + calls * latency) * (2 if kind == ALL_REDUCE else 1)
