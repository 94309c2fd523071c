"""Figures as programs print them."""

import pytest

from megatron_tape.text import byte_size, flops_per_second


@pytest.mark.parametrize(
    "value, shown",
    [
        (0, "0 FLOP/s"),
        (2.5e7, "25.0 MFLOP/s"),
        (1.5e9, "1.50 GFLOP/s"),
        (9.99e11, "999 GFLOP/s"),
        (9.997e11, "1.00 TFLOP/s"),
        (4.2e17, "420 PFLOP/s"),
        (4.2e18, "4200 PFLOP/s"),
    ],
)
def test_flops_have_the_unit_that_shows_three_digits(value, shown):
    assert flops_per_second(value) == shown


@pytest.mark.parametrize(
    "value, shown",
    [(12, "12 bytes"), (2**20 * 25.3, "25.3 MiB"), (2**30 * 1.5, "1.50 GiB"), (2**30 * 139, "139 GiB")],
)
def test_bytes_have_the_binary_unit_that_shows_three_digits(value, shown):
    assert byte_size(value) == shown
