"""The check of the kernels tells which are inexact or fail, and goes on; Triton interprets them here."""

import json
import os
import sys
import time

import pytest

from benchmarks import check_kernels, kernel_units, programs
from benchmarks.check_kernels import OUTCOME, OUTCOME_OF_WORKER, SHAPES, Units, planned, run_tests
from benchmarks.environment import Record
from benchmarks.kernel_units import PRECISIONS, Unit
from benchmarks.programs import follow

UNIT = Unit("2x32", "fp32", "sizes", 5)


def run_unit(monkeypatch, capsys, unit, skipped=0):
    import triton

    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr("sys.argv", ["kernel_units", *unit.arguments(), str(skipped)])
    status = kernel_units.main()
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert messages[-1] == {"finished": True} and status == 0
    return {message["name"]: message for message in messages if "name" in message}


def test_an_inexact_kernel_and_one_that_fails_are_named_and_the_other_checks_go_on(monkeypatch, capsys):
    from megatron_tape.ops.kernels import triton_attention as attention
    from megatron_tape.ops.kernels import triton_position_update as position_update
    from megatron_tape.ops.position_update import plain_update

    attend, backward = attention.attend, attention.attend_backward

    def wrong_in_packs(*tensors):
        if tensors[4] is not None:
            raise RuntimeError("at 7:3:\n  scores = tl.dot(q, k)\nnot enough registers")
        return attend(*tensors)

    def unwritten(*tensors):
        results = list(backward(*tensors))
        if tensors[3] is None:
            import torch

            results[1] = torch.empty_like(results[1])
        return results

    monkeypatch.setattr(attention, "attend", wrong_in_packs)
    monkeypatch.setattr(attention, "attend_backward", unwritten)
    monkeypatch.setattr(position_update, "update", lambda *x: 1.01 * plain_update(*x[:6]))
    found = run_unit(monkeypatch, capsys, UNIT)
    assert len(found) == 14
    passed = {name for name, result in found.items() if result["passed"]}
    assert passed == {
        "attention",
        "attention in the first layer",
        "attention without rotation",
        "attention of inputs that are not contiguous",
        "attention of one query to a cache",
        "attention, repeatable",
    }
    packed = found["attention of packed documents"]
    assert packed["why"] == "RuntimeError: at 7:3: ... not enough registers"
    assert "off by nan" in found["attention in the last layer"]["why"]
    assert found["attention in the last layer"]["error"] is None
    assert "is off by" in found["position update"]["why"] and found["position update"]["error"] > 1e-3


def test_kernels_that_differ_from_run_to_run_are_named(monkeypatch, capsys):
    from megatron_tape.ops.kernels import triton_attention as attention

    attend, calls = attention.attend, []

    def trembling(*tensors):
        calls.append(1)
        o, *others = attend(*tensors)
        return o * (1 + len(calls) % 2 * 2**-23), *others

    monkeypatch.setattr(attention, "attend", trembling)
    found = run_unit(monkeypatch, capsys, UNIT, skipped=11)
    assert list(found) == [
        "attention, repeatable",
        "attention of packed documents, repeatable",
        "position update, repeatable",
    ]
    assert [result["passed"] for result in found.values()] == [False, False, True]
    assert found["attention, repeatable"]["why"].endswith("differ from run to run")


def test_the_program_checks_several_lengths_and_writes_its_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(check_kernels, "TOY", (Unit("2/1x32", "fp32", "lengths", 3),))
    path = tmp_path / "kernels.json"
    monkeypatch.setattr("sys.argv", ["check_kernels", "--output", str(path), "--commit", "abc"])
    assert check_kernels.main() == 0
    record = json.loads(path.read_text())
    assert record["environment"]["commit"] == "abc" and record["device"] == "cpu" and record["faults"] == []
    assert [check["name"] for check in record["checks"]] == [
        "attention, 1 tokens",
        "attention of packed documents, 1 tokens",
        "attention, 3 tokens",
        "attention of packed documents, 3 tokens",
        "position update, 9 tokens",
    ]
    assert record["passed"] == 5 and all(check["error"] <= check["allowed"] for check in record["checks"])
    assert record["units"]["2/1x32 fp32, lengths"].startswith("done after")
    assert "2/1x32 fp32, lengths: attention, 1 tokens: exact" in capsys.readouterr().out


def good(name):
    return json.dumps({"name": name, "passed": True, "error": 0.0, "rounding": 0.0, "seconds": 1.0, "fault": False})


def begins(name):
    return json.dumps({"begins": name})


FINISHED = json.dumps({"finished": True})
ILLEGAL = "AcceleratorError: an illegal memory access"
FAULT = json.dumps({"name": "b", "passed": False, "why": ILLEGAL, "fault": True})


