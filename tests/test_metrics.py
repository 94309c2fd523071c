import json
import math
import os

import pytest

from megatron_tape.metrics import MetricsWriter

SCALARS = {"loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 12345.0, "tflops_per_second": 1.5}


def rows(directory):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def plain(directory, **settings):
    return MetricsWriter(directory, 100, tensorboard=False, **settings)


def write(directory, steps, **settings):
    writer = plain(directory, **settings)
    for step in steps:
        writer.log(step, SCALARS)
    writer.close()


def test_a_row_holds_the_step_and_every_scalar(tmp_path):
    write(tmp_path, [10, 20])
    assert rows(tmp_path) == [{"step": 10, **SCALARS}, {"step": 20, **SCALARS}]


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    writer = plain(tmp_path)
    writer.log(1, SCALARS)
    assert [row["step"] for row in rows(tmp_path)] == [1]
    writer.close()


def test_the_usual_keys_are_there_even_where_nothing_was_measured(tmp_path):
    writer = plain(tmp_path)
    writer.log(1, {"loss": 1.0})
    writer.close()
    assert rows(tmp_path) == [{"step": 1, "loss": 1.0, "grad_norm": None, "lr": None, "tokens_per_second": None}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_written_as_null(tmp_path, value):
    writer = plain(tmp_path)
    writer.log(1, {**SCALARS, "loss": value, "validation_loss": value})
    writer.close()
    assert rows(tmp_path)[0]["loss"] is None and rows(tmp_path)[0]["validation_loss"] is None


def test_validation_loss_brings_its_perplexity_even_where_that_overflows(tmp_path):
    writer = plain(tmp_path)
    writer.log(1, {**SCALARS, "validation_loss": 2.0})
    writer.log(2, {**SCALARS, "validation_loss": 1e4})
    writer.close()
    assert rows(tmp_path)[0]["validation_perplexity"] == pytest.approx(math.exp(2.0))
    assert rows(tmp_path)[1]["validation_perplexity"] is None


def test_a_resumed_run_leaves_one_line_without_gaps_or_repeats(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40, 50], resume_step=20)
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 30, 40, 50]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    write(tmp_path, [10, 20])
    write(tmp_path, [5])
    assert [row["step"] for row in rows(tmp_path)] == [5]


def test_a_file_torn_at_any_byte_resumes(tmp_path):
    write(tmp_path, [10, 20, 30])
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:length])
        write(tmp_path, [20, 30], resume_step=10)
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, [10, 20, 30])
    whole = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path, resume_step=10)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_a_step_cannot_be_logged_twice(tmp_path):
    writer = plain(tmp_path, resume_step=4)
    with pytest.raises(ValueError, match="step 4"):
        writer.log(4, SCALARS)
    writer.log(5, SCALARS)
    with pytest.raises(ValueError, match="step 5"):
        writer.log(5, SCALARS)
    writer.close()


def test_the_console_line_names_everything_once(tmp_path, capsys):
    times = iter([0.0, 30.0])
    writer = plain(tmp_path, clock=lambda: next(times))
    writer.log(10, {**SCALARS, "validation_loss": 2.0, "position/state_norm/layer_00": 1.0})
    writer.close()
    assert capsys.readouterr().out == (
        "step  10/100 | loss 2.5000 | grad norm 0.500 | lr 1.000e-03 | 12,345 tokens/s | 1.50 TFLOP/s | ETA 0:04:30"
        " | validation loss 2.0000, perplexity 7.39\n"
    )


def test_the_time_left_follows_the_recent_steps_and_forgets_a_slow_start(tmp_path, capsys):
    times = iter([0.0, 1000.0, *(1000.0 + step for step in range(2, 41))])
    writer = plain(tmp_path, clock=lambda: next(times))
    for step in range(1, 41):
        writer.log(step, SCALARS)
    writer.close()
    assert capsys.readouterr().out.splitlines()[-1].endswith("ETA 0:01:00")


def test_tensorboard_shows_each_scalar_under_its_tag_and_forgets_steps_past_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = {**SCALARS, "validation_loss": 2.0, "position/state_norm/layer_00": 3.0, "skipped": 0.0}
    for resume_step, steps, loss in ((0, (1, 2, 3), 9.0), (1, (2, 3, 4), 5.0)):
        writer = MetricsWriter(tmp_path, 4, resume_step=resume_step)
        for step in steps:
            writer.log(step, {**scalars, "loss": loss})
        writer.text("configuration", "model:\n  num_layers: 2", resume_step)
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/gradient_norm",
        "train/learning_rate",
        "train/skipped",
        "speed/tokens_per_second",
        "speed/tflops_per_second",
        "validation/loss",
        "validation/perplexity",
        "position/state_norm/layer_00",
    }
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 9.0),
        (2, 5.0),
        (3, 5.0),
        (4, 5.0),
    ]
    texts = [event.tensor_proto.string_val[0] for event in events.Tensors("configuration/text_summary")]
    assert texts[-1] == b"    model:\n      num_layers: 2"
