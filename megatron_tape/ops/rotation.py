"""The complex product of queries and keys with the position state.

A vector of D reals holds F = D/2 complex numbers as [real | imaginary], the pairs (j, j + F) of RoPE's rotate-half.
The plain form to compare with is `megatron_tape.model.reference.rotate`.
"""

import torch
from torch import Tensor


def rotate(x: Tensor, z: Tensor) -> Tensor:
    """Return the product x * z of complex pairs; z (..., D) broadcasts over the leading axes of x (..., D)."""
    x_re, x_im = x.chunk(2, dim=-1)
    z_re, z_im = z.chunk(2, dim=-1)
    return torch.cat([x_re * z_re - x_im * z_im, x_re * z_im + x_im * z_re], dim=-1)


def rotate_groups(q_SBHD: Tensor, z_SBGD: Tensor) -> Tensor:
    """Rotate each query head by the state of its group; z may have one group for all heads."""
    groups = z_SBGD.shape[2]
    return rotate(q_SBHD.unflatten(2, (groups, -1)), z_SBGD.unsqueeze(3)).flatten(2, 3)
