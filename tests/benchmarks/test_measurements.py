"""Every benchmark runs at its smallest size, and reports no figure if results are wrong."""

import gc
import json
import time
import weakref

import pytest
import torch

from benchmarks import attention, cache_memory, encodings, generate, timing
from megatron_tape.errors import ConfigError
from megatron_tape.huggingface.modeling import attention_tape
from megatron_tape.ops.backends import tiled


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Return a function that runs a benchmark and returns its record."""

    def run(module, *options):
        path = tmp_path / "here" / "record.json"
        threads = torch.get_num_threads()
        monkeypatch.setattr(
            "sys.argv", [module.__name__, f"--output={path}", "--commit=abc", *options]
        )
        try:
            module.main()
        finally:
            torch.set_num_threads(threads)
        found = json.loads(path.read_text())
        assert found["environment"]["commit"] == "abc"
        return found

    return run


KERNELS = ("--tokens=32", "--repetitions=1")


CANDIDATES = {"rope torch", "rope tiled", "tape torch", "tape tiled", "wall tiled"}


def test_attention_times_are_compared_with_rope(recorded):
    options = [*KERNELS, "--shapes", "4/2x32@16", "2x32@34", "--without", "triton"]
    grouped, long = recorded(attention, *options)["results"]
    assert [(result["shape"], result["batch"]) for result in (grouped, long)] == [
        ("4/2x32@16", 2),
        ("2x32@34", 1),
    ]
    for direction, timings in grouped["timed"].items():
        assert set(timings) == CANDIDATES
        rope = min(("rope torch", "rope tiled"), key=lambda name: timings[name]["seconds"])
        tape = min(("tape torch", "tape tiled"), key=lambda name: timings[name]["seconds"])
        ratio = timings[tape]["seconds"] / timings[rope]["seconds"]
        assert grouped["of_rope"][direction] == {"ratio": ratio, "tape": tape, "rope": rope}
        for name, found in timings.items():
            products = attention.PRODUCTS[name.split()[0]][direction]
            flops = (
                products * 2 * 2 * 4 * 32 * 16 * 16 / 2
            )  # two sequences; half of the products of 4 heads of 32
            assert found["tflops"] == pytest.approx(flops / found["seconds"] / 1e12)
    assert grouped["rejected"]["triton"] == "is excluded by --without"
    assert "flash_attn" in grouped["rejected"]


def test_each_candidate_is_timed_with_and_without_a_window(recorded, capsys):
    options = [*KERNELS, "--window=16", "--without", "triton"]
    short, long = recorded(attention, *options, "--shapes", "2x32@16", "2x32@34")["results"]
    # In sequences of 16 tokens, the window hides nothing.
    assert short["window"] is None
    assert not any(short["in_window"].values())
    for direction, timings in long["timed"].items():
        in_window = long["in_window"][direction]
        assert set(in_window) == set(timings) == CANDIDATES
        for name, found in in_window.items():
            assert found["speedup"] == timings[name]["seconds"] / found["seconds"]
    assert "| 2x32@34 | 16 | tape tiled | " in capsys.readouterr().out


def test_interpreted_kernels_are_checked_but_not_timed(recorded, capsys):
    (result,) = recorded(attention, "--toy")["results"]
    timings = result["timed"]["forward+backward"]
    assert timings["tape triton"] == timings["rope triton"] == {"interpreted": True}
    assert "triton" not in result["rejected"]
    assert "| tape triton | exact, not timed |" in capsys.readouterr().out


def test_an_inexact_candidate_gets_no_figure(recorded, monkeypatch, capsys):
    exact = attention.attend

    def attend(encoding, backend, *tensors, **options):
        found = exact(encoding, backend, *tensors, **options)
        if (encoding, backend) == ("tape", "torch"):
            return tuple(1.1 * x for x in found)
        return found

    monkeypatch.setattr(attention, "attend", attend)
    (result,) = recorded(attention, *KERNELS, "--shapes", "2x32@16", "--without", "triton")[
        "results"
    ]
    assert set(result["timed"]["forward"]) == CANDIDATES - {"tape torch"}
    assert "off by" in result["rejected"]["tape torch"]
    assert "| tape torch | 16 tokens: tensor 0" in capsys.readouterr().out


def test_wrong_shapes_are_refused_and_nothing_starts_after_the_deadline(recorded, capsys):
    for shape in ("4x32", "4/3x32@8", "4x31@8"):
        with pytest.raises(ConfigError):
            attention.parse(["--shapes", shape])
    with pytest.raises(FileNotFoundError):
        recorded(attention, *KERNELS, "--shapes=2x32@16", "--minutes=1e-9")
    arguments = attention.parse(["--toy", "--without", "triton"])
    *_, late = attention.measure(attention.TOY, arguments, time.monotonic())
    assert "tape torch" in late["no_time"]
    assert late["timed"]["forward"] == {}


def test_a_failing_candidate_does_not_stop_the_others_but_a_gpu_fault_does():
    calls = {"works": 0, "fails at once": 0, "fails later": 0}

    def function(name, limit, error):
        def call():
            calls[name] += 1
            if calls[name] > limit:
                raise error("no room")

        return call

    functions = {"works": function("works", 99, None)}
    functions["fails at once"] = function("fails at once", 0, torch.OutOfMemoryError)
    functions["fails later"] = function("fails later", 3, torch.OutOfMemoryError)
    timings, failed = timing.timed(functions, 5, torch.device("cpu"))
    assert timings["works"]["repetitions"] == 5
    assert set(timings) == {"works"}
    assert set(failed) == {"fails at once", "fails later"}
    assert "no room" in failed["fails later"]
    functions["fails at once"] = function("fails at once", 0, torch.AcceleratorError)
    with pytest.raises(torch.AcceleratorError):
        timing.timed(functions, 5, torch.device("cpu"))


def test_decode_and_prefill_times_are_compared_with_llama(recorded):
    rows = recorded(generate, "--toy", "--passes=2")["lengths"]["64"]
    assert set(rows) == {"dynamic", "static", "prompt"}
    assert rows["prompt"]["timed"] == 2
    assert all(0 < row["tape_over_llama"] < 100 for row in rows.values())


def test_wrong_prefill_attention_gets_no_figure(recorded, monkeypatch):
    right = attention_tape.attend_by_blocks
    for wrong in (
        lambda *x: [right(*x)[0], torch.zeros(x[0].transpose(1, 2).shape).to(x[0])],
        lambda *x: [part.roll(1, 1) for part in right(*x)],
    ):
        monkeypatch.setattr(attention_tape, "attend_by_blocks", wrong)
        with pytest.raises(SystemExit, match="nothing is measured"):
            recorded(generate, "--toy")


def test_caches_keep_only_windows(recorded, monkeypatch):
    """Buffers have room for 32 more tokens."""
    found = recorded(cache_memory, "--toy")["bytes"]
    per_token = 2 * 64 * 4
    full = 2 * (96 + 32) * per_token
    for name in ("rope", "swan"):
        assert found[name]["no window"]["prompt"] == 4 * full
        windows = found[name]["window 16"]
        assert windows["prompt"] == full + 3 * 2 * 15 * per_token
        assert windows["generated"] == full + 3 * 2 * (16 + 32) * per_token
    # Values contain the position state, except in the last layer.
    assert found["tape"]["window 16"]["prompt"] == full + 3 * 3 * 15 * per_token

    right = cache_memory.read
    monkeypatch.setattr(cache_memory, "read", lambda *arguments: right(*arguments) + 0.01)
    with pytest.raises(SystemExit, match="nothing is measured"):
        recorded(cache_memory, "--toy")


ENCODINGS = ["--shape=toy", "--repetitions=1", "--context=32", "--tokens=2"]


def test_every_encoding_is_compared_with_rope_and_freed(recorded, monkeypatch):
    models = []
    build = encodings.build_model

    def watched(config, layout):
        model = build(config, layout)
        models.extend(weakref.ref(parameter) for parameter in model.model.parameters())
        return model

    monkeypatch.setattr(encodings, "build_model", watched)
    rows = recorded(encodings, *ENCODINGS, "--only", "alibi", "cope", "tape")["encodings"]
    assert rows["tape"]["additional_parameters"] > rows["alibi"]["additional_parameters"] == 0
    for name in ("alibi", "cope", "tape"):
        assert 0.05 < rows[name]["step_over_rope"] < 50
        assert 0.5 < rows[name]["memory_over_rope"] < 2
        assert 0.01 < rows[name]["decoding_over_rope"] < 100
        assert not {"failed", "decoding_failed"} & rows[name].keys()
    gc.collect()
    assert models and not any(parameter() is not None for parameter in models)
    failed = {"additional_parameters": 3, "failed": "it is wrong"}
    lines = encodings.table(rows | {"fire": failed})
    assert lines[2].startswith("| rope | 1 | 1 | ") and lines[-1] == "fire: no figure: it is wrong"
    assert "| fire | - | - | +3 | - |" in lines


def test_an_encoding_with_wrong_attention_gets_no_figure(recorded, monkeypatch):
    right = tiled.attend
    monkeypatch.setattr(
        tiled,
        "attend",
        lambda x: tuple(y.roll(1, 0) for y in right(x)),
    )
    row = recorded(encodings, *ENCODINGS, "--only=alibi")["encodings"]["alibi"]
    assert "differ" in row["failed"]
    assert "step_over_rope" not in row
