import json

import pytest

from benchmarks import perplexity


def test_a_ratio_is_measured_and_recorded(tmp_path, monkeypatch, capsys):
    path = tmp_path / "perplexity.json"
    monkeypatch.setattr("sys.argv", ["perplexity", "--toy", f"--output={path}", "--commit=abc"])
    perplexity.main()
    assert "ratio" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert len(found["pairs"]["task"]) == len(found["pairs"]["loop"]) == 3 and found["task_over_loop"] > 0
    assert found["environment"]["commit"] == "abc"


def test_losses_that_differ_give_no_figure(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["perplexity", "--toy"])
    monkeypatch.setattr(perplexity, "bare_loop", lambda model, task: 5.0)
    with pytest.raises(SystemExit, match="no figure is given"):
        perplexity.main()
    assert "ratio" not in capsys.readouterr().out
