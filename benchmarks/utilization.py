"""How much of a GPU's arithmetic a training step uses. Imports no torch."""

import re

# Dense bf16 FLOP/s of the tensor cores with fp32 accumulation, from NVIDIA's documents, half of what they state with
# sparsity. H100 SXM and PCIe: "NVIDIA H100 Tensor Core GPU Architecture"; H100 NVL, H200, H200 NVL, GH200, A100 and
# L40S: their data sheets; B200: "NVIDIA Blackwell Architecture Technical Brief".
_PEAKS = (
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100 (SXM|80GB HBM3\b)", 989.4e12),
    (r"\bH200 NVL\b", 835e12),
    (r"\bG?H200\b", 989.4e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"(?<!G)\bB200\b", 2250e12),
)


def peak_flops(gpu: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU, given its name as CUDA states it; None if the name is not known."""
    if "MIG" in gpu:  # a part of a GPU
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, gpu)), None)


def utilization(
    flops_per_token: int, tokens_per_second: float, gpus: int, peak: float | None, matmul: float
) -> dict[str, float | None]:
    """Return model FLOP/s per GPU in TFLOP/s, and as shares of the GPU's peak (MFU) and of a large matmul's speed."""
    flops = flops_per_token * tokens_per_second / gpus
    return {"tflops": flops / 1e12, "mfu": None if peak is None else flops / peak, "of_matmul": flops / matmul}
