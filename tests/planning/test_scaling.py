"""The tables of docs/scaling.md are what their command prints: some rows, as all take minutes."""

import pytest

from megatron_tape.planning.search import GIB, HEADROOM
from pretrain import scaling

PAGE = scaling.PAGE.read_text(encoding="utf-8")
TABLES = PAGE.partition(scaling.BEGINNING)[2].partition(scaling.END)[0]
SAMPLE = [
    ("155M", 4096, 8),
    ("155M", 131072, 4096),
    ("1B", 32768, 512),
    ("7B", 131072, 64),
    ("70B", 4096, 8),
    ("70B", 4096, 512),
]


@pytest.mark.parametrize("model, length, gpus", SAMPLE)
def test_a_row_of_the_page_is_what_the_command_prints(model, length, gpus):
    assert f"\n{scaling.size_row(model, length, gpus)}\n" in TABLES, "run python -m pretrain.scaling --write"


def test_the_comparison_with_rope_is_what_the_command_prints():
    row = scaling.phase_row("155M", 32768)
    assert f"\n{row}\n" in TABLES
    shares = [float(cell) for cell in row.split("|")[3:-1]]
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=0.3) and 20 < shares[0] < 100 * 3 / 7


def test_the_page_has_every_size_length_and_number_of_gpus():
    for model in scaling.MODELS:
        table = TABLES.partition(f"### {model}\n")[2].partition("###")[0]
        for length in scaling.LENGTHS:
            assert all(f"\n| {gpus:,} | {length:,} | " in table for gpus in scaling.GPUS)
    assert "not measured" in PAGE


def test_a_million_tokens_of_the_1b_model_fit_on_64_gpus():
    best = scaling.find("1B", scaling.LONGEST, scaling.COMPARED_ON).fitting[0]
    assert best.memory.peak < (1 - HEADROOM) * scaling.HARDWARE.memory * GIB
    assert best.plan.model.seq_length == 2**20 and f"of {scaling.LONGEST:,} tokens" in TABLES
    assert scaling.described(best) in TABLES
