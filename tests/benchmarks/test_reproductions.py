"""The page of comparisons says what the records say."""

from benchmarks import reproductions
from megatron_tape.evaluation.comparison import Comparison, FinishedRun
from megatron_tape.evaluation.results import Score


def test_tables_and_figures_are_those_of_the_records():
    page = reproductions.PAGE.read_text(encoding="utf-8")
    written, pictures = reproductions.written(page)
    assert written == page, "run python -m benchmarks.reproductions --write"
    assert pictures.keys() == reproductions.TASKS.keys()
    assert all((reproductions.PAGE.with_suffix("") / f"{name}.png").is_file() for name in pictures)


def test_a_seed_counts_as_solved_by_where_it_was_trained():
    shown = reproductions.TASKS["grid_navigation"]
    record = reproductions.read_comparison(reproductions.RECORDS / f"{shown.record}.json")
    lines = {line.split("`")[1]: line.split("|") for line in reproductions.table(shown, record) if "`" in line}
    assert [cell.strip() for cell in lines["tape+position_increments=learned"][2:4]] == ["9", "6"]
    assert lines["rope"][3].strip() == "0" and "(p" not in lines["rope"][4]


def test_rates_are_columns_and_the_best_of_a_variant_stands_out():
    shown = reproductions.Shown("made_up", {"IID": ("accuracy", "IID")}, by_rate=True)
    settings = {"optimizer": {"lr": 2e-3}}
    found = {"rope": 0.5, "rope+optimizer.lr=1e-3": 0.25, "cope+optimizer.lr=4e-3": 1.0}
    runs = [
        FinishedRun(name, 1, [Score("accuracy", value, better="higher", group="IID")], 1.0, 1.0, "a CPU", {})
        for name, value in found.items()
    ]
    table = list(reproductions.table(shown, Comparison(settings, {}, "rope", runs)))
    assert table[0] == "| variant | 0.001 | 0.002 | 0.004 |"
    assert table[2:] == ["| `rope` | 0.250 | **0.500** |  |", "| `cope` |  |  | 1.000 |"]
