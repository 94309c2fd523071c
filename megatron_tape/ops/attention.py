"""Causal attention with a position state, in several backends behind one function.

Queries and keys are rotated by the state z. On request, the attention map p averages z as well as the value: p @ [v |
z]. Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value
groups, D head dimension. As in Megatron, the sequence axis comes first. `backends/naive.py` is the plain form to
compare with.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Set
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_tape.errors import ConfigError
from megatron_tape.ops.activation_checkpointing import run_directly
from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import (
    AVERAGE,
    BACKENDS,
    BIAS,
    GATE,
    HEAD_DIMS,
    POINTWISE,
    REFLECTIONS,
    ROTATION,
    SCORES,
    described,
    lacks,
)
from megatron_tape.ops.bias import Bias, gates_as_bias
from megatron_tape.ops.measured import Heads, nearest, read_table
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.rescore import Rescore

logger = logging.getLogger(__name__)

REFLECTED_DIMS = (16, 32, 64, 128)
"""Head widths for which flash-linear-attention 0.6.0 has kernels of PaTH."""
_MODULES = {name: name for name in BACKENDS} | {"torch": "sdpa", "flash_attn": "flash"}
_PACKAGES = {"triton": "triton", "flash_attn": "flash_attn", "flex": "triton", "fla": "fla.ops.forgetting_attn"}
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attention(
    q_SBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    z_TBGD: Tensor | None,
    average_state: bool = False,
    packing: Packing | None = None,
    backend: str = "torch",
    rotate: bool = True,
    bias: Bias | None = None,
    log_gate_TBH: Tensor | None = None,
    rescore: Rescore | None = None,
    factor_TB1D: Tensor | None = None,
    run: Callable[..., tuple[Tensor, ...]] = run_directly,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by z, if given, and average v (with `average_state` also z) with softmax(q k^T / sqrt(D) + ...).

    z has v's type (in the triton backend it may be float32 instead), and its sequence or group axis may have size 1.
    `packing` keeps packed documents from attending to each other. Returns o (S, B, H, D) and u, which has o's shape and
    z's type, or None. `backend` is one of `BACKENDS`; `choose_backend` resolves auto.

    With `factor_TB1D` (its batch axis may have size 1), rotated queries are also multiplied by their tokens' factors,
    and rotated keys divided by theirs. The two parts of a complex number must have the same factor.

    Three arguments change the scores: `rescore` replaces whole rows of them, `bias` is added to them, and
    `log_gate_TBH` holds logarithms of forget gates.

    With a cache (T > S, for example one query at a time), the caller rotates each token once, when it arrives: q by its
    own state, and the new key before it enters the cache (`ops.rotation.rotate_groups`). `rotate` is then False.

    Where layers are recomputed, `run` calls the backend's function or replays it (`ops.activation_checkpointing`).
    naive, and tiled for whole rows of scores, do not use it.

    Raises ValueError if shapes or types do not fit, if `rotate` is true with a cache, if there is no state to average,
    or if the backend cannot do what is requested.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}, not one of {', '.join(BACKENDS)}; use choose_backend to resolve auto"
        )
    if average_state and z_TBGD is None:
        raise ValueError("there is no position state to average")
    if (
        z_TBGD is not None
        and z_TBGD.dtype != v_TBGD.dtype
        and not (backend == "triton" and z_TBGD.dtype == torch.float32)
    ):
        raise ValueError(f"{backend} cannot combine states of {z_TBGD.dtype} with values of {v_TBGD.dtype}")
    _check_shapes(q_SBHD, k_TBGD, v_TBGD, z_TBGD, None if packing is None else packing.bounds_2BT)
    S, T = q_SBHD.shape[0], k_TBGD.shape[0]
    if S < T and rotate and not (z_TBGD is None and factor_TB1D is None):
        raise ValueError(
            f"{S} queries have {T} keys: cached keys were rotated when they arrived; rotate the new ones with "
            "ops.rotation.rotate_groups and pass rotate=False"
        )
    if factor_TB1D is not None and rotate:
        if factor_TB1D.shape not in [(T, batch, 1, k_TBGD.shape[3]) for batch in (1, k_TBGD.shape[1])]:
            raise ValueError(
                f"keys {tuple(k_TBGD.shape)} have factors {tuple(factor_TB1D.shape)}, not (T, B or 1, 1, D)"
            )
        # Each backend's rotation multiplies by the same complex number, so this may come first.
        q_SBHD, k_TBGD = q_SBHD * factor_TB1D, k_TBGD / factor_TB1D
    needs = {ROTATION: z_TBGD is not None and rotate, AVERAGE: average_state}
    needs |= {POINTWISE: bias is not None and bias.score is not None, BIAS: bias is not None and bias.score is None}
    needs |= {GATE: log_gate_TBH is not None} | ({} if rescore is None else {rescore.need: True})
    if why := lacks(backend, {need for need, wanted in needs.items() if wanted}):
        raise ValueError(f"backend is {backend}, which {why}")
    if log_gate_TBH is not None:
        if log_gate_TBH.shape != (T, *q_SBHD.shape[1:3]):
            raise ValueError(f"gates {tuple(log_gate_TBH.shape)} need a value for each of {T} keys and each query head")
        bias = gates_as_bias(log_gate_TBH, bias)
    bias = None if bias is None else bias.in_float32()
    rescore = None if rescore is None else rescore.in_float32()
    if backend == "triton" and not q_SBHD.is_cuda:
        if why := unsupported("triton", q_SBHD.device, q_SBHD.dtype, q_SBHD.shape[-1]):
            raise ValueError(f"backend is triton, which {why}")
    module = importlib.import_module(f"megatron_tape.ops.backends.{_MODULES[backend]}")
    inputs = AttentionInputs(
        q_SBHD, k_TBGD, v_TBGD, z_TBGD, average_state, packing, rotate, bias, rescore, log_gate_TBH, run
    )
    o, *u = module.attend(inputs)
    return o, u[0] if u else None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, bounds: Tensor | None) -> None:
    """Reject shapes with which a kernel would read beyond the end of a tensor."""
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"queries and keys have {q.dim()} and {k.dim()} axes, not 4: sequence, batch, heads, head dimension"
        )
    (S, B, H, D), (T, G) = q.shape, k.shape[::2]
    queries, keys = f"queries {tuple(q.shape)}", f"keys {tuple(k.shape)}"
    if k.shape != (T, B, G, D) or H % G:
        raise ValueError(f"{queries} do not fit {keys}: (S, B, H, D) and (T, B, G, D), where G divides H")
    if S > T:
        raise ValueError(f"{queries} have {keys}: each query's own token must be among the keys")
    if v.shape != k.shape:
        raise ValueError(f"{keys} have values {tuple(v.shape)}, not of the same shape")
    if z is not None and (z.shape[::3] != (T, D) or z.shape[1] not in (1, B) or z.shape[2] not in (1, G)):
        raise ValueError(f"{keys} have states {tuple(z.shape)}, not {(T, B, G, D)}; {B} or {G} may be 1 instead")
    if z is not None and D % 2:
        raise ValueError(f"heads of {D} cannot be split into pairs to rotate; their dimension must be even")
    if bounds is not None and bounds.shape != (2, B, T):
        raise ValueError(f"{keys} have document bounds {tuple(bounds.shape)}, not {(2, B, T)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values are of types {q.dtype}, {k.dtype} and {v.dtype}, not of one")


def unsupported(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, needs: Set[str] = frozenset()
) -> str | None:
    """Return why `backend` cannot run, as the predicate of a sentence, or None if it can.

    What it cannot do of `needs` is said by `lacks`; here they only decide which of its kernels would run.
    """
    if backend not in _PACKAGES:
        return None
    if why := _not_importable(_PACKAGES[backend]):
        return why
    if device.type != "cuda" and not (backend == "triton" and _interpreted()):
        return f"needs a GPU, and this runs on {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    types = [_TYPES[name] for name in BACKENDS[backend].precisions]
    if dtype not in types:
        names = " or ".join(str(kind).removeprefix("torch.") for kind in types)
        return f"computes in {names}, not in {str(dtype).removeprefix('torch.')}"
    if backend == "triton":
        if head_dim not in HEAD_DIMS:
            return f"supports heads of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        return None if device.type == "cuda" else _not_interpreted(dtype)
    if REFLECTIONS in needs and head_dim not in REFLECTED_DIMS:
        return f"applies reflections to heads of {', '.join(map(str, REFLECTED_DIMS))}, not {head_dim}"
    smallest = 8 if backend == "flash_attn" else 16
    return None if smallest <= head_dim <= 256 and head_dim % 8 == 0 else f"does not support heads of {head_dim}"


def _not_importable(package: str) -> str | None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return "is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # for example, it was built for another version of torch
        return f"cannot be imported ({type(error).__name__})"
    return None


def _interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, statement by statement."""
    import triton

    return triton.knobs.runtime.interpret


