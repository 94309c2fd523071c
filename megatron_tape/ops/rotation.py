"""The complex product of queries and keys with the position state.

A vector of D reals holds F = D/2 complex numbers as [real | imaginary], the pairs (j, j + F) of
RoPE's rotate-half. The reference is `megatron_tape.model.reference.rotate`.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


def rotate(x: Tensor, z: Tensor) -> Tensor:
    """Return the product x * z of complex pairs; z (..., D) broadcasts over the leading axes of x
    (..., D).
    """
    x_re, x_im = x.chunk(2, dim=-1)
    z_re, z_im = z.chunk(2, dim=-1)
    real = x_re * z_re - x_im * z_im
    imaginary = x_re * z_im + x_im * z_re
    return torch.cat([real, imaginary], dim=-1)


def inverse(z: Tensor) -> Tensor:
    """Return 1 / z for complex pairs (..., D)."""
    z_re, z_im = z.chunk(2, dim=-1)
    squared_modulus = z_re.square() + z_im.square()
    return torch.cat([z_re / squared_modulus, -z_im / squared_modulus], dim=-1)


def rotate_groups(q_SBHD: Tensor, z_SBGD: Tensor) -> Tensor:
    """Return the heads (S, B, H, D) of queries or keys, each rotated by the state of its group; G
    may be 1.
    """
    groups = z_SBGD.shape[2]
    q_SBGRD = q_SBHD.unflatten(2, (groups, -1))
    return rotate(q_SBGRD, z_SBGD.unsqueeze(3)).flatten(2, 3)


def phases(
    p_SBG: Tensor,
    theta_F: Tensor,
    modulus: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return modulus * exp(i p theta), (S, B, G, D) in `dtype`, for real positions p in float64.

    Angles are computed and reduced modulo 2 pi in float64, so that the error does not grow with the
    position. Only the positions are saved for the backward pass.
    """
    return _Phases.apply(p_SBG, theta_F, modulus, dtype)


class _Phases(Function):
    """The differentiable form of `_phases`."""

    @staticmethod
    def forward(ctx, p, theta, modulus, dtype):
        ctx.save_for_backward(p, theta)
        ctx.modulus = modulus
        ctx.dtype = dtype
        return _phases(p, theta, modulus, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        p, theta = ctx.saved_tensors
        re, im = _phases(
            p,
            theta,
            ctx.modulus,
            ctx.dtype,
        ).chunk(2, dim=-1)
        dz_re, dz_im = dz.chunk(2, dim=-1)
        # The derivative of exp(i a) by the angle a is i exp(i a).
        d_angles = re * dz_im - im * dz_re
        return d_angles.double() @ theta.double(), None, None, None


def _phases(
    p: Tensor,
    theta: Tensor,
    modulus: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the result of `phases`, without a gradient."""
    return _of_angles(p[..., None] * theta.double(), modulus, dtype)


def phases_of_angles(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(i angles), (..., D) in `dtype`, for angles (..., D/2) in float64.

    Angles are reduced modulo 2 pi in float64, so that the error does not grow with them. Only the
    result is saved for the backward pass; a rotation by it saves the same tensor.
    """
    return _PhasesOfAngles.apply(angles, dtype)


class _PhasesOfAngles(Function):
    """The differentiable form of `phases_of_angles`."""

    @staticmethod
    def forward(ctx, angles, dtype):
        z = _of_angles(angles, 1.0, dtype)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        (z,) = ctx.saved_tensors
        re, im = z.double().chunk(2, dim=-1)
        dz_re, dz_im = dz.chunk(2, dim=-1)
        # The derivative of exp(i a) by the angle a is i exp(i a).
        return re * dz_im - im * dz_re, None


def _of_angles(angles: Tensor, modulus: float, dtype: torch.dtype) -> Tensor:
    """Return modulus * exp(i angles), (..., D) in `dtype`, for angles (..., D/2) in float64."""
    angles = torch.remainder(angles, 2 * math.pi)
    # Reduced angles are small, so sines and cosines in fp32 are exact enough.
    if dtype is not torch.float64:
        angles = angles.float()
    unit = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return (unit * modulus).to(dtype)


SHORTEST = 1e-3
"""Smallest modulus that `with_modulus` normalizes. It scales smaller numbers linearly, which bounds
the gradients.
"""


def with_modulus(z: Tensor, modulus: float) -> Tensor:
    """Return the complex numbers z (..., D) scaled to `modulus`, saving only z for the backward
    pass.

    Numbers with a modulus below `SHORTEST` are multiplied by modulus / SHORTEST, so that gradients
    are finite at zero.
    """
    return _WithModulus.apply(z, modulus)


class _WithModulus(Function):
    """The differentiable form of `with_modulus`."""

    @staticmethod
    def forward(ctx, z, modulus):
        ctx.save_for_backward(z)
        ctx.modulus = modulus
        factor = modulus / _moduli(z).clamp(min=SHORTEST)
        return z * _twice(factor).to(z.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (z,) = ctx.saved_tensors
        moduli = _moduli(z)
        clamped = moduli.clamp(min=SHORTEST)
        re, im = z.chunk(2, dim=-1)
        dy_re, dy_im = dy.chunk(2, dim=-1)

        # The modulus of the result is fixed, so the part of the gradient along z is removed.
        # Numbers below `SHORTEST` are only scaled, and keep the whole gradient.
        along = (re * dy_re + im * dy_im) / clamped.square()
        along = torch.where(moduli > SHORTEST, along, 0)
        across = dy - z * _twice(along)
        dz = _twice(ctx.modulus / clamped) * across
        return dz.to(z.dtype), None


def _moduli(z: Tensor) -> Tensor:
    """Return the moduli (..., D/2) of the complex numbers z (..., D), at least in float32."""
    if z.dtype is not torch.float64:
        z = z.float()
    return torch.hypot(*z.chunk(2, dim=-1))


def _twice(x: Tensor) -> Tensor:
    """Return a factor (..., D) of real and imaginary parts, given one (..., D/2) per number."""
    return torch.cat([x, x], dim=-1)
