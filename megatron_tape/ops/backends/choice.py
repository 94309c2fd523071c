"""Check whether an attention backend can run on a device, and select one for
`model.attention_backend`.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Set
from typing import NamedTuple

import torch

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import (
    BACKENDS,
    DECAY,
    REFLECTIONS,
    described,
    lacks,
    unsupported_heads,
)
from megatron_tape.ops.backends.table import (
    BLACKWELL,
    CPU,
    FLASH_ATTN_4_WIDE,
    HOPPER,
    OTHER_GPU,
    Case,
    rows,
)

logger = logging.getLogger(__name__)

REFLECTED_DIMS = (16, 32, 64, 128)
"""Head dimensions of flash-linear-attention 0.6.0's kernels for PaTH."""
FLASH_ATTN = {4: "flash_attn.cute.interface", 2: "flash_attn"}
"""Module to import for each version of flash-attn; the packages are flash-attn-4 and flash-attn."""
_PACKAGES = {
    "triton": "triton",
    "torch_wide": "torch",
    "flex": "triton",
    "fla": "fla.ops.forgetting_attn",
}
"""The module that each backend requires. It is imported to check it, since a package may be
installed, but not importable.
"""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Choice(NamedTuple):
    """A selected backend, and the reason in words."""

    backend: str
    reason: str
    slow: bool = False
    """Whether faster kernels exist but cannot run here."""


def choose_backend(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    needs: Set[str],
    segments: bool = False,
    packed: bool = False,
    without: Set[str] = frozenset(),
    grouped: bool = False,
) -> Choice:
    """Return the backend for `requested`, the value of `model.attention_backend`: a backend's name
    or `auto`.

    `needs` are the capabilities that the positional encoding requires. `auto` selects the first row
    of `table.TABLE` that fits the run and whose backend can run. Which rows fit also depends on
    `segments` (`ops.shifted`), `packed` documents and `grouped` query heads (GQA); `auto` skips the
    backends in `without`. A named backend is never replaced: if it cannot run or lacks a
    capability, this raises ConfigError.
    """
    if requested != "auto":
        if why := lacks(requested, needs) or unsupported(requested, device, dtype, head_dim, needs):
            raise ConfigError(
                "model.attention_backend",
                f"is {requested}, which {why}",
                "set it to auto or another",
            )
        return Choice(requested, "as set by model.attention_backend")

    case = Case(
        generation(device),
        frozenset(needs),
        head_dim,
        half_precision=dtype.itemsize == 2,
        packed=packed,
        segments=segments,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        grouped=grouped,
    )
    for row in rows(case):
        if row.backend in without:
            continue
        why = unsupported(row.backend, device, dtype, head_dim, needs)
        if not why and row.flash_attn_4 and flash_attn_version(device) != 4:
            why = "is not installed in version 4"
        if not why:
            return Choice(
                row.backend,
                f"auto's first choice for {case.generation} that can run: {row}",
                row.slow,
            )
        logger.info("attention backend %s is skipped: it %s", row.backend, why)
    raise ConfigError(
        ("model.attention_backend", "model.position_encoding"),
        f"is auto, but no backend can {described(needs)} at once",
        "choose another model.position_encoding",
    )


def generation(device: torch.device) -> str:
    """Return the generation of a device, as named in `table`."""
    if device.type != "cuda":
        return CPU
    major, _ = torch.cuda.get_device_capability(device)
    # AMD numbers its GPUs in the same way: major 9 is not Hopper there.
    if torch.version.hip:
        return OTHER_GPU
    return {9: HOPPER, 10: BLACKWELL}.get(major, OTHER_GPU)


def unsupported(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    needs: Set[str] = frozenset(),
) -> str | None:
    """Return why `backend` cannot run, as the predicate of a sentence, or None if it can.

    `needs` only determines which of the backend's kernels would run; `lacks` checks whether it has
    the capabilities.
    """
    precisions = BACKENDS[backend].precisions
    # Backends in plain torch are declared without precisions: they support all, and run everywhere.
    if precisions is None:
        return None

    if backend in _PACKAGES and (why := why_not_importable(_PACKAGES[backend])):
        return why
    if device.type != "cuda" and not (backend == "triton" and triton_interprets()):
        return f"requires a GPU, but this process runs on the {device.type.upper()}"
    if backend == "flash_attn" and flash_attn_version(device) is None:
        return "has no importable version that runs on this GPU"
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return (
            "requires a GPU of compute capability 8.0 or newer, but this one has"
            f" {capability[0]}.{capability[1]}"
        )
    if backend == "torch_wide":
        if generation(device) not in (HOPPER, BLACKWELL):
            return (
                "requires an NVIDIA GPU of compute capability 9.x or 10.x, as cuDNN has no kernels"
                " for others"
            )
        if torch.are_deterministic_algorithms_enabled():
            return "is not deterministic, as this run must be"

    if dtype not in [_DTYPES[name] for name in precisions]:
        return f"supports {' and '.join(precisions)}, not {dtype}"
    if why := unsupported_heads(backend, head_dim):
        return why
    if REFLECTIONS in needs and head_dim not in REFLECTED_DIMS:
        return f"supports head dimensions {REFLECTED_DIMS} with reflections, not {head_dim}"
    if DECAY in needs and dtype is torch.float16:
        return "supports bf16 with decays, not fp16, in which their factors overflow"
    if backend == "triton" and device.type != "cuda":
        return why_not_interpreted(dtype)
    return None


