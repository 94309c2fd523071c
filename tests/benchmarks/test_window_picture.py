"""Test of the picture of which token attends to which."""

from pathlib import Path

from benchmarks import window_picture


def test_the_documented_picture_is_what_the_benchmark_draws(tmp_path):
    output = tmp_path / "windows.svg"
    window_picture.main(["--output", str(output)])
    documented = Path(__file__).parents[2] / "docs" / "windows.svg"
    assert output.read_bytes() == documented.read_bytes()

    # A band of 12 tokens, a triangle, and bands of 7 and 5 tokens. The first four rows of a band
    # have 1 to 4 keys, the others 4.
    visible = (10 + 8 * 4) + 78 + (10 + 3 * 4) + (10 + 1 * 4)
    assert output.read_text().count(window_picture.SEEN) == visible
