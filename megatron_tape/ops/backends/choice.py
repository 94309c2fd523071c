"""Which attention backends can run where, and which one `auto` means."""

import importlib
import importlib.util
import logging
from collections.abc import Set
from typing import NamedTuple

import torch

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import (
    AVERAGE,
    BACKENDS,
    BIAS,
    GATE,
    HEAD_DIMS,
    LIBRARIES,
    POINTWISE,
    REFLECTIONS,
    SCORES,
    described,
    lacks,
)

logger = logging.getLogger(__name__)

REFLECTED_DIMS = (16, 32, 64, 128)
"""Head widths for which flash-linear-attention 0.6.0 has kernels of PaTH."""
_PACKAGES = {
    "triton": "triton",
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "cudnn": "torch",
    "flex": "triton",
    "fla": "fla.ops.forgetting_attn",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Choice(NamedTuple):
    """A backend, and why it was chosen."""

    backend: str
    reason: str


def choose_backend(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    needs: Set[str] = frozenset(),
    segments: bool = False,
    packed: bool = False,
    without: Set[str] = frozenset(),
) -> Choice:
    """Return the backend for `wanted` that can do all of `needs`, which the positional encoding requires.

    `auto` is, on a GPU, triton if a state is averaged, the first of `LIBRARIES` if none is, and torch if none of these
    can run; on a CPU it is tiled if a state is averaged, otherwise torch. With a bias, a gate or rows of scores it is
    the first of fla, flex and tiled on a GPU that can do and run it, and tiled on a CPU. With `segments`
    (`ops.shifted`) or `packed` documents it prefers backends that skip the keys of others, as cudnn and torch do not;
    with segments these are also triton after the libraries, and tiled on a CPU. `without` names backends that `auto` is
    not to be. A backend that was named is never replaced by another: if it cannot run or do what is needed, this raises
    `ConfigError`.
    """
    if wanted != "auto":
        if why := lacks(wanted, needs) or unsupported(wanted, device, dtype, head_dim, needs):
            raise ConfigError("model.attention_backend", f"is {wanted}, which {why}", "choose another, or auto")
        return Choice(wanted, "as model.attention_backend says")
    on_cpu, averages = device.type == "cpu", AVERAGE in needs
    if {POINTWISE, BIAS, GATE, SCORES, REFLECTIONS} & needs:
        order = ["tiled"] if on_cpu else ["fla", "flex", "tiled"]
    elif on_cpu:
        order = ["tiled" if averages or segments else "torch"]
    else:
        libraries = [name for name in LIBRARIES if name != "cudnn" or not (segments or packed)]
        order = [*(["triton"] if averages else libraries), *(["triton"] if segments else []), "torch"]
    for name in (*order, "naive"):
        if lacks(name, needs) or name in without:
            continue
        if not (why := unsupported(name, device, dtype, head_dim, needs)):
            return Choice(name, f"the default on a {'CPU' if on_cpu else 'GPU'}")
        logger.info("attention does not use %s, which %s", name, why)
    raise ConfigError(
        ("model.attention_backend", "model.position_encoding"),
        f"is auto, but no backend can {described(needs)} at once",
        "choose another model.position_encoding",
    )


def unsupported(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, needs: Set[str] = frozenset()
) -> str | None:
    """Return why `backend` cannot run, as the predicate of a sentence, or None if it can.

    What it cannot do of `needs` is said by `lacks`; here they only decide which of its kernels would run.
    """
    if backend not in _PACKAGES:
        return None
    if why := why_not_importable(_PACKAGES[backend]):
        return why
    if device.type != "cuda" and not (backend == "triton" and triton_interprets()):
        return f"needs a GPU, and this runs on {device.type}"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    if backend == "flash_attn_3" and capability[0] != 9:
        return "needs a GPU of compute capability 9.0"
    # Before 9.0, cuDNN's kernels are no faster than others'.
    if capability < (oldest := (9, 0) if backend == "cudnn" else (8, 0)):
        return "needs a GPU of compute capability {}.{} or newer".format(*oldest)
    if backend == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return "does not give the same bits every time"
    dtypes = [_DTYPES[name] for name in BACKENDS[backend].precisions]
    if dtype not in dtypes:
        names = " or ".join(str(known).removeprefix("torch.") for known in dtypes)
        return f"computes in {names}, not in {str(dtype).removeprefix('torch.')}"
    if backend == "triton":
        if head_dim not in HEAD_DIMS:
            return f"supports heads of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        return None if device.type == "cuda" else why_not_interpreted(dtype)
    if REFLECTIONS in needs and head_dim not in REFLECTED_DIMS:
        return f"applies reflections to heads of {', '.join(map(str, REFLECTED_DIMS))}, not {head_dim}"
    smallest = 8 if backend in LIBRARIES else 16
    return None if smallest <= head_dim <= 256 and head_dim % 8 == 0 else f"does not support heads of {head_dim}"


def why_not_importable(package: str) -> str | None:
    """Return why a package cannot be used, as the predicate of a sentence, or None."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return "is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # for example, it was built for another version of torch
        return f"cannot be imported ({type(error).__name__})"
    return None


def triton_interprets() -> bool:
    """Return whether Triton interprets kernels on the CPU, statement by statement."""
    import triton

    return triton.knobs.runtime.interpret


def why_not_interpreted(dtype: torch.dtype) -> str | None:
    """Return why Triton's interpreter cannot be used here, as the predicate of a sentence, or None."""
    import numpy
    import triton

    if dtype is torch.bfloat16:
        # Triton 3.6 and 3.7 truncate to bf16 and multiply its bits.
        return "computes bfloat16 incorrectly in the interpreter; use fp32 there"
    versions = triton.__version__, numpy.__version__
    if tuple(int(part) for part in versions[0].split(".")[:2]) < (3, 7):
        try:
            int(numpy.zeros(1))
        except TypeError:  # what that interpreter does in every loop
            return "cannot be interpreted by triton {} with numpy {}; use triton 3.7 or newer".format(*versions)
    return None
