"""Causal attention with a position state, in several backends behind one function.

Queries and keys are rotated by the state z. On request, the attention map p averages z as well as the value: p @ [v |
z]. Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value
groups, D head dimension. As in Megatron, the sequence axis comes first. `backends/naive.py` is the plain form to
compare with.
"""

import importlib
from collections.abc import Set
from dataclasses import replace

from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import AVERAGE, BACKENDS, BIAS, GATE, POINTWISE, ROTATION, lacks
from megatron_tape.ops.backends.choice import unsupported
from megatron_tape.ops.bias import gates_as_bias
from megatron_tape.ops.packing import Packing

_MODULES = {name: name for name in BACKENDS} | {"torch": "sdpa", "torch_wide": "sdpa_wide", "flash_attn": "flash"}


def attention(
    q_SBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    z_TBGD: Tensor | None = None,
    average_state: bool = False,
    packing: Packing | None = None,
    backend: str = "torch",
    **more: object,
) -> tuple[Tensor, Tensor | None]:
    """Call `attend` on `AttentionInputs` with these fields; `more` are its other fields.

    Exported TAPE models call this function if this package is installed.
    """
    given = {"z_TBGD": z_TBGD, "average_state": average_state, "packing": packing, **more}
    return attend(AttentionInputs(q_SBHD=q_SBHD, k_TBGD=k_TBGD, v_TBGD=v_TBGD, **given), backend)


def attend(x: AttentionInputs, backend: str = "torch") -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by z, if given, and average v, and z with `average_state`, by softmax(q k^T / sqrt(D) + ...).

    Returns o and u, both (S, B, H, D); u is None without `average_state`. z has v's dtype. `backend` is one of
    `BACKENDS`; `choose_backend` resolves auto.

    With a cache (T > S, for example in decoding), the caller rotates q by its own state, and each new key once before
    it enters the cache (`ops.rotation.rotate_groups`); `rotate` is then False.

    Raises ValueError if shapes or dtypes do not match, if `rotate` is true with a cache, if there is no state to
    average, or if the backend does not support the inputs.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}, not one of {', '.join(BACKENDS)}; use choose_backend to resolve auto"
        )
    _check_state(x, backend)
    _check_shapes(x)
    if why := lacks(backend, _needs(x)):
        raise ValueError(f"backend is {backend}, which {why}")
    if backend == "triton" and not x.q_SBHD.is_cuda:
        if why := unsupported("triton", x.q_SBHD.device, x.q_SBHD.dtype, x.q_SBHD.shape[-1]):
            raise ValueError(f"backend is triton, which {why}")
    module = importlib.import_module(f"megatron_tape.ops.backends.{_MODULES[backend]}")
    o, *u = module.attend(_prepared(x))
    return o, u[0] if u else None


def _prepared(x: AttentionInputs) -> AttentionInputs:
    """Apply the factors, add the gates to the bias, and convert the bias and rescoring to fp32."""
    q, k, bias = x.q_SBHD, x.k_TBGD, x.bias
    if x.factor_TB1D is not None and x.rotate:
        # Each backend's rotation multiplies by the same complex number, so this may come first.
        q, k = q * x.factor_TB1D, k / x.factor_TB1D
    if x.log_gate_TBH is not None:
        bias = gates_as_bias(x.log_gate_TBH, bias)
    bias, rescore = (None if y is None else y.in_float32() for y in (bias, x.rescore))
    return replace(x, q_SBHD=q, k_TBGD=k, factor_TB1D=None, bias=bias, rescore=rescore)


def _needs(x: AttentionInputs) -> Set[str]:
    """Return the capabilities that these inputs require of a backend."""
    needs = {
        ROTATION: x.z_TBGD is not None and x.rotate,
        AVERAGE: x.average_state,
        POINTWISE: x.bias is not None and x.bias.score is not None,
        BIAS: x.bias is not None and x.bias.score is None,
        GATE: x.log_gate_TBH is not None,
    }
    return {need for need, wanted in needs.items() if wanted} | (set() if x.rescore is None else {x.rescore.need})


def _check_state(x: AttentionInputs, backend: str) -> None:
    z, v = x.z_TBGD, x.v_TBGD
    if x.average_state and z is None:
        raise ValueError("there is no position state to average")
    if z is not None and z.dtype != v.dtype:
        raise ValueError(f"{backend} cannot combine states of {z.dtype} with values of {v.dtype}")


def _check_shapes(x: AttentionInputs) -> None:
    """Reject shapes for which a kernel would read out of bounds, and a second rotation of cached keys."""
    q, k, v, z = x.q_SBHD, x.k_TBGD, x.v_TBGD, x.z_TBGD
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
    if x.packing is not None and x.packing.bounds_2BT.shape != (2, B, T):
        raise ValueError(f"{keys} have document bounds {tuple(x.packing.bounds_2BT.shape)}, not {(2, B, T)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values are of types {q.dtype}, {k.dtype} and {v.dtype}, not of one")
    if S < T and x.rotate and not (z is None and x.factor_TB1D is None):
        raise ValueError(
            f"{S} queries have {T} keys: cached keys were rotated when they arrived; rotate the new ones with "
            "ops.rotation.rotate_groups and pass rotate=False"
        )
    factors = x.factor_TB1D
    if factors is not None and x.rotate and factors.shape not in [(T, batch, 1, D) for batch in (1, B)]:
        raise ValueError(f"{keys} have factors {tuple(factors.shape)}, not (T, B or 1, 1, D)")
    if x.log_gate_TBH is not None and x.log_gate_TBH.shape != (T, B, H):
        raise ValueError(f"gates {tuple(x.log_gate_TBH.shape)} need a value for each of {T} keys and each query head")
