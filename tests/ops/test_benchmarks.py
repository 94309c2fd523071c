"""The benchmarks of the kernels run to their end, record what they say, and give no figure to what is not exact."""

import json
import time

import apart_cases
import pytest
import torch
from ops_interpreter import rounding_to_nearest

from benchmarks import (
    apart,
    attention,
    attention_candidates,
    attention_timing,
    generate,
    position_update,
    state_precision,
    timing,
)
from benchmarks.environment import Record
from megatron_tape.io.records import check_shape
from megatron_tape.ops.measured import Row

ON_GPU = torch.cuda.is_available()


def run(monkeypatch, module, *arguments):
    monkeypatch.setattr("sys.argv", [module.__name__, "--tokens=32", "--repetitions=1", *arguments])
    with rounding_to_nearest():
        module.main()


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    def call(module, *arguments):
        path = tmp_path / "here" / "record.json"
        run(monkeypatch, module, f"--output={path}", "--commit=abc", *arguments)
        found = json.loads(path.read_text())
        assert found["environment"]["commit"] == "abc"
        return found["results"]

    return call


def test_attention_is_timed_beside_rope_and_recorded(recorded, monkeypatch):
    monkeypatch.setattr(attention_timing, "LONGEST_LAYER", 16)
    why = {"triton": "is not wanted", "flash_attn": "is not installed"}
    monkeypatch.setattr(attention_candidates, "unsupported", lambda backend, *_: why.get(backend))
    short, long = recorded(attention, "--shapes", "4/2x32", "--lengths", "17", "16")
    assert (short["length"], short["batch"], long["length"], long["batch"]) == (16, 2, 17, 1)
    assert "layers forward" not in long
    for what in ("attention", "layers", "layers with update"):
        for direction in ("forward", "forward+backward"):
            measured = short[f"{what} {direction}"]
            assert measured["against"].startswith("rope") and measured["timings"][measured["against"]]["ratio"] == 1
            assert {"tape torch", "tape released"} < set(measured["timings"])
    assert short["rejected"].items() >= why.items()
    timings, of_rope = short["attention forward+backward"]["timings"], short["of_rope"]
    names = [name for name in timings if name.startswith("tape") and name.split()[1] in attention_candidates.BACKENDS]
    assert "tape released" not in names and of_rope["tape"] == min(names, key=lambda name: timings[name]["seconds"])
    assert of_rope["ratio"] == timings[of_rope["tape"]]["seconds"] / timings[of_rope["rope"]]["seconds"]


@pytest.mark.skipif(ON_GPU, reason="a GPU does not interpret")
def test_interpreted_kernels_take_the_same_way_without_a_time(recorded, monkeypatch, capsys):
    (result,) = recorded(attention, "--toy", "--only", "triton")
    for what in ("attention", "layers", "layers with update"):
        for direction in ("forward", "forward+backward"):
            timings = result[f"{what} {direction}"]["timings"]
            assert timings["tape triton"] == timings["rope triton"] == {"interpreted": True}
            assert "seconds" in timings["rope torch"]
    assert "of_rope" not in result and "tape triton" not in result["rejected"]
    assert "interpreted here: exact, not timed" in capsys.readouterr().out
    (result,) = recorded(position_update, "--toy")
    assert result["forward+backward"]["timings"]["triton"] == {"interpreted": True}


def test_chosen_candidates_are_timed_beside_every_rope(recorded, monkeypatch, capsys):
    monkeypatch.setattr(attention_timing, "LONGEST_LAYER", 0)
    (result,) = recorded(attention, "--shapes", "2x32", "--lengths", "16", "--only", "released")
    names = set(result["attention forward"]["timings"])
    assert "rope torch" in names and {name for name in names if name.startswith("tape")} == {"tape released"}
    with pytest.raises(SystemExit):
        run(monkeypatch, attention, "--only", "relaesed")
    assert "--only relaesed: not among the candidates here, released, " in capsys.readouterr().err


