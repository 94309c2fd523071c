"""The table of goals says met, missed or not measured, and nothing else."""

import dataclasses

import pytest
from test_check_gpu import H100

from benchmarks.goals import GOALS, table

OUTCOME = {"status": "done", "seconds": 12.3, "code": "c", "gpus": list(H100.gpus), "reason": None}


def step(ratio=1.05, rope=0.5, tape=0.45):
    def of(mfu):
        return {
            "mfu": mfu,
            "mfu_of_rope_flops": mfu and mfu - 0.01,
            "tokens_per_second": 123456.0,
            "phases": {"forward": 0.01, "backward": 0.02},
            "memory": {"peak": 2**30},
        }

    return {"ratio_time": ratio, "encodings": {"rope": of(rope), "tape": of(tape)}, "outcome": OUTCOME}


def rows(results, machine=H100):
    lines = [line for line in table(results, machine) if line.startswith("| ")]
    return {tuple(cells[:2]): cells[2:] for line in lines if (cells := [c.strip() for c in line.strip("|").split("|")])}


@pytest.mark.parametrize(
    "slice_, record, aim, met",
    [
        ("step-155m-1k", step(1.10), "1.10 times", "yes"),
        ("step-155m-1k", step(1.11), "1.10 times", "**no**"),
        ("step-7b-8k", step(1.149), "1.15 times", "yes"),
        ("step-1.3b-4k", step(rope=0.449), "MFU of RoPE", "**no**"),
        ("step-1.3b-4k", step(tape=0.40), "MFU of TAPE", "yes"),
        ("step-1.3b-4k", step(tape=None), "MFU of TAPE", ""),
        (
            "attention",
            {"results": [{"of_rope": {"ratio": 1.4}}, {"of_rope": {"ratio": 1.6}}]},
            "in every shape",
            "**no**",
        ),
        ("attention", {"results": [{"of_rope": {"ratio": 1.4}}], "outcome": OUTCOME}, "in every shape", "yes"),
        ("attention", {"results": [{"of_rope": {"ratio": 1.4}}]}, "in every shape", "so far"),
        ("attention", {"results": [{"of_rope": {"ratio": 1.4}}, {"rejected": {}}]}, "in every shape", "so far"),
        ("attention", {"results": [{"of_rope": {"ratio": 1.6}}, {}]}, "in every shape", "**no**"),
        ("attention", {"results": [{}]}, "in every shape", ""),
        ("attention", {"results": []}, "in every shape", ""),
        ("kernels", {"checks": [{"name": "a", "passed": True}], "outcome": OUTCOME}, "exact", "yes"),
        ("kernels", {"checks": [{"name": "a", "passed": True}]}, "exact", "so far"),
        ("kernels", {"checks": [{"name": "a", "passed": True}, {"name": "b", "passed": False}]}, "exact", "**no**"),
        ("kernels", {"checks": []}, "exact", ""),
        ("training", {"outcome": OUTCOME}, "agree", ""),
    ],
)
def test_goals_are_met_missed_or_not_measured(slice_, record, aim, met):
    (cells,) = [c for (goal, part), c in rows({slice_: record}).items() if aim in goal and part == slice_]
    assert cells[1] == met and (cells[0] == "not measured") == (met == "")
    others = [c for (goal, part), c in rows({slice_: record}).items() if part in {g.slice for g in GOALS} - {slice_}]
    assert all(c == ["not measured", ""] for c in others)


def test_goals_for_speed_are_not_judged_at_toy_size_or_without_saying_so_on_other_gpus():
    toy = dataclasses.replace(H100, gpus=(), toy=True)
    assert (
        rows({"step-7b-8k": step()}, toy)["TAPE's step takes at most 1.15 times RoPE's", "step-7b-8k"][1]
        == "at toy size"
    )
    other = dataclasses.replace(H100, gpus=("NVIDIA A100-SXM4-80GB",))
    shown = rows({"step-7b-8k": step()}, other)["TAPE's step takes at most 1.15 times RoPE's", "step-7b-8k"][1]
    assert shown == "yes (a goal for H100 and H200)"


def test_slices_and_speeds_are_listed():
    lines = "\n".join(
        table({"step-7b-8k": step(), "kernels": {"outcome": OUTCOME | {"status": "failed", "reason": "x"}}}, H100)
    )
    assert "| step-7b-8k | done | 12 |" in lines and "| kernels | failed: x | 12 |" in lines
    assert "| attention | has not ended | |" in "\n".join(table({"attention": {"results": []}}, H100))
    assert "| all-gpus | needs two or more GPUs | |" in lines and "| decoding | not run | |" in lines
    assert "| step-7b-8k | rope | 123,456 | 50.0% | 49.0% | 1.0 | forward 10.0, backward 20.0 |" in lines
