"""The check of training finds what differs between a GPU and a CPU; here two processes of a CPU stand in for them."""

import json

import pytest
import torch

from benchmarks import check_training, training_cases
from benchmarks.check_training import COMPARED, DEVICE, LATER, NEAR, REFERENCE, SAME, TOGETHER, TOY_DEVICE, verdicts
from benchmarks.training_cases import DETERMINISTIC, GRADIENTS, RESUMED, RUNS, Side, errors, judged
from benchmarks.training_inputs import TOY, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    prepare(folder, TOY)
    return folder


def rows(scale=1.0, steps=20, norm=0.5, **changes):
    made = []
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 7 - step / 10, "grad_norm": 2.0 + step, "position/update_norm/layer_00": norm}
        made.append({key: value * scale if key in SAME else value for key, value in row.items()})
    made[-1]["validation_loss"] = 6.0 * scale
    for place, value in changes.items():
        key, step = place.rsplit("_", 1)
        made[int(step) - 1][key] = value
    return made


def passed(name, **results):
    return {name: {"name": name, "passed": True, **results}}


def judgement(reference, device):
    found = list(verdicts(reference, device))
    assert len({check["name"] for check in found}) == len(found)
    return {check["name"]: check.get("why") for check in found if not check["passed"]}, len(found)


def test_what_is_equal_passes():
    reference = passed("tape fp32", rows=rows()) | passed("tape packed fp32", rows=rows(0.9))
    device = passed("tape fp32", rows=rows(1 + 1e-6)) | passed("tape packed fp32", rows=rows(0.9))
    device |= passed("tape bf16 ZeRO 2", rows=rows(1.002)) | passed("gradients of tape", gradients={})
    device |= passed(DETERMINISTIC, rows=rows(1.002), tensors={"a": "1"})
    device |= passed(RESUMED, rows=rows(1.002), tensors={"a": "1"})
    assert judgement(reference, device) == ({}, 9)


@pytest.mark.parametrize(
    "name, other, wrong, why",
    [
        ("tape fp32", "tape fp32", rows(loss_7=6.32), "loss at step 7 is 6.32 instead of 6.3"),
        ("tape fp32", "tape fp32", rows(grad_norm_20=22.1), "grad_norm at step 20 is 22.1 instead of 22.0"),
        ("tape fp32", "tape fp32", rows(loss_3=float("nan")), "loss at step 3 is nan instead of 6.7"),
        ("tape fp32", "tape fp32", rows(loss_3=None), "loss at step 3 is None instead of 6.7"),
        ("tape fp32", "tape fp32", rows(validation_loss_20=5.9), "validation_loss at step 20 is 5.9 instead of 6.0"),
        ("tape bf16 ZeRO 3", "tape fp32", rows(1.01), "loss at step 1 is "),
        ("tape fp32 tensor parallel", "tape fp32", rows(1.0001), "loss at step 1 is "),
        ("tape recomputed fp32", "tape fp32", rows(steps=19), "steps [1, 2, "),
    ],
)
def test_a_figure_that_differs_is_named(name, other, wrong, why):
    failures, _ = judgement(passed(other, rows=rows()), passed(name, rows=wrong))
    ((check, found),) = failures.items()
    assert check.startswith(f"{name}: ") and found.startswith(why)


def test_a_comparison_that_would_prove_nothing_fails():
    device = passed("tape fp32", rows=rows(norm=0.0, loss_20=7.0))
    device |= passed("tape packed fp32", rows=rows())
    failures, _ = judgement({}, device)
    assert failures == {
        "tape fp32: TAPE is at work": "a layer's update does not move the position state",
        "tape fp32: the loss falls": "from 6.9 to 7.0",
        "tape packed fp32: documents do not see each other": "the loss is the same",
    }


def test_a_continued_run_must_have_the_same_bits():
    whole = passed(DETERMINISTIC, rows=rows(), tensors={"a": "1"})
    name = f"{RESUMED}: the same bits"
    assert judgement({}, whole | passed(RESUMED, rows=rows(loss_20=5.0000001), tensors={"a": "1"}))[0].keys() == {name}
    assert judgement({}, whole | passed(RESUMED, rows=rows(), tensors={"a": "2"}))[0].keys() == {name}


def test_a_case_that_fails_on_either_side_is_named_and_not_compared():
    broken = {"name": "tape fp32", "passed": False, "why": "AcceleratorError: an illegal memory access"}
    failures, number = judgement({"tape fp32": broken}, {"tape fp32": broken})
    assert failures == dict.fromkeys(("tape fp32", "tape fp32 on the CPU"), broken["why"]) and number == 2


def test_every_case_exists_and_every_run_is_compared():
    others = {*GRADIENTS, DETERMINISTIC, *LATER}
    assert {*REFERENCE, *DEVICE, *TOY_DEVICE, *TOGETHER} <= RUNS.keys() | others
    assert {*DEVICE, *LATER, *TOGETHER} == RUNS.keys() | others
    assert COMPARED.keys() == RUNS.keys() | {DETERMINISTIC}
    assert {other for other, _ in COMPARED.values()} <= set(REFERENCE)
    assert all(
        (tolerance is NEAR) == ("bf16" in name or name == DETERMINISTIC) for name, (_, tolerance) in COMPARED.items()
    )


