"""Causal attention with a position state; `attend` calls one of the backends in `ops/backends`.

Queries and keys are rotated by the position state z. For TAPE, the attention weights p average z
along with the values v: p @ [v | z]. The reference is `backends/naive.py`. Axes: S queries, T keys
(the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D head
dimension. As in Megatron, the sequence axis comes first.
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

_MODULES = {name: name for name in BACKENDS} | {
    "torch": "sdpa",
    "torch_wide": "sdpa_wide",
    "flash_attn": "flash",
}


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
    """Return the result of `attend` for `AttentionInputs` with these fields; `more` holds further
    fields by name.

    Exported TAPE models call this function if this package is installed.
    """
    fields = {"z_TBGD": z_TBGD, "average_state": average_state, "packing": packing, **more}
    return attend(AttentionInputs(q_SBHD=q_SBHD, k_TBGD=k_TBGD, v_TBGD=v_TBGD, **fields), backend)


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
    _check_state(x)
    _check_shapes(x)
    if why := lacks(backend, _needs(x)):
        raise ValueError(f"backend is {backend}, which {why}; choose another")
    if backend == "triton" and not x.q_SBHD.is_cuda:
        if why := unsupported("triton", x.q_SBHD.device, x.q_SBHD.dtype, x.q_SBHD.shape[-1]):
            raise ValueError(f"backend is triton, which {why}; choose another")
    module = importlib.import_module(f"megatron_tape.ops.backends.{_MODULES[backend]}")
    o, *u = module.attend(_prepared(x))
    return o, u[0] if u else None


def _prepared(x: AttentionInputs) -> AttentionInputs:
    """Return `x` with its factors applied to q and k, its gates added to its bias, and bias and
    rescoring in fp32.
    """
    q = x.q_SBHD
    k = x.k_TBGD
    bias = x.bias
    if x.factor_TB1D is not None and x.rotate:
        # Backends rotate afterwards. The order does not matter, as both parts of a number have the
        # same factor.
        q = q * x.factor_TB1D
        k = k / x.factor_TB1D
    if x.log_gate_TBH is not None:
        bias = gates_as_bias(x.log_gate_TBH, bias)
    if bias is not None:
        bias = bias.in_float32()
    rescore = x.rescore
    if rescore is not None:
        rescore = rescore.in_float32()
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
    return {need for need, required in needs.items() if required} | (
        set() if x.rescore is None else {x.rescore.need}
    )


def _check_state(x: AttentionInputs) -> None:
    z = x.z_TBGD
    v = x.v_TBGD
    if x.average_state and z is None:
        raise ValueError(
            "average_state is True, but z_TBGD is None: there is no position state to average"
        )
    if z is not None and z.dtype != v.dtype:
        raise ValueError(
            f"the position state has dtype {z.dtype}; convert it to that of the values, {v.dtype}"
        )


def _check_shapes(x: AttentionInputs) -> None:
    """Raise ValueError for shapes with which a kernel would read out of bounds, or if cached keys
    would be rotated.
    """
    q = x.q_SBHD
    k = x.k_TBGD
    v = x.v_TBGD
    z = x.z_TBGD
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"queries have {q.dim()} axes and keys {k.dim()}; expected (S, B, H, D) and (T, B,"
            " G, D)"
        )
    (S, B, H, D), (T, G) = q.shape, k.shape[::2]
    queries = f"queries {tuple(q.shape)}"
    keys = f"keys {tuple(k.shape)}"
    if k.shape != (T, B, G, D) or H % G:
        raise ValueError(
            f"{queries} do not fit {keys}: expected (S, B, H, D) and (T, B, G, D), where G"
            " divides H"
        )
    if S > T:
        raise ValueError(
            f"there are {S} queries but only {T} keys: each query's own token must be among the"
            " keys"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"values have shape {tuple(v.shape)}; expected that of the keys, {tuple(k.shape)}"
        )
    if z is not None and (
        z.shape[::3] != (T, D) or z.shape[1] not in (1, B) or z.shape[2] not in (1, G)
    ):
        raise ValueError(
            f"the position state z_TBGD has shape {tuple(z.shape)}; expected (T, B or 1, G or 1,"
            f" D), where {keys} are (T, B, G, D)"
        )
    if z is not None and D % 2:
        raise ValueError(
            f"the head dimension is {D}, which cannot be split into pairs to rotate; it must be"
            " even"
        )
    if x.packing is not None and x.packing.bounds_2BT.shape != (2, B, T):
        raise ValueError(
            f"document bounds have shape {tuple(x.packing.bounds_2BT.shape)}; expected {(2, B, T)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"queries, keys and values have dtypes {q.dtype}, {k.dtype}, {v.dtype}; convert them"
            " to one"
        )
    if S < T and x.rotate and not (z is None and x.factor_TB1D is None):
        raise ValueError(
            f"rotate is True for {S} queries and {T} keys, but cached keys are already rotated;"
            " rotate new queries and keys with ops.rotation.rotate_groups and pass rotate=False"
        )
    factors = x.factor_TB1D
    if (
        factors is not None
        and x.rotate
        and factors.shape not in [(T, batch, 1, D) for batch in (1, B)]
    ):
        raise ValueError(
            f"factor_TB1D has shape {tuple(factors.shape)}; expected {(T, B, 1, D)} or"
            f" {(T, 1, 1, D)}"
        )
    if x.log_gate_TBH is not None and x.log_gate_TBH.shape != (T, B, H):
        raise ValueError(
            f"log_gate_TBH has shape {tuple(x.log_gate_TBH.shape)}; expected (T, B, H) ="
            f" {(T, B, H)}"
        )
