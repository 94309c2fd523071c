"""Peak FLOP/s of GPUs by the names that CUDA reports."""

import pytest

from megatron_tape.planning.hardware import peak_flops

NAMES = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA GH200 144G HBM3e": 989.4e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "AMD Instinct MI300X": 1307.4e12,
}
UNKNOWN = (
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA L40",
    "Tesla T4",
    "AMD Instinct MI300A",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_name_of_cuda_has_the_peak_of_its_data_sheet(name):
    assert peak_flops(name) == NAMES[name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_gpus_and_gpu_partitions_have_no_peak(name):
    assert peak_flops(name) is None
