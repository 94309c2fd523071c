"""Training steps are measured beside each other and recorded as they come in, if the models may be compared."""

import dataclasses
import gzip
import json
import math

import pytest
import torch
from launch import run_group

from benchmarks import train_step
from benchmarks.measured_model import MeasuredModel
from benchmarks.shapes import ENCODINGS, SHAPES, run_config
from benchmarks.step_comparison import ORDERS
from benchmarks.step_results import peak_flops, utilization
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.hardware import KINDS
from megatron_tape.position.tape import TapePosition

TOY = "--shape=toy"


def measured(folder, *options):
    path = folder / "record.json"
    assert train_step.main([TOY, f"--output={path}", *options]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """In blocks, in fp32, with a profile; and the folder of the record."""
    folder = tmp_path_factory.mktemp("blocks")
    return measured(folder, "--profile", "--commit=abc"), folder


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("alternating"), "--order=alternate")


@pytest.fixture(scope="module")
def two_processes():
    return run_group("train_step_cases", 2)


def check(record, processes=1):
    assert record["parity"]["difference"] <= record["parity"]["allowed"]
    tokens = record["run"]["tokens_per_step"]
    for block in record["blocks"]:
        assert all(math.isfinite(loss) for loss in block["losses"])
        assert len(block["seconds"]) == len(block["losses"]) and min(block["seconds"]) > 0
    for name, found in record["encodings"].items():
        model = run_config(name, SHAPES["toy"], 1, train_step.parse([TOY], False)[0]).model
        assert found["tokens_per_second"] == pytest.approx(tokens / found["seconds_per_step"])
        flops = flops_per_token(model) * found["tokens_per_second"] / processes
        assert found["tflops"] == pytest.approx(flops / 1e12) and found["mfu"] is None
        assert found["of_matmul"] == pytest.approx(flops / record["matmul_flops"])
        assert 0 < found["memory"]["peak"]


def test_blocks_are_recorded_with_phases_speed_and_memory(blocks):
    record, _ = blocks
    check(record)
    assert record["environment"]["commit"] == "abc" and record["run"]["zero_stage"] == 0
    assert tuple((block["encoding"],) for block in record["blocks"]) == ORDERS["blocks"]
    seconds = {name: record["encodings"][name]["seconds_per_step"] for name in ENCODINGS}
    assert record["ratio_time"] == seconds["tape"] / seconds["rope"]
    assert record["ratio_memory"] > 1
    assert record["encodings"]["tape"]["position_update"] == "plain torch"


def test_two_engines_in_one_process_train_as_one_after_the_other(blocks, alternating):
    first, tape, again, last = blocks[0]["blocks"]
    assert first["losses"] == last["losses"] and first["losses"] != tape["losses"]
    assert first["losses"][0] > first["losses"][-1] and tape["losses"][0] > again["losses"][-1]
    check(alternating)
    assert [block["losses"] for block in alternating["blocks"]] == [first["losses"], tape["losses"]]
    rope, tape = (block["seconds"] for block in alternating["blocks"])
    assert alternating["ratio_time"] == pytest.approx(sum(t / r for t, r in zip(tape, rope)) / 2)


def test_bf16_trains_under_zero_1_and_rope_takes_its_fastest_backend(tmp_path):
    record = measured(tmp_path, "--precision=bf16", "--order=alternate", "--rope-backend=fastest", "--recompute=full")
    check(record)
    assert record["run"]["zero_stage"] == 1 and record["run"]["recompute"] == "full"
    tried = record["rope_backends"]["seconds_per_step"]
    assert set(tried) == {"tiled", "torch"} and "flash_attn" in record["rope_backends"]["rejected"]
    assert record["encodings"]["rope"]["attention"] == min(tried, key=tried.get)


def test_two_data_parallel_processes_train_on_twice_the_tokens(two_processes):
    case = two_processes["data_parallel"]
    assert case["status"] == 0
    check(case["record"], processes=2)
    shape = SHAPES["toy"]
    tokens = 2 * shape.micro_batch * shape.accumulate * shape.seq_length
    assert case["record"]["run"]["tokens_per_step"] == tokens
    assert two_processes["written_by"] == [dict.fromkeys(two_processes["written_by"][0], w) for w in (True, False)]


def test_two_tensor_parallel_processes_train_as_one(two_processes, alternating):
    case = two_processes["tensor_parallel"]
    assert case["status"] == 0
    check(case["record"], processes=2)
    for ours, alone in zip(case["record"]["blocks"], alternating["blocks"], strict=True):
        assert ours["losses"] == pytest.approx(alone["losses"], abs=1e-4)


