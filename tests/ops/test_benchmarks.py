"""The benchmarks of the kernels run to their end, record what they say, and give no figure to what is not exact."""

import json

import pytest
import torch

from benchmarks import attention, position_update, state_precision, timing


def run(monkeypatch, module, *arguments):
    monkeypatch.setattr("sys.argv", [module.__name__, "--tokens=32", "--repetitions=1", *arguments])
    module.main()


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    def call(module, *arguments):
        run(monkeypatch, module, "--record", f"--output={tmp_path}", "--commit=abc", *arguments)
        (path,) = tmp_path.iterdir()
        found = json.loads(path.read_text())
        assert found["environment"]["commit"] == "abc"
        return found["results"]

    return call


def test_attention_is_timed_beside_rope_and_recorded(recorded, monkeypatch):
    monkeypatch.setattr(attention, "LONGEST_LAYER", 16)
    why = {"triton": "is not wanted", "flash_attn": "is not installed"}
    monkeypatch.setattr(attention, "unsupported", lambda backend, *_: why.get(backend))
    short, long = recorded(attention, "--shapes", "4/2x32", "--lengths", "17", "16")
    assert (short["length"], short["batch"], long["length"], long["batch"]) == (16, 2, 17, 1)
    assert "layers forward" not in long
    for what in ("attention", "layers", "layers with update"):
        for direction in ("forward", "forward+backward"):
            measured = short[f"{what} {direction}"]
            assert measured["against"].startswith("rope") and measured["timings"][measured["against"]]["ratio"] == 1
            assert {"tape torch", "tape released"} < set(measured["timings"])
    assert short["rejected"].items() >= why.items()


def test_chosen_candidates_are_timed_beside_every_rope(recorded, monkeypatch, capsys):
    monkeypatch.setattr(attention, "LONGEST_LAYER", 0)
    (result,) = recorded(attention, "--shapes", "2x32", "--lengths", "16", "--only", "released")
    names = set(result["attention forward"]["timings"])
    assert "rope torch" in names and {name for name in names if name.startswith("tape")} == {"tape released"}
    with pytest.raises(SystemExit):
        run(monkeypatch, attention, "--only", "relaesed")
    assert "--only relaesed: not among the candidates here, released, " in capsys.readouterr().err


def test_an_inexact_candidate_has_no_figure(recorded, monkeypatch, capsys):
    exact = attention.with_backend

    def wrong(backend):
        right = exact(backend)
        if backend != "torch":
            return right
        return lambda *x: tuple(1.1 * y for y in right(*x))

    monkeypatch.setattr(attention, "with_backend", wrong)
    monkeypatch.setattr(attention, "LONGEST_LAYER", 0)
    (result,) = recorded(attention, "--shapes", "2x32", "--lengths", "16")
    assert {"rope torch", "tape released"} < set(result["attention forward+backward"]["timings"])
    if not torch.cuda.is_available():
        assert result["rejected"]["triton"].startswith(("is interpreted here", "needs a GPU"))
    assert "tape torch" not in result["attention forward"]["timings"]
    assert "is off by" in result["rejected"]["tape torch"]
    assert "tape torch has no figure: 16 tokens: tensor 0" in capsys.readouterr().out


def test_a_failing_candidate_has_no_figure_and_does_not_stop_the_others(monkeypatch):
    calls = {"works": 0, "fails at once": 0, "fails later": 0}

    def function(name, limit):
        def call():
            calls[name] += 1
            if calls[name] > limit:
                raise torch.OutOfMemoryError("no room")

        return call

    functions = {"works": function("works", 99), "fails at once": function("fails at once", 0)}
    functions["fails later"] = function("fails later", 3)
    timings, failed = timing.timed(functions, 5, torch.device("cpu"))
    assert timings["works"]["repetitions"] == 5 and set(timings) == {"works"}
    assert set(failed) == {"fails at once", "fails later"} and "no room" in failed["fails later"]


def test_a_gpu_fault_that_invalidates_all_results_ends_the_benchmark():
    def call():
        raise torch.AcceleratorError("illegal memory access")

    with pytest.raises(torch.AcceleratorError):
        timing.timed({"faulty": call}, 5, torch.device("cpu"))


@pytest.mark.parametrize(
    "option", ["--shapes=4x32x2", "--shapes=4/3x32", "--shapes=4x31", "--lengths=0", "--tokens=-1", "--repetitions=0"]
)
def test_invalid_options_are_refused(monkeypatch, capsys, option):
    monkeypatch.setattr("sys.argv", ["attention", option])
    with pytest.raises(SystemExit):
        attention.main()
    assert "error: argument" in capsys.readouterr().err


def test_the_update_is_timed_beside_its_floor_and_recorded(recorded, monkeypatch):
    monkeypatch.setattr(position_update, "SHAPES", {"2x32": (2, 2, 32, 8)})
    (result,) = recorded(position_update)
    for direction in ("forward", "forward+backward"):
        timing = result[direction]["timings"]["torch"]
        assert timing["of_floor"] == timing["seconds"] / result[direction]["floor_seconds"]


def test_a_state_in_bf16_loses_small_updates_and_one_in_fp32_does_not():
    layers = [state_precision.draw_layer(torch.Generator().manual_seed(i)) for i in range(8)]
    for size, lost in ((1e-3, 0.5), (1e-1, 0.01)):
        found = state_precision.drift(layers, size)
        assert found["bf16"]["update_error"] > lost and found["fp32"]["update_error"] < 0.01
        assert found["fp32"]["score_error"] < found["bf16"]["score_error"]
