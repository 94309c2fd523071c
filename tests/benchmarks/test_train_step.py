"""Training steps of RoPE, TAPE and Llama are compared if RoPE and TAPE have the same first
losses.
"""

import dataclasses
import gzip
import json
import math

import pytest
import torch
from launch import run_group

from benchmarks import train_step
from benchmarks.baselines import BASELINE, COMPILED, Baseline
from benchmarks.measured_model import ENCODINGS, SHAPES, run_config
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.errors import ConfigError
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.position.tape import TapePosition

TOY = ["--shape=toy", "--warmup=1", "--repetitions=2"]


def measured(folder, *options):
    path = folder / "record.json"
    train_step.main([*TOY, f"--output={path}", *options])
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    """Return the record of an fp32 run with the baseline, profiles and another batch, and its
    folder.
    """
    folder = tmp_path_factory.mktemp("alternating")
    options = ["--profile", "--more-batches=4x1", "--rope-backends=tiled", "--compile-baseline"]
    return measured(folder, *options, "--commit=abc"), folder


def check(record, processes=1):
    assert record["parity"]["difference"] <= record["parity"]["allowed"]
    tokens = record["run"]["tokens_per_step"]
    for name, found in record["models"].items():
        assert all(math.isfinite(loss) for loss in found["losses"])
        assert len(found["seconds"]) == len(found["losses"]) == 2
        assert min(found["seconds"]) > 0
        model = run_config(name if name in ENCODINGS else "rope", SHAPES["toy"], "fp32").model
        assert found["tokens_per_second"] == pytest.approx(tokens / found["seconds_per_step"])
        flops = flops_per_token(model) * found["tokens_per_second"] / processes
        assert found["tflops"] == pytest.approx(flops / 1e12)
        assert found["mfu"] is None
        assert found["of_matmul"] == pytest.approx(flops / record["matmul_flops"])
        assert 0 < found["memory"]["peak"]


def test_tape_rope_and_llama_alternate_and_learn_the_same_tokens(alternating):
    record, folder = alternating
    check(record)
    models = record["models"]
    assert list(models) == [*ENCODINGS, "rope tiled", BASELINE, COMPILED]
    assert models["rope tiled"]["attention"] == "tiled"
    assert models["rope tiled"]["losses"] == pytest.approx(models["rope"]["losses"], abs=1e-4)
    assert record["environment"]["commit"] == "abc"
    assert record["ratio_memory"] > 1
    assert models["tape"]["position_update"] == "plain torch"

    # The compiled baseline does not alternate with the others.
    seconds = {name: found["seconds"] for name, found in models.items()}
    ratios = {
        (name, other): sum(a / b for a, b in zip(seconds[name], seconds[other])) / 2
        for name in models
        for other in models
    }
    assert record["ratio_time"] == pytest.approx(ratios["tape", "rope"])
    assert record["ratios_to_fastest_rival"] == pytest.approx(
        {name: ratios[name, BASELINE] for name in models}
    )

    first = models["rope"]["losses"][0]
    losses = models[BASELINE]["losses"]
    assert losses[0] == pytest.approx(first, abs=0.3)
    assert losses[-1] < first
    assert models[COMPILED]["losses"] == pytest.approx(losses, abs=1e-4)


def test_a_profile_has_the_time_of_each_class_and_phase(alternating):
    record, folder = alternating
    assert set(record["profiles"]) == {*ENCODINGS, "rope tiled"}
    for found in record["profiles"].values():
        idle = found["idle_seconds"]
        assert {"forward", "backward", "optimizer"} < set(idle)
        assert found["seconds"] == pytest.approx(found["busy_seconds"] + sum(idle.values()))
        # Operations on a CPU do not overlap.
        classes = found["seconds_by_class"]
        assert found["busy_seconds"] == pytest.approx(sum(classes.values()))
        assert {"attention", "matrix products", "norms", "loss", "optimizer"} < set(classes)
        assert found["launches"] > 100
        assert found["unknown_kernels"] == []
    differences = record["profile_differences"]
    tape, rope = (record["profiles"][name]["seconds_by_class"] for name in ("tape", "rope"))
    assert differences["position update"] == tape["position update"] > 0
    assert differences["norms"] == pytest.approx(tape["norms"] - rope["norms"])
    for name in ENCODINGS:
        with gzip.open(folder / f"record-{name}.trace.json.gz", "rt") as file:
            assert json.load(file)["traceEvents"]