def test_several_processes_that_run_out_of_memory_end_with_a_sentence(two_processes):
    assert two_processes["out_of_memory"] == 1


def out_of_memory_above(monkeypatch, largest):
    step = MeasuredModel.step

    def limited(self):
        if self.config.train.micro_batch_size > largest:
            raise torch.OutOfMemoryError("no room")
        return step(self)

    monkeypatch.setattr(MeasuredModel, "step", limited)


def test_micro_batches_are_halved_until_they_fit(tmp_path, monkeypatch):
    out_of_memory_above(monkeypatch, 2)
    record = measured(tmp_path, "--micro-batch=5", "--accumulate=2", "--order=alternate")
    assert record["shape"]["micro_batch"] == 2 and record["shape"]["accumulate"] == 5
    assert record["run"]["tokens_per_step"] == 10 * SHAPES["toy"].seq_length
    assert len(record["blocks"]) == len(ENCODINGS)


def test_a_single_sequence_that_does_not_fit_ends_with_a_sentence(tmp_path, monkeypatch, capsys):
    out_of_memory_above(monkeypatch, 0)
    assert train_step.main([TOY, "--order=alternate", f"--output={tmp_path / 'record.json'}"]) == 1
    assert "--micro-batch of 1 is too large: memory ran out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision, std", [("fp32", 0.5), ("bf16", 20.0)])  # a small change is lost in rounding
def test_no_figure_is_given_for_a_model_that_does_not_start_as_rope(precision, std, tmp_path, monkeypatch):
    declared = TapePosition.parameters

    def parameters(self, layer):
        return {name: dataclasses.replace(p, std=p.std or std) for name, p in declared(self, layer).items()}

    monkeypatch.setattr(TapePosition, "parameters", parameters)
    with pytest.raises(SystemExit, match="differ by .* so no figure is given"):
        measured(tmp_path, f"--precision={precision}", "--order=alternate")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [["--precision=bf16", "--zero-stage=0"], ["--tensor-parallel=3"]])
def test_what_cannot_be_trained_is_refused(options, capsys):
    assert train_step.main([TOY, *options]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_profile_writes_a_trace_beside_the_record(blocks):
    for name in ENCODINGS:
        with gzip.open(blocks[1] / f"record-{name}.trace.json.gz", "rt") as file:
            assert json.load(file)["traceEvents"]


def test_utilization_is_the_share_of_the_peak_and_of_a_matmul():
    assert utilization(10**9, 2e5, 2, 1e15, 5e14) == {"tflops": 100.0, "mfu": 0.1, "of_matmul": 0.2}
    assert utilization(10**9, 2e5, 1, None, 4e14) == {"tflops": 200.0, "mfu": None, "of_matmul": 0.5}


def test_peaks_are_known_by_the_names_that_cuda_gives():
    names = {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA B200": "B200",
    }  # fmt: skip
    assert {name: peak_flops(name) for name in names} == {name: KINDS[kind].peak for name, kind in names.items()}
    unknown = ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GB200", "Tesla T4")
    assert not any(map(peak_flops, unknown))


def test_the_155m_shape_is_the_recipe():
    arguments, shape = train_step.parse(["--shape=155m-1k"], False)
    recipe = parse_run_config(["--config", "pretrain/recipes/tape_155m.yaml"])
    ours = run_config("tape", shape, 1, arguments)
    assert ours.model == recipe.model
    assert ours.train.global_batch_size * 4 == recipe.train.global_batch_size


def test_the_defaults_of_a_cpu_and_a_gpu():
    def chosen(*options, on_gpu):
        arguments, shape = train_step.parse(list(options), on_gpu)
        names = ("shape", "precision", "zero_stage", "order", "rope_backend", "tape_backend")
        return *(getattr(arguments, name) for name in names), shape.micro_batch

    assert chosen(on_gpu=False) == ("cpu", "fp32", 0, "alternate", "auto", "auto", 1)
    assert chosen(on_gpu=True) == ("155m-1k", "bf16", 1, "blocks", "fastest", "auto", 32)
    assert chosen("--micro-batch=3", "--precision=fp32", on_gpu=True)[1:3] == ("fp32", 0)
    with pytest.raises(SystemExit):
        chosen("--order=alternate", on_gpu=True)