@pytest.mark.parametrize(
    "scripts, skipped, names, faults, state, why",
    [
        ([([begins("a"), good("a"), FINISHED], 0)], [0], ["a"], 0, "done", []),
        # A check that ends its process; another process goes on behind it.
        (
            [([begins("a"), good("a"), begins("b"), "killed"], -11), ([begins("c"), good("c"), FINISHED], 0)],
            [0, 2],
            ["b", "a", "c"],
            0,
            "done",
            ["its process ended with status -11: killed"],
        ),
        (
            [([begins("a"), good("a"), begins("b"), FAULT], 3), ([FINISHED], 0)],
            [0, 2],
            ["b", "a"],
            1,
            "done",
            [ILLEGAL],
        ),
        (
            [(["No module named torch"], 1)],
            [0],
            ["the start"],
            0,
            "unfinished",
            ["its process ended with status 1: No module named torch"],
        ),
        (
            [([begins("a"), good("a"), begins("b"), "step 3"], None)],
            [0],
            ["b", "a"],
            0,
            "unfinished",
            ["no time was left for it: step 3"],
        ),
    ],
)
def test_what_ends_a_process_is_recorded_and_the_next_check_runs(
    monkeypatch, tmp_path, scripts, skipped, names, faults, state, why
):
    asked, scripts = [], list(scripts)

    def played(command, environment, seconds, on_line):
        asked.append(int(command[-1]))
        lines, status = scripts.pop(0)
        for line in lines:
            on_line(line)
        return status

    monkeypatch.setattr(programs, "follow", played)
    units = Units([UNIT], Record("check_kernels", tmp_path / "a.json"), "cpu", time.monotonic() + 60)
    units.run([UNIT], 1)
    record = json.loads((tmp_path / "a.json").read_text())
    assert asked == skipped and not scripts
    assert [check["name"] for check in record["checks"]] == names
    assert len(record["faults"]) == faults and record["units"][UNIT.name].startswith(state)
    whys = [check["why"] for check in record["checks"] if not check["passed"]]
    assert whys == why


def test_no_unit_starts_after_the_deadline(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "follow", lambda *_: pytest.fail("started"))
    units = Units([UNIT], Record("check_kernels", tmp_path / "a.json"), "cpu", time.monotonic())
    units.run([UNIT], 1)
    assert units.units[UNIT.name].startswith("unfinished")


def test_the_most_important_shapes_come_first_and_none_is_left_out():
    units = planned(list(SHAPES), None)
    assert [unit.name for unit in units[:3]] == ["12x64 bf16", "32x128 bf16", "12x64 bf16, lengths"]
    assert len(units) == len(set(units)) == len(SHAPES) * (len(PRECISIONS) + 1)
    assert [unit.name for unit in planned(["8x80"], ["fp32"])] == ["8x80 fp32"]


@pytest.mark.parametrize("shape", ["12", "12x63", "12/5x64", "0x64", "12x64x2"])
def test_shapes_that_are_none_are_refused(monkeypatch, capsys, shape):
    monkeypatch.setattr("sys.argv", ["check_kernels", "--shapes", shape])
    with pytest.raises(SystemExit):
        check_kernels.main()
    assert f"argument --shapes: {shape} is not of the form 12x64" in capsys.readouterr().err


def test_outcomes_of_tests_are_read_with_and_without_workers():
    name = "tests/ops/test_triton.py::test_a[1 - torch.bfloat16]"
    for pattern, line in (
        (OUTCOME, f"{name} FAILED      [ 10%]"),
        (OUTCOME_OF_WORKER, f"[gw3] [  1%] FAILED {name} "),
    ):
        assert pattern.match(line)["name"] == name and pattern.match(line)["outcome"] == "FAILED"
    # Repeated in the summary.
    assert not OUTCOME.match(f"FAILED {name} - assert 1") and not OUTCOME_OF_WORKER.match(f"FAILED {name}")


def test_tests_that_cannot_run_say_why(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = run_tests(60, 1)
    assert found["status"] and found["numbers"] == {}
    assert "torch sees no GPU here" in "".join(found["last_lines"])


def test_a_program_is_followed_line_by_line_and_ended_in_time():
    lines = []
    program = "import time\nfor i in range(3):\n    print(i, flush=True)\n    time.sleep(i * 20)"
    started = time.monotonic()
    assert follow([sys.executable, "-c", program], dict(os.environ), 1.0, lines.append) is None
    assert lines[:2] == ["0", "1"] and time.monotonic() - started < 15
    assert follow([sys.executable, "-c", "print('x'); raise SystemExit(7)"], dict(os.environ), 60, lines.append) == 7
    assert lines[-1] == "x"