def test_another_batch_of_the_same_tokens_is_measured(alternating):
    record, folder = alternating
    (batch,) = record["batches"].values()
    check(batch)
    assert list(batch["models"]) == list(batch["profiles"]) == list(ENCODINGS)
    assert batch["run"]["tokens_per_step"] == record["run"]["tokens_per_step"]
    # One pass has fewer launches than two passes over half as many tokens.
    for name in ENCODINGS:
        assert batch["profiles"][name]["launches"] < record["profiles"][name]["launches"]
    assert (folder / "record-4x1-tape.trace.json.gz").exists()


def test_a_failing_baseline_batch_or_profile_is_skipped_and_bf16_trains(tmp_path, monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("no room")

    def build(self, name):
        if self.arguments.against == [] and name == "tape":
            raise torch.OutOfMemoryError("the batch is too large")
        return original_build(self, name)

    def analyze(trace, on_gpu):
        raise ValueError("a strange trace")

    original_build = train_step.Comparison._build_model
    monkeypatch.setattr(train_step.trace_analysis, "analyze", analyze)
    monkeypatch.setattr(Baseline, "step", step)
    monkeypatch.setattr(train_step.Comparison, "_build_model", build)
    options = ["--precision=bf16", "--backend=tiled", "--recompute=full", "--more-batches=4x1"]
    options.append("--profile")
    record = measured(tmp_path, *options)
    assert "the batch is too large" in record["batches"]["4x1"]["error"]
    assert record["batches"]["4x1"]["models"] == {}
    assert set(record["failed_profiles"]) == set(ENCODINGS)
    assert "a strange trace" in record["failed_profiles"]["tape"]
    check(record)
    assert set(record["models"]) == set(ENCODINGS)
    assert "no room" in record["rejected_rivals"][BASELINE]
    assert record["run"]["recompute"] == "full"
    assert record["models"]["rope"]["attention"] == "tiled"


def test_on_a_gpu_models_are_measured_one_after_another(tmp_path, monkeypatch):
    def step(self):
        raise RuntimeError("no kernel")

    def measure(self, names):
        together.append(names)
        original(self, names)

    def run(self):
        self.on_gpu = True
        original_run(self)

    together = []
    original = train_step.Comparison._measure_together
    original_run = train_step.Comparison.run
    monkeypatch.setattr(train_step.Comparison, "run", run)
    monkeypatch.setattr(train_step.Comparison, "_measure_together", measure)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(Baseline, "step", step)
    # `auto` has chosen torch for RoPE.
    record = measured(tmp_path, "--rope-backends", "tiled", "torch", "--compile-baseline")
    check(record)
    assert together == [["tape"], ["rope"], ["rope tiled"], [BASELINE], [COMPILED]]
    assert set(record["models"]) == {*ENCODINGS, "rope tiled"}
    assert record["ratio_time"] == pytest.approx(
        record["models"]["tape"]["seconds_per_step"] / record["models"]["rope"]["seconds_per_step"]
    )
    assert record["rejected_rivals"].keys() == {BASELINE, COMPILED}
    assert "no kernel" in record["rejected_rivals"][COMPILED]


def test_two_tensor_parallel_processes_have_the_losses_of_one(alternating):
    (written, record), (also_written, _) = run_group("train_step_cases", 2)["records"]
    assert written
    assert not also_written
    check(record, processes=2)
    for name in ENCODINGS:
        assert record["models"][name]["losses"] == pytest.approx(
            alternating[0]["models"][name]["losses"], abs=1e-4
        )


# In bf16, a small change is lost in rounding.
@pytest.mark.parametrize("precision, std", [("fp32", 0.5), ("bf16", 20.0)])
def test_different_losses_at_initialization_give_no_figure(precision, std, tmp_path, monkeypatch):
    declared = TapePosition.parameters

    def parameters(self, layer):
        found = declared(self, layer).items()
        return {name: dataclasses.replace(p, std=p.std or std) for name, p in found}

    monkeypatch.setattr(TapePosition, "parameters", parameters)
    with pytest.raises(ConfigError, match="nothing is measured"):
        measured(tmp_path, f"--precision={precision}", "--against")
    assert not list(tmp_path.iterdir())


def test_the_155m_shape_equals_the_recipe():
    recipe = parse_run_config(["--config", "pretrain/recipes/tape_155m.yaml"])
    ours = run_config("tape", SHAPES["155m-1k"], "bf16")
    assert ours.model == recipe.model
    assert ours.train.global_batch_size * 4 == recipe.train.global_batch_size
    _, shape = train_step.parse(["--shape=toy", "--layers=3", "--tokens=48"])
    assert shape == dataclasses.replace(SHAPES["toy"], layers=3, seq_length=48)