def flash_attn_version(device: torch.device) -> int | None:
    """Return the newest version of flash-attn that is installed and runs on this GPU, or None."""
    major, _ = torch.cuda.get_device_capability(device)
    return _flash_attn_version(major, amd=torch.version.hip is not None)


@functools.cache
def _flash_attn_version(major: int, amd: bool) -> int | None:
    """Return the result of `flash_attn_version` for a GPU of compute capability `major`.x."""
    # For each version, whether it has kernels for the GPU.
    runs_here = {4: major in (9, 10) and not amd, 2: major >= 8}
    for version, module in FLASH_ATTN.items():
        if runs_here[version] and why_not_importable(module) is None:
            # Version 4 also installs a package flash_attn, without functions.
            if hasattr(importlib.import_module(module), "flash_attn_func"):
                return version
    return None


def takes_wide_value(device: torch.device, head_dim: int) -> bool:
    """Return whether flash-attn supports [v | z] as a value: version 4 does for some head
    dimensions.
    """
    if flash_attn_version(device) != 4:
        return False
    # Version 4 runs only on these two generations, so that no other key is looked up.
    return head_dim in FLASH_ATTN_4_WIDE[generation(device)]


def averages_one_value(
    backend: str,
    device: torch.device,
    head_dim: int,
    grouped: bool,
) -> bool:
    """Return whether the backend passes the values and the position state of each group to a
    library as one tensor [v | z].

    `grouped` is whether query heads share keys and values: FlashAttention-4 then gets copies for
    each head. The backend triton does not: its own kernel joins them.
    """
    if backend == "flash_attn":
        return takes_wide_value(device, head_dim) and not grouped
    return backend == "torch_wide"


def supports_rotation_kernels(x: torch.Tensor) -> bool:
    """Return whether the kernels of `ops.kernels.triton_rotation` run on x: on a GPU with Triton,
    in fp32, bf16 or fp16.
    """
    return x.is_cuda and x.dtype.itemsize <= 4 and _rotation_kernel_runs(x.device, x.dtype)


@functools.cache
def _rotation_kernel_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the rotation kernel compiles and runs on `device`; log a warning if not."""
    # The rotation kernel supports all head dimensions; 64 is one that passes the check of the
    # attention kernel.
    why = unsupported("triton", device, dtype, 64)
    if why is None:
        from megatron_tape.ops.kernels.triton_rotation import rotated_and_joined

        x = torch.zeros(1, 1, 1, 64, dtype=dtype, device=device)
        try:
            rotated_and_joined(x, x, x, x, wide=True)
        except torch.OutOfMemoryError:
            # Running out of memory says nothing about the kernel.
            raise
        except Exception as error:  # a compiler may raise anything
            # The first line of the message; chr(10) is the newline.
            why = f"fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if why is not None:
        logger.warning("plain torch rotates queries and keys, because triton %s", why)
    return why is None


def why_not_importable(package: str) -> str | None:
    """Return why a package cannot be imported, as the predicate of a sentence, or None."""
    # Look up only the top-level package: `find_spec` of a submodule would import its parents.
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return "is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # for example, it was built for another version of torch
        return f"cannot be imported ({type(error).__name__})"
    return None


def triton_interprets() -> bool:
    """Return whether Triton runs kernels in its interpreter on the CPU."""
    import triton

    return triton.knobs.runtime.interpret


def why_not_interpreted(dtype: torch.dtype) -> str | None:
    """Return why Triton's interpreter cannot compute in `dtype`, as text that follows "triton";
    None if it can.
    """
    if dtype is torch.bfloat16:
        # The interpreter truncates to bf16 and multiplies the raw bits as integers.
        return "computes bfloat16 incorrectly in Triton's interpreter, unlike float32"
    return None
