"""Counter-based random numbers: published test vectors, independence of partitioning, and
distributions.
"""

import math

import pytest
import torch

from megatron_tape.ops import philox
from megatron_tape.ops.philox import key_of, normal, uniform

# From kat_vectors in the authors' library Random123.
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_words_equal_the_published_test_vectors(counter, key, words):
    counter, key = ([int(word, 16) for word in part.split()] for part in (counter, key))
    generated = philox.philox(
        tuple(torch.tensor(word) for word in counter),
        tuple(key),
    )
    assert " ".join(f"{int(word):08x}" for word in generated) == words


@pytest.mark.parametrize("draw", [normal, uniform])
def test_a_part_has_the_same_numbers_as_the_whole(draw):
    whole = draw(key_of(3, "matrix"), range(41), range(53), "cpu")
    assert len(whole.unique()) > 0.999 * whole.numel()
    for rows, columns in (((7, 8), (0, 53)), ((0, 41), (5, 6)), ((3, 30), (6, 47))):
        part = draw(
            key_of(3, "matrix"),
            range(*rows),
            range(*columns),
            "cpu",
        )
        assert torch.equal(part, whole[slice(*rows), slice(*columns)])
    for parts in ((4, "matrix"), (3, "matrix2")):
        assert not (
            draw(
                key_of(*parts),
                range(41),
                range(53),
                "cpu",
            )
            == whole
        ).any()


def test_numbers_are_normal_or_uniform_and_independent():
    key = key_of(1, "moments")
    n = 600 * 600
    x = normal(key, range(600), range(600), "cpu").double()
    u = uniform(key, range(600), range(600), "cpu").double()
    assert 0 < u.min()
    assert u.max() <= 1
    for numbers in (torch.special.ndtr(x), u):
        distance = numbers.flatten().sort().values - torch.arange(n) / n
        assert distance.abs().max() < 1.95 * n**-0.5  # Kolmogorov and Smirnov's, at 0.1 %
    correlations = torch.corrcoef(x.view(-1, 4).T) - torch.eye(4)
    assert correlations.abs().max() < 4 * (n / 4) ** -0.5


def test_normal_numbers_follow_box_and_muller():
    words = torch.tensor(
        [
            0,
            1,
            2**31,
            2**32 - 2**8,
            123456789,
            2**16 + 7,
        ]
    )
    first, second = (word.flatten() for word in torch.meshgrid(words, words, indexing="ij"))
    pair = torch.empty(len(first), 2)
    philox.box_muller(first, second, pair)
    radius = (-2 * ((first.double() + 0.5) * 2.0**-32).log()).sqrt()
    sign = 2.0 * (second & 1) - 1
    angle = ((second >> 1).double() * 2.0**-31 - 0.5) * math.pi
    expected = torch.stack([angle.cos(), angle.sin()], dim=-1) * (radius * sign)[:, None]
    assert (pair - expected).abs().max() < 3e-6