def test_gradients_may_be_twice_as_far_off_as_plain_torch():
    plain = {"a": 1e-5, "b": 1e-9, "c": 1e-5}
    assert judged({"a": 2e-5, "b": 2e-5, "c": 2e-5}, plain, torch.float32) == []
    (problem,) = judged({"a": 3e-5, "b": 1e-5, "c": 1e-5}, plain, torch.float32)
    assert problem == "a is off by 3.0e-05, plain torch by 1.0e-05"
    (problem,) = judged({"a": 1e-5, "b": 1e-5, "c": 1e-5}, plain | {"c": 1e-3}, torch.float32)
    assert problem == "c in plain torch is off by 1.0e-03 from the CPU"
    truth = {"a": torch.ones(3), "b": torch.ones(3)}
    found = errors({"a": torch.ones(3), "b": torch.tensor([1.0, float("nan"), 1.0])}, truth)
    assert found == {"a": 0.0, "b": float("inf")} and len(judged(found, {"a": 0.0, "b": 0.0}, torch.bfloat16)) == 1


def test_weights_to_begin_with_are_not_zero_and_the_same_for_both_encodings(folder):
    tape, rope = (torch.load(folder / f"start-{name}.pt", weights_only=True) for name in ("tape", "rope"))
    assert rope.keys() < tape.keys() and all(torch.equal(tape[name], rope[name]) for name in rope)
    for name, weight in tape.items():
        assert weight.count_nonzero() > 0.9 * weight.numel() and torch.equal(weight, weight.bfloat16().float()), name
    assert {name.split(".")[-2] for name in tape.keys() - rope.keys()} == {
        "token_mixing", "x_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_a_wrong_gradient_is_named_with_its_parameter(folder, monkeypatch):
    from megatron_tape.ops import parity
    from megatron_tape.ops.kernels import triton_position_update as position_update

    monkeypatch.setattr(parity, "LENGTH", parity.LENGTH)  # the device's side shortens it
    assert Side(folder, on_device=False).gradients("gradients of tape packed") == {}
    result = Side(folder, on_device=True).gradients("gradients of tape packed")
    assert result["passed"] and set(result["gradients"]) == {"float32"}
    assert {"loss", "gpt.decoder.layers.0.position.up_proj"} < result["gradients"]["float32"].keys()
    update = position_update._Update.backward

    def wrong(ctx, slope):
        *others, up, down, _ = update(ctx, slope)
        return *others, 1.001 * up, down, None

    monkeypatch.setattr(position_update._Update, "backward", staticmethod(wrong))
    result = Side(folder, on_device=True).gradients("gradients of tape packed")
    assert not result["passed"]
    assert result["why"].startswith("float32: gpt.decoder.layers.0.position.up_proj is off by 1.0e-03, plain torch by ")
    assert ";" not in result["why"]


def test_the_program_trains_on_both_sides_and_says_what_they_are(tmp_path, monkeypatch, capsys):
    path = tmp_path / "training.json"
    cases = ["tape bf16 ZeRO 2", "rope fp32"]
    monkeypatch.setattr("sys.argv", ["check_training", "--output", str(path), "--commit=abc", "--cases", *cases])
    # Four cases of the CPU's side are left out, as nothing is compared with them.
    monkeypatch.setattr(check_training, "REFERENCE", ("tape fp32", "rope fp32"))
    assert check_training.main() == 0
    record = json.loads(path.read_text())
    assert record["environment"]["commit"] == "abc"
    assert record["sides"] == {"reference": "cpu", "device": "cpu, interpreted kernels"}
    assert (record["passed"], record["failed"]) == (2, 0) and list(record["device"]) == cases
    assert [check["name"] for check in record["checks"]] == [
        "rope fp32: equals rope fp32 on the CPU",
        "tape bf16 ZeRO 2: stays near tape fp32 on the CPU",
    ]
    assert "CPU: tape fp32 done" in capsys.readouterr().out


@pytest.mark.slow
def test_several_processes_train_together(tmp_path, monkeypatch):
    path = tmp_path / "training.json"
    arguments = ["check_training", "--output", str(path), "--processes=2", "--cases", *TOGETHER]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(check_training, "REFERENCE", ("tape fp32",))
    assert check_training.main() == 0
    assert {check["name"] for check in json.loads(path.read_text())["checks"]} == {
        f"{name}: equals tape fp32 on the CPU" for name in TOGETHER
    }


def test_a_case_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_training", "--cases", "tape fp8"])
    with pytest.raises(SystemExit):
        check_training.main()
    assert "argument --cases: 'tape fp8' is none of tape fp32, " in capsys.readouterr().err


def test_a_run_that_fails_says_why(folder, monkeypatch):
    from pretrain import train

    monkeypatch.setattr(train, "main", lambda arguments: 1)
    side = Side(folder, on_device=False)
    with pytest.raises(RuntimeError, match="the run ended with status 1"):
        side.train("rope fp32", *training_cases.RUNS["rope fp32"])
