"""Peak FLOP/s, memory and bandwidths of GPUs, from their data sheets. Imports no torch."""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from megatron_tape.ops.backends.table import BLACKWELL, HOPPER, OTHER_GPU

NODE_SIZE = 8
"""GPUs per node."""


class Hardware(NamedTuple):
    """A GPU model. Bandwidths are per GPU and direction, in bytes/s."""

    name: str
    generation: str
    """The name of the GPU generation in the table of attention backends, `ops.backends.table`."""
    memory: float
    """GiB available to a process."""
    peak: float
    """Dense bf16 FLOP/s."""
    intra_node_bandwidth: float
    """Bandwidth to GPUs of the same node."""
    inter_node_bandwidth: float
    """Bandwidth to GPUs of other nodes."""


# From NVIDIA's data sheets of the SXM modules; NVLink's stated bandwidth is for both directions.
# Between nodes: one 400 Gb/s adapter per GPU as in DGX H100, and 200 Gb/s as in DGX A100. L40S:
# half of the data sheet's 733 TFLOP/s with sparsity. RTX A6000: half of the data sheet's 309.7
# TFLOP/s with sparsity. RTX 4090: NVIDIA's white paper of the Ada architecture, dense, with
# accumulation in fp32. These three cards have PCIe 4.0 x16, and 100 Gb/s per GPU between nodes are
# assumed for them. The NVLink bridge of two A6000s is not counted. MI300X: AMD's data sheet, dense;
# seven Infinity Fabric links of 128 GB/s in both directions, and an assumed 400 Gb/s per GPU
# between nodes.
# Values: name, generation, GiB, FLOP/s, and bandwidths within and between nodes.
KINDS = {
    kind.name: kind
    for kind in (
        Hardware("H100", HOPPER, 80, 989.4e12, 450e9, 50e9),
        Hardware("H200", HOPPER, 140, 989.4e12, 450e9, 50e9),
        Hardware("B200", BLACKWELL, 178, 2250e12, 900e9, 50e9),
        Hardware("A100-80GB", OTHER_GPU, 80, 312e12, 300e9, 25e9),
        Hardware("A100-40GB", OTHER_GPU, 40, 312e12, 300e9, 25e9),
        Hardware("L40S", OTHER_GPU, 45, 362e12, 32e9, 12.5e9),
        Hardware("A6000", OTHER_GPU, 48, 154.8e12, 32e9, 12.5e9),
        Hardware("RTX4090", OTHER_GPU, 24, 165.2e12, 32e9, 12.5e9),
        Hardware("MI300X", OTHER_GPU, 192, 1307.4e12, 448e9, 50e9),
    )
}
"""GPU models for estimates, by name."""
# The names in `KINDS` lose their memory sizes, because CUDA's device names contain only the first
# word of A100-80GB, as in NVIDIA A100-SXM4-80GB. GH200, B300, GB200 and GB300: half of the figures
# with sparsity in NVIDIA's data sheets of GH200, HGX B300 (36 PFLOP/s, 8 GPUs), GB200 NVL72 and
# GB300 NVL72 (360 PFLOP/s, 72 GPUs).
PEAKS = {name.split("-")[0]: kind.peak for name, kind in KINDS.items()} | {
    "GH200": 989.4e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "RTX 4090": KINDS["RTX4090"].peak,
}
"""Dense bf16 FLOP/s of GPU models. A key is a word of the device name that CUDA reports."""


def peak_flops(gpu: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU whose device name in CUDA is `gpu`, or None if it is
    unknown.
    """
    # Unknown is the peak of a part of a GPU (MIG) and of slower variants such as `H100 PCIe`, whose
    # names contain that of the faster GPU.
    if re.search(r"MIG|PCIe|NVL|Laptop|4090 D\b", gpu):
        return None
    for kind, peak in PEAKS.items():
        # Whole words, so that a GB200 is not taken for a B200.
        if re.search(rf"\b{kind}\b", gpu):
            return peak
    return None


def host_memory() -> int:
    """Return the bytes of memory that this process may use: the lower of the limits of its cgroups
    (version 2) and the node's memory.
    """
    # The first limit is the memory of the node.
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        # With version 2, the file has one line, `0::/PATH`.
        group = Path("/proc/self/cgroup").read_text().rpartition(":")[2].strip()
        # A container may hide the path of its group, but has its limit at the top.
        for folder in (Path(group), *Path(group).parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limits.append(int(Path(f"/sys/fs/cgroup{folder}", "memory.max").read_text()))
    return min(limits)
