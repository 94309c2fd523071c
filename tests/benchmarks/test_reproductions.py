"""The page of comparisons says what the records say."""

from benchmarks import reproductions


def test_tables_and_figures_are_those_of_the_records():
    page = reproductions.PAGE.read_text(encoding="utf-8")
    written, pictures = reproductions.written(page)
    assert written == page, "run python -m benchmarks.reproductions --write"
    assert pictures.keys() == reproductions.TASKS.keys()
    assert all((reproductions.PAGE.with_suffix("") / f"{name}.png").is_file() for name in pictures)


def test_a_seed_counts_as_learned_by_where_it_was_trained():
    shown = reproductions.TASKS["grid_navigation"]
    record = reproductions.read_comparison(reproductions.RECORDS / f"{shown.record}.json")
    lines = {line.split("`")[1]: line.split("|") for line in reproductions.table(shown, record) if "`" in line}
    assert [cell.strip() for cell in lines["tape+position_increments=learned"][2:4]] == ["9", "6"]
    assert lines["rope"][3].strip() == "0" and "(p" not in lines["rope"][4]
