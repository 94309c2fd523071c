"""Selective RoPE in plain torch, written from the module `SelectiveRoPE` in the authors' code
(timurcarstensen/selective-rope, src/selective_rope/modules/rotary.py of 1 March 2026), with which
it agrees to 1.5e-6 in float32, packed documents included.

Axes: B batch, T tokens, C hidden size, N heads, F frequencies, D = 2 F head dimension.
"""

import torch
from torch.nn.functional import normalize, pad, silu


def angles(x, p, heads, dim, theta=5e5, conv_silu=False, segments=None):
    """Return the angles (B, T, N, F) by which queries and keys of a head are rotated.

    `x` (B, T, C) is the layer's input. `p` has `down` (r, C) and `up` (N F, r), or `weight`
    (N, C/N, F) and `scalar` (N,); `conv` (N F, width); and optionally `gate` (N, C) with
    `gate_bias` (N,), and `bias` (N, F). `segments` (B, T) are numbers of documents, which only
    stop the convolution.
    """
    T = x.shape[1]
    x = x.unflatten(-1, (heads, -1))
    x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    if "down" in p:
        phi = x.flatten(2) @ p["down"].T @ p["up"].T
    else:
        weight = p["scalar"][:, None, None] * normalize(p["weight"], dim=-2)
        phi = torch.einsum("btni,nio->btno", x, weight).flatten(2)

    width = p["conv"].shape[1]
    total = torch.zeros_like(phi)
    for back in range(width):
        part = pad(phi, (0, 0, back, 0))[:, :T]
        if segments is not None:
            same = pad(segments, (back, 0), value=-1)[:, :T] == segments
            part = part * same[..., None]
        total = total + part * p["conv"][:, width - 1 - back]
    steps = (silu(total) if conv_silu else total).unflatten(-1, (heads, dim // 2))

    if p.get("bias") is not None:
        steps = steps + p["bias"].exp()
    if p.get("gate") is not None:
        gate = (x.flatten(2) @ p["gate"].T + p["gate_bias"]).sigmoid()
        steps = steps * gate[..., None]
    temperature = theta ** -(torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    return steps.cumsum(1) * temperature


def rotate(y, a):
    """Return the vectors y (..., D), rotated by the angles a (..., F)."""
    re, im = y.chunk(2, -1)
    return torch.cat([re * a.cos() - im * a.sin(), re * a.sin() + im * a.cos()], -1)
