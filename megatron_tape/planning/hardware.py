"""Peaks, memory and links of GPUs by their data sheets. Imports no torch."""

import re
from typing import NamedTuple

from megatron_tape.ops.backends.table import BLACKWELL, HOPPER, OTHER_GPU

NODE_SIZE = 8
"""GPUs of a node."""


class Hardware(NamedTuple):
    """A kind of GPU. Bandwidths are those of one GPU in one direction, in bytes/s."""

    name: str
    generation: str
    """As the table of attention backends names it."""
    memory: float
    """GiB that a process can use."""
    peak: float
    """Dense bf16 FLOP/s."""
    intra_node_bandwidth: float
    """To GPUs of the same node."""
    inter_node_bandwidth: float
    """To GPUs of other nodes."""


# NVIDIA's data sheets of the SXM modules (a direction of NVLink is half of what is stated). Between nodes: one 400 Gb/s
# adapter for each GPU, as in DGX H100, and 200 Gb/s, as in DGX A100.
KINDS = {
    kind.name: kind
    for kind in (
        Hardware("H100", HOPPER, 80, 989.4e12, 450e9, 50e9),
        Hardware("H200", HOPPER, 140, 989.4e12, 450e9, 50e9),
        Hardware("B200", BLACKWELL, 178, 2250e12, 900e9, 50e9),
        Hardware("A100-80GB", OTHER_GPU, 80, 312e12, 300e9, 25e9),
        Hardware("A100-40GB", OTHER_GPU, 40, 312e12, 300e9, 25e9),
    )
}
"""Kinds of GPUs by name, for estimates."""
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
    # Whole words, as a GB200 is no B200.
    return next((peak for kind, peak in PEAKS.items() if re.search(rf"\b{kind}\b", gpu)), None)
