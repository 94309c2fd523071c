"""`benchmarks.encodings`: it records what it measures, and gives no figure to attention that is wrong."""

import gc
import json
import weakref

import pytest
import torch

from benchmarks import encodings
from megatron_tape.ops.backends import tiled

TOY = ["--shape=toy", "--repetitions=1", "--context=32", "--tokens=2"]


def measured(folder, *options):
    path = folder / "record.json"
    threads = torch.get_num_threads()
    assert encodings.main([*TOY, f"--output={path}", "--commit=abc", *options]) == 0
    torch.set_num_threads(threads)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def built():
    """Weak references to every parameter of the models that were measured."""
    return []


@pytest.fixture(scope="module")
def several(tmp_path_factory, built):
    def watched(config, layout):
        contestant = build(config, layout)
        built.extend(weakref.ref(parameter) for parameter in contestant.model.parameters())
        return contestant

    build = encodings.built
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "built", watched)
        return measured(tmp_path_factory.mktemp("several"), "--only=alibi,cope,tape")["encodings"]


def test_every_encoding_stands_beside_rope(several):
    assert several["tape"]["additional_parameters"] > several["alibi"]["additional_parameters"] == 0
    for name in ("alibi", "cope", "tape"):
        row = several[name]
        assert 0.05 < row["step_over_rope"] < 50 and 0.5 < row["memory_over_rope"] < 2
        assert 0.01 < row["decoding_over_rope"] < 100 and not {"failed", "decoding_failed"} & row.keys()


def test_measured_models_are_freed(several, built):
    gc.collect()
    assert built and not any(parameter() is not None for parameter in built)


def test_the_table_says_what_is_missing(several):
    lines = encodings.table({"encodings": several | {"fire": {"additional_parameters": 3, "failed": "it is wrong"}}})
    assert lines[2].startswith("| rope | 1 | 1 | ") and len(lines) == 2 + len(several) + 1 + 1
    assert "| fire | - | - | +3 | - |" in lines and lines[-1] == "fire: no figure: it is wrong"


def test_wrong_attention_gets_no_figure(monkeypatch, tmp_path):
    right = tiled.attend
    monkeypatch.setattr(tiled, "attend", lambda x: tuple(y.roll(1, 0) for y in right(x)))
    row = measured(tmp_path, "--only=alibi")["encodings"]["alibi"]
    assert "differ" in row["failed"] and "step_over_rope" not in row


def test_an_unknown_encoding_is_refused(capsys):
    with pytest.raises(SystemExit):
        encodings.parse(["--only=alibi,dream"])
    assert "dream is not one of" in capsys.readouterr().err