def test_an_inexact_candidate_has_no_figure(recorded, monkeypatch, capsys):
    exact = attention_candidates.with_backend

    def wrong(backend):
        right = exact(backend)
        if backend != "torch":
            return right
        return lambda *x: tuple(1.1 * y for y in right(*x))

    monkeypatch.setattr(attention_candidates, "with_backend", wrong)
    monkeypatch.setattr(attention_timing, "LONGEST_LAYER", 0)
    (result,) = recorded(attention, "--shapes", "2x32", "--lengths", "16", "--only", "torch", "released")
    assert {"rope torch", "tape released"} < set(result["attention forward+backward"]["timings"])
    assert "tape torch" not in result["attention forward"]["timings"]
    assert "is off by" in result["rejected"]["tape torch"]
    assert "tape torch has no figure: 16 tokens: tensor 0" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["fail", "crash", "hang"])
def test_a_process_that_ends_early_leaves_what_it_told(what):
    heard = []
    started = time.monotonic()
    patience = 30.0 if what != "hang" else 3.0
    deadline = started + 60
    why = apart.run_apart(apart_cases.begin_and, what, hear=heard.append, deadline=deadline, patience=patience)
    assert heard == ["first", {"known": what}]
    assert why == {"fail": "ValueError: as asked", "crash": "its process ended with status -9"}.get(
        what, "was stuck for 3 seconds"
    )


def test_a_process_that_ends_well_is_no_failure_and_one_without_time_is_ended():
    heard = []
    assert apart.run_apart(apart_cases.begin_and, "end", hear=heard.append, deadline=time.monotonic() + 60) is None
    assert heard == ["first", {"known": "end"}]
    assert apart.run_apart(apart_cases.begin_and, "end", hear=heard.append, deadline=0) == "there was no time left"


def test_what_crashed_is_left_out_when_everything_else_is_measured_again(monkeypatch, capsys):
    def crash_at(bad):
        def run_here(_work, _deadline, faulty, *, hear, deadline):
            for name in ("a", "b", "c"):
                if name not in faulty:
                    hear(name)
                    if name in bad:
                        return "crashed"
            hear({"figure": 1, "rejected": dict(faulty)})

        return run_here

    kept = []
    for bad, found, faulty in (("b", {"figure": 1}, "b"), ("ac", {"figure": 1}, "ac"), ("abc", {"figure": 1}, "abc")):
        monkeypatch.setattr(apart, "run_apart", crash_at(bad))
        measurements = apart.Measurements(1.0, apart=True)
        measurements.run(None, keep=kept.append)
        assert kept[-1] == found | {"rejected": dict.fromkeys(faulty, "crashed")}
    monkeypatch.setattr(apart, "run_apart", lambda *_, **__: "no context")
    apart.Measurements(1.0, apart=True).run(None, keep=kept.append)
    assert kept[-1] == {"rejected": {"everything else": "no context"}}
    assert "b failed, and with it the process: crashed" in capsys.readouterr().err


def test_nothing_begins_when_time_is_over(monkeypatch, tmp_path, capsys):
    path = tmp_path / "record.json"
    late = ("--shapes", "2x32", "--lengths", "16", "17", "--minutes", "1e-9", "--output", str(path))
    run(monkeypatch, attention, *late)
    assert "no time for 2x32 at 16, 2x32 at 17; --minutes gives more" in capsys.readouterr().err
    run(monkeypatch, position_update, "--minutes", "1e-9")
    assert "no time for 12x64 with a state in fp32 and what follows" in capsys.readouterr().err
    monkeypatch.setattr(attention_timing, "candidates", lambda *_: ({"tape torch": None}, {}))
    arguments = type("Arguments", (), {"precision": "fp32", "only": None})
    settings = (None, 0.0, {}, (2, 2, 32), 16, arguments, torch.device("cpu"))
    assert attention_timing.exact_candidates(*settings) == ({}, {"tape torch": "there was no time left"})


