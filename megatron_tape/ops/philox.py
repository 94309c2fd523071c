"""Random matrices whose parts can be generated independently: an element depends only on a key, its
row and column.

This is Philox4x32-10 ("Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) on int64 tensors. The
counter (column // 4, row, 0, 0) generates four adjacent columns of a row. Normal numbers use the
Box-Muller transform. Its logarithm, sine and cosine use only additions, multiplications, divisions
and square roots, whose results IEEE 754 defines exactly. All devices therefore agree bit for bit,
which they do not for torch's own functions.
"""

import hashlib
import math

import torch
from torch import Tensor

# The constants of Philox4x32-10.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF  # the mask of a 32-bit word
MANTISSA_BITS = 23
SQRT_HALF_BITS = 0x3F3504F3  # the bits of sqrt(1/2) in float32

COSINE = [(-1) ** i / math.factorial(2 * i) for i in range(8)]
SINE = [(-1) ** i / math.factorial(2 * i + 1) for i in range(7)]
ARTANH = [2 / (2 * i + 1) for i in range(5)]
"""Coefficients of the even powers in cos(x), sin(x) / x and 2 artanh(x) / x."""

Key = tuple[int, int]
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def key_of(*parts: object) -> Key:
    """Return the key of `parts`, such as a seed and a parameter's name: a hash of their `repr`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: Words, key: Key) -> Words:
    """Return four random 32-bit words for each counter of four 32-bit words, all as int64; the
    shapes broadcast.
    """
    # Cloned, since `_mix` overwrites words.
    c0, c1, c2, c3 = (word.clone() for word in torch.broadcast_tensors(*counter))
    k0, k1 = key
    for _ in range(ROUNDS):
        # Products may overflow into the sign bit. Only their lower 32 bits count: `_mix`, and the
        # masks at the end, remove the others.
        p0 = c0 * MULTIPLIERS[0]
        p1 = c2 * MULTIPLIERS[1]
        _mix(p1, c1, k0, out=c0)
        _mix(p0, c3, k1, out=c2)
        c1 = p1
        c3 = p0
        k0 = (k0 + INCREMENTS[0]) & WORD
        k1 = (k1 + INCREMENTS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def _mix(
    product: Tensor,
    word: Tensor,
    key: int,
    out: Tensor,
) -> None:
    """Write the upper 32 bits of the products, combined with the words and the key, to `out`."""
    # The shift copies the sign, so the upper half of the result is masked out at the end.
    torch.bitwise_right_shift(product, 32, out=out)
    out.bitwise_xor_(word)
    out.bitwise_xor_(key)
    out.bitwise_and_(WORD)


def normal(
    key: Key,
    rows: range,
    columns: range,
    device: torch.device | str,
) -> Tensor:
    """Return the block `rows` x `columns` of the standard normal float32 matrix of `key`,
    (len(rows), len(columns)).

    Both ranges must have a step of 1. Absolute values are at most 6.8.
    """
    first, second, third, fourth = _words(key, rows, columns, device)
    numbers = torch.empty(*first.shape, 4, device=device)
    box_muller(first, second, numbers[..., :2])
    box_muller(third, fourth, numbers[..., 2:])
    return _crop(numbers, columns)


def uniform(
    key: Key,
    rows: range,
    columns: range,
    device: torch.device | str,
) -> Tensor:
    """Return the block `rows` x `columns` of the float32 matrix of `key`, uniform between 0 and 1,
    (len(rows), len(columns)).

    Both ranges must have a step of 1.
    """
    words = torch.stack(_words(key, rows, columns, device), dim=-1)
    return _crop(_unit(words), columns)


def _words(
    key: Key,
    rows: range,
    columns: range,
    device: torch.device | str,
) -> Words:
    """Return four words (rows, blocks) for each block of four columns that `columns` touches."""
    # The index after the last block: `columns.stop` / 4, rounded up.
    end_block = -(-columns.stop // 4)
    block = torch.arange(columns.start // 4, end_block, device=device)
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return philox((block, row, zero, zero), key)


def _crop(numbers: Tensor, columns: range) -> Tensor:
    """Return the numbers (rows, columns) of `columns` out of blocks of four columns, (rows, blocks,
    4).
    """
    first = columns.start % 4
    return numbers.flatten(1)[:, first : first + len(columns)]


def _unit(word: Tensor) -> Tensor:
    """Convert 32-bit words to float32 numbers between 2^-33 and 1."""
    # The 0.5 excludes zero, which has no logarithm.
    return word.float().add_(0.5).mul_(2.0**-32)


def box_muller(
    first: Tensor,
    second: Tensor,
    pair: Tensor,
) -> None:
    """Write two independent normal numbers into `pair` (..., 2) for the words `first` and `second`
    (...).
    """
    radius = _log(_unit(first)).mul_(-2.0).sqrt_()
    # The last bit of `second` is a sign, its other 31 bits the angle between -pi/2 and pi/2, where
    # few terms of the series suffice. A negative radius yields the other half of the plane.
    radius = torch.where((second & 1).bool(), radius, -radius)
    angle = (second >> 1).float().mul_(2.0**-31).sub_(0.5).mul_(math.pi)
    square = angle * angle
    cosine = _polynomial(square, COSINE)
    sine = _polynomial(square, SINE).mul_(angle)
    torch.mul(cosine, radius, out=pair[..., 0])
    torch.mul(sine, radius, out=pair[..., 1])


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm: the series of artanh, for a mantissa between sqrt(1/2) and
    sqrt(2).
    """
    # Integer arithmetic on the bits of a float splits x = 2^exponent * mantissa exactly.
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    mantissa = (bits - (exponent << MANTISSA_BITS)).view(torch.float32)
    ratio = (mantissa - 1).div_(mantissa + 1)
    series = _polynomial(ratio * ratio, ARTANH).mul_(ratio)
    return exponent.float().mul_(math.log(2)).add_(series)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Return the sum of coefficients[i] * x^i, by Horner's rule in a fixed order of operations."""
    value = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[0])
