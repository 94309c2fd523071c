"""Formatting of numbers with units."""

import pytest

from megatron_tape.text import byte_size, flop_count


@pytest.mark.parametrize(
    "value, shown",
    [
        (0, "0 FLOP"),
        (2.5e7, "25.0 MFLOP"),
        (1.5e9, "1.50 GFLOP"),
        (9.99e11, "999 GFLOP"),
        (9.997e11, "1.00 TFLOP"),
        (9.996e9, "10.0 GFLOP"),
        (99.96e9, "100 GFLOP"),
        (4.2e17, "420 PFLOP"),
        (4.2e18, "4.20 EFLOP"),
    ],
)
def test_flops_are_printed_with_three_digits(value, shown):
    assert flop_count(value) == shown


@pytest.mark.parametrize(
    "value, shown",
    [
        (12, "12 bytes"),
        (2**20 * 25.3, "25.3 MiB"),
        (2**30 * 1.5, "1.50 GiB"),
        (2**30 * 139, "139 GiB"),
    ],
)
def test_bytes_are_printed_with_three_digits_and_a_binary_unit(value, shown):
    assert byte_size(value) == shown
