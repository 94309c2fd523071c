"""Causal attention with a position state; `attend` calls one of the backends in `ops/backends`.

Queries and keys are rotated by the position state z. For TAPE, the attention weights p average z
along with the values v: p @ [v | z]. The reference is `backends/naive.py`. Axes: S queries, T keys
(the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D head
dimension. As in Megatron, the sequence axis comes first.
"""

import importlib
from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import (
    AVERAGE,
    BACKENDS,
    BIAS,
    GATE,
    POINTWISE,
    ROTATION,
    SINK,
    WINDOW,
    lacks,
)
from megatron_tape.ops.backends.choice import unsupported
from megatron_tape.ops.bias import gates_as_bias

_MODULES = {"torch": "sdpa", "torch_wide": "sdpa_wide", "flash_attn": "flash"}
"""The modules in `ops/backends` that do not have the name of their backend."""


def attention(
    q_SBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    z_TBGD: Tensor | None = None,
    *,
    backend: str = "torch",
    **fields: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the averages o and u (see `attend`), for tensors instead of `AttentionInputs`.

    `fields` holds the other fields of `AttentionInputs` by name, such as `average_state` and
    `visibility`.
    """
    x = AttentionInputs(z_TBGD, q_SBHD=q_SBHD, k_TBGD=k_TBGD, v_TBGD=v_TBGD, **fields)
    return attend(x, backend)


def attend(x: AttentionInputs, backend: str = "torch") -> tuple[Tensor, Tensor | None]:
    """Return the averages o = p v of the values and u = p z of the position state, both (S, B, H,
    D).

    The attention weights p are the softmax of q k^T / sqrt(D), as changed by the bias, gates or
    rescoring of `x`. Unless `x.rotate` is False or z is None, q and k are rotated by z first. u is
    None unless `x.average_state`. z must have the dtype of v. `backend` is a key of `BACKENDS`;
    resolve "auto" with `choose_backend`.

    With a cache (T > S, for example in decoding), set `x.rotate` to False: the caller then rotates
    the queries, and each key once, before it enters the cache (`ops.rotation.rotate_groups`).

    Raises ValueError if shapes or dtypes do not match, if `x.rotate` is True with a cache, if there
    is no state to average, or if the backend does not support the inputs.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}, not one of {', '.join(BACKENDS)}; resolve auto with"
            " choose_backend"
        )
    _check(x)
    if why := lacks(backend, _needs(x)):
        raise ValueError(f"backend is {backend}, which {why}; choose another")
    # Triton's interpreter would compute wrong results in bf16 without an error.
    if backend == "triton" and not x.q_SBHD.is_cuda:
        if why := unsupported(
            "triton",
            x.q_SBHD.device,
            x.q_SBHD.dtype,
            x.q_SBHD.shape[-1],
        ):
            raise ValueError(f"backend is triton, which {why}; choose another")
    # Imported here, since most backends need an optional library.
    module_name = _MODULES.get(backend, backend)
    module = importlib.import_module(f"megatron_tape.ops.backends.{module_name}")
    # The backend returns (o, u), or (o,) if it does not average z.
    o, *u = module.attend(_simplified(x))
    return o, u[0] if u else None


def _simplified(x: AttentionInputs) -> AttentionInputs:
    """Return `x` with its factors applied to q and k, its gates added to its bias, and bias and
    rescoring in fp32.
    """
    if x.factor_TB1D is not None and x.rotate:
        # Backends rotate afterwards. The order does not matter, as the real and the imaginary part
        # of a number have the same factor.
        x = replace(
            x,
            q_SBHD=x.q_SBHD * x.factor_TB1D,
            k_TBGD=x.k_TBGD / x.factor_TB1D,
            factor_TB1D=None,
        )
    if x.log_gate_TBH is not None:
        has_sink = x.sink_H is not None
        x = replace(x, bias=gates_as_bias(x.log_gate_TBH, x.bias, complete=has_sink))
    if x.bias is not None:
        x = replace(x, bias=x.bias.in_float32())
    if x.rescore is not None:
        x = replace(x, rescore=x.rescore.in_float32())
    if x.sink_H is not None:
        x = replace(x, sink_H=x.sink_H.to(torch.promote_types(x.sink_H.dtype, torch.float32)))
    return x


def _needs(x: AttentionInputs) -> Set[str]:
    """Return the capabilities that these inputs require of a backend."""
    required = {
        ROTATION: x.z_TBGD is not None and x.rotate,
        AVERAGE: x.average_state,
        POINTWISE: x.bias is not None and x.bias.score is not None,
        BIAS: x.bias is not None and x.bias.score is None,
        GATE: x.log_gate_TBH is not None,
        SINK: x.sink_H is not None,
        WINDOW: x.window is not None,
    }
    if x.rescore is not None:
        required[x.rescore.need] = True
    return {capability for capability, is_required in required.items() if is_required}


def _check(x: AttentionInputs) -> None:
    """Raise ValueError for shapes with which a kernel would read out of bounds, for unequal dtypes,
    and if cached keys would be rotated.
    """
    q = x.q_SBHD
    k = x.k_TBGD
    v = x.v_TBGD
    z = x.z_TBGD
    shapes = f"queries {tuple(q.shape)} and keys {tuple(k.shape)}"
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"{shapes} must have four axes each, (S, B, H, D) and (T, B, G, D)")
    S, B, H, D = q.shape
    T, _, G, _ = k.shape
    if k.shape != (T, B, G, D) or H % G:
        raise ValueError(
            f"{shapes} do not fit: expected (S, B, H, D) and (T, B, G, D), where G divides H"
        )
    if S > T:
        raise ValueError(
            f"there are {S} queries but only {T} keys: each query's own token must be among the"
            " keys"
        )

    # The allowed sizes of each axis; an axis of size 1 is broadcast.
    allowed_sizes: dict[str, tuple[set[int], ...]] = {
        "v_TBGD": ({T}, {B}, {G}, {D}),
        "z_TBGD": ({T}, {1, B}, {1, G}, {D}),
        "joined_TBGE": ({T}, {B}, {G}, {2 * D}),
        "log_gate_TBH": ({T}, {B}, {H}),
        "sink_H": ({H},),
    }
    if x.rotate:
        allowed_sizes["factor_TB1D"] = ({T}, {1, B}, {1}, {D})
    for name, axes in allowed_sizes.items():
        tensor = getattr(x, name)
        if tensor is None:
            continue
        shape = tuple(tensor.shape)
        if len(shape) != len(axes) or any(size not in axis for size, axis in zip(shape, axes)):
            raise ValueError(f"{name} has shape {shape}, which does not fit {shapes}")
    if x.visibility is not None and x.visibility.bounds_2BT.shape != (2, B, T):
        raise ValueError(
            f"the bounds of the visible tokens have shape {tuple(x.visibility.bounds_2BT.shape)};"
            f" expected {(2, B, T)}"
        )

    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"queries, keys and values have dtypes {q.dtype}, {k.dtype}, {v.dtype}; use one"
        )
    if z is not None and z.dtype != v.dtype:
        raise ValueError(
            f"the position state has dtype {z.dtype}; convert it to that of the values, {v.dtype}"
        )
    if x.average_state and z is None:
        raise ValueError(
            "average_state is True, but z_TBGD is None: there is no position state to average"
        )
    if S < T and x.rotate and not (z is None and x.factor_TB1D is None):
        raise ValueError(
            f"rotate is True for {S} queries and {T} keys, but cached keys are already rotated;"
            " rotate new queries and keys with ops.rotation.rotate_groups and pass rotate=False"
        )