def test_rows_for_the_table_name_the_gpu_and_the_backends_of_a_model(tmp_path):
    record = Record("attention", tmp_path / "x.json", "abc")
    result = {"heads": 4, "groups": 2, "head_dim": 32, "length": 64, "batch": 1}
    times = {"tape triton": 1.0, "tape sdpa": 0.1, "rope torch": 2.0, "tape triton widened": 0.1}
    timings = {name: {"seconds": seconds} for name, seconds in times.items()} | {"tape torch": {"interpreted": True}}
    results = [result | {"attention forward+backward": {"timings": timings}}, result]
    record.origin["gpus"] = []
    assert attention.table_rows(results, "bf16", record) == []
    record.origin["gpus"] = ["NVIDIA H100"]
    tape, rope = attention.table_rows(results, "bf16", record)
    assert (tape["seconds"], tape["averages"], rope["seconds"]) == ({"triton": 1.0}, True, {"torch": 2.0})
    assert (tape["gpu"], tape["record"], tape["commit"], tape["seq_length"]) == ("NVIDIA H100", "x.json", "abc", 64)
    check_shape([tape, rope], list[Row])


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

    ran = []
    with pytest.raises(torch.AcceleratorError):
        timing.timed({"right": int, "faulty": call}, 5, torch.device("cpu"), tell=ran.append)
    assert ran[-1] == "faulty"


@pytest.mark.parametrize(
    "option",
    [
        "--shapes=4x32x2",
        "--shapes=4/3x32",
        "--shapes=4x31",
        "--lengths=0",
        "--tokens=-1",
        "--repetitions=0",
        "--minutes=0",
    ],
)
def test_invalid_options_are_refused(monkeypatch, capsys, option):
    monkeypatch.setattr("sys.argv", ["attention", option])
    with pytest.raises(SystemExit):
        attention.main()
    assert "error: argument" in capsys.readouterr().err


def test_the_update_is_timed_beside_its_floor_and_recorded(recorded, monkeypatch):
    monkeypatch.setattr(position_update, "SHAPES", {"2x32": (2, 2, 32, 8)})
    monkeypatch.setattr(position_update, "unsupported", lambda *_: "is not wanted")
    wide, narrow = recorded(position_update, "--precision=bf16")
    assert (wide["state"], narrow["state"]) == ("fp32", "bf16")
    assert wide["rejected"]["triton"] == "is not wanted"
    for direction in ("forward", "forward+backward"):
        timing = wide[direction]["timings"]["torch"]
        assert timing["of_floor"] == timing["seconds"] / wide[direction]["floor_seconds"]


def test_the_state_is_counted_in_the_type_that_it_has():
    shape, narrow, wide = (2, 3, 32, 8), torch.bfloat16, torch.float32
    tensors = [position_update.inputs(5, shape, narrow, state, torch.device("cpu")) for state in (wide, narrow)]
    assert [x.dtype for x in tensors[0]] == [wide] + 5 * [narrow]
    others = 2 * 5 * (3 * 32 + 8)
    for found, state in zip(tensors, (4 * 5 * 64, 2 * 5 * 64)):
        assert position_update.traffic(found, False) == 2 * state + others
        assert position_update.traffic(found, True) == 2 * state + others + 3 * state + 2 * others


@pytest.mark.skipif(ON_GPU, reason="the sizes for a GPU take longer")
def test_generation_is_timed_and_recorded(monkeypatch, tmp_path):
    path = tmp_path / "generate.json"
    monkeypatch.setattr("sys.argv", ["generate", "--toy", f"--output={path}", "--commit=abc"])
    generate.main()
    found = json.loads(path.read_text())
    assert set(found["lengths"]["64"]) == {"dynamic", "static", "none", "speedup"}
    assert set(found["along"]) == {"dynamic", "static"} and found["rejected"] == {}
    monkeypatch.setattr("sys.argv", ["generate", "--toy", f"--output={path}", "--minutes=1e-9"])
    generate.main()
    assert len(json.loads(path.read_text())["rejected"]) == 3


def test_a_state_in_bf16_loses_small_updates_and_one_in_fp32_does_not():
    layers = [state_precision.draw_layer(torch.Generator().manual_seed(i)) for i in range(8)]
    for size, lost in ((1e-3, 0.5), (1e-1, 0.01)):
        found = state_precision.drift(layers, size)
        assert found["bf16"]["update_error"] > lost and found["fp32"]["update_error"] < 0.01
        assert found["fp32"]["score_error"] < found["bf16"]["score_error"]