def _not_interpreted(dtype: torch.dtype) -> str | None:
    """Return why Triton's interpreter cannot be used here, or None."""
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


class Choice(NamedTuple):
    """A backend, and why it was chosen."""

    backend: str
    reason: str


def choose_backend(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: Heads,
    needs: Set[str] = frozenset(),
    segments: bool = False,
) -> Choice:
    """Return the backend for `wanted` that can do all of `needs`, which the positional encoding requires.

    `auto` chooses the fastest that can. On a GPU this is the one that was measured to be the fastest at the nearest
    shape on this kind of GPU (`ops/measured.py`). Where nothing was measured, it is triton if a state is averaged,
    flash_attn if none is, and torch if neither can run; on a CPU it is tiled if a state is averaged, otherwise torch.
    With a bias, a gate or rows of scores it is the first of fla, flex and tiled on a GPU that can do and run it, and
    tiled on a CPU. With `segments` (`ops.shifted`), which were not measured, it prefers backends that skip the keys of
    other segments, as torch does not: triton after flash_attn, and tiled on a CPU. A backend that was named is never
    replaced by another: if it cannot run or do what is needed, this raises `ConfigError`. So does a damaged table.
    """
    if wanted != "auto":
        if why := lacks(wanted, needs) or unsupported(wanted, device, dtype, shape.head_dim, needs):
            raise ConfigError(f"model.attention_backend is {wanted}, which {why}; choose another, or auto")
        return Choice(wanted, "as model.attention_backend says")
    averages = AVERAGE in needs
    measured, where = [], ""
    if device.type == "cuda" and needs <= {ROTATION, AVERAGE} and not segments:
        measured, where = _fastest_first(device, dtype, shape, averages)
    if {POINTWISE, BIAS, GATE, SCORES, REFLECTIONS} & needs:
        order = ["tiled"] if device.type == "cpu" else ["fla", "flex", "tiled"]
    elif device.type == "cpu":
        order = ["tiled" if averages or segments else "torch"]
    else:
        order = ["triton" if averages else "flash_attn", *(["triton"] if segments else []), "torch"]
    for name in dict.fromkeys((*measured, *order, "naive")):
        if lacks(name, needs):
            continue
        if not (why := unsupported(name, device, dtype, shape.head_dim, needs)):
            if name in measured:
                return Choice(name, f"the fastest that was measured on {where}")
            return Choice(name, "the default on a CPU" if device.type == "cpu" else "not measured on this GPU")
        logger.info("attention does not use %s, which %s", name, why)
    raise ConfigError(f"no attention backend can {described(needs)} at once; choose another model.position_encoding")


def _fastest_first(device: torch.device, dtype: torch.dtype, shape: Heads, averages: bool) -> tuple[list[str], str]:
    """Return the backends measured at the nearest shape on this kind of GPU, the fastest first, and where that was."""
    rows, precisions = read_table(), {kind: name for name, kind in _TYPES.items()}
    if not rows or dtype not in precisions:
        return [], ""
    gpu = torch.cuda.get_device_name(device)
    row = nearest(rows, gpu, precisions[dtype], averages, shape)
    if row is None:
        return [], ""
    names = sorted(BACKENDS.keys() & row["seconds"].keys(), key=row["seconds"].__getitem__)
    return names, f"{gpu} at {row['seq_length']:,} tokens"
