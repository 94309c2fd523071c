"""Training steps are measured beside each other and recorded as they come in, if the models may be compared."""

import dataclasses
import gzip
import json
import math
from types import SimpleNamespace

import pytest
import torch
from launch import run_group
from torch.profiler import profile, record_function

from benchmarks import step_comparison, step_profile, train_step
from benchmarks.measured_model import MeasuredModel
from benchmarks.shapes import ENCODINGS, SHAPES, run_config
from benchmarks.step_comparison import BLOCKS, Comparison
from benchmarks.step_results import peak_flops, utilization
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.planning.flops import flops_per_token
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
        assert set(block["phases"]) == {"forward", "backward", "optimizer"}
        assert all(math.isfinite(loss) for loss in block["losses"])
        for whole, *parts in zip(block["seconds"], *block["phases"].values(), strict=True):
            assert 0.5 * whole < sum(parts) <= whole and min(parts) > 0
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
    assert tuple(block["encoding"] for block in record["blocks"]) == BLOCKS
    seconds = {name: record["encodings"][name]["seconds_per_step"] for name in ENCODINGS}
    assert record["ratio_time"] == seconds["tape"] / seconds["rope"]
    assert record["ratio_memory"] > 1
    assert record["encodings"]["tape"]["position_update"] == "plain torch"
    assert next(iter(record)) == "environment" and list(record)[1] == "ratio_time"


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
    assert set(tried) == {"tiled", "torch"}
    assert record["encodings"]["rope"]["attention"] == min(tried, key=tried.get)


def test_a_backend_that_fails_is_rejected_and_the_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(step_comparison, "candidates", lambda *_: (["flash_attn", "torch"], {}))
    record = measured(tmp_path, "--rope-backend=fastest")
    assert set(record["rope_backends"]["rejected"]) == {"flash_attn"}
    assert record["encodings"]["rope"]["attention"] == "torch"


def test_two_data_parallel_processes_train_on_twice_the_tokens(two_processes):
    case = two_processes["data_parallel"]
    assert case["status"] == 0
    check(case["record"], processes=2)
    shape = SHAPES["toy"]
    tokens = 2 * shape.micro_batch * shape.accumulate * shape.seq_length
    assert case["record"]["run"]["tokens_per_step"] == tokens
    assert two_processes["written_by"] == [dict.fromkeys(two_processes["written_by"][0], w) for w in (True, False)]


def test_two_tensor_parallel_processes_train_as_one(two_processes, blocks):
    case = two_processes["tensor_parallel"]
    assert case["status"] == 0
    check(case["record"], processes=2)
    for ours, alone in zip(case["record"]["blocks"], blocks[0]["blocks"], strict=True):
        assert ours["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert set(case["record"]["profile"]["tape"]["by_part"]) >= set(step_profile.PARTS)


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
    record = measured(tmp_path, "--micro-batch=5", "--accumulate=2")
    assert record["shape"]["micro_batch"] == 2 and record["shape"]["accumulate"] == 5
    assert record["run"]["tokens_per_step"] == 10 * SHAPES["toy"].seq_length
    (tried,) = record["run"]["too_large"]
    assert tried["micro_batch"] == 5 and "no room" in tried["why"]
    assert len(record["blocks"]) == len(BLOCKS)


def test_a_single_sequence_that_does_not_fit_ends_with_a_sentence(tmp_path, monkeypatch, capsys):
    out_of_memory_above(monkeypatch, 0)
    assert train_step.main([TOY, f"--output={tmp_path / 'record.json'}"]) == 1
    assert "--micro-batch of 1 is too large: memory ran out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_micro_batches_that_the_estimate_finds_too_large_are_not_tried(monkeypatch):
    memory = SimpleNamespace(total_memory=85_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    sizes = {}
    for name in ("155m-1k", "1.3b-4k", "7b-8k"):
        arguments, shape = train_step.parse([f"--shape={name}", "--precision=bf16"], False)
        comparison = Comparison(arguments, shape, SimpleNamespace(device=torch.device("cpu"), rank=1, world_size=1))
        comparison.on_gpu = True
        comparison.fit_estimate()
        sizes[name] = comparison.shape.micro_batch, comparison.shape.accumulate
    assert sizes == {"155m-1k": (32, 4), "1.3b-4k": (4, 4), "7b-8k": (1, 4)}


@pytest.mark.parametrize("precision, std", [("fp32", 0.5), ("bf16", 20.0)])  # a small change is lost in rounding
def test_no_figure_is_given_for_a_model_that_does_not_start_as_rope(precision, std, tmp_path, monkeypatch):
    declared = TapePosition.parameters

    def parameters(self, layer):
        return {name: dataclasses.replace(p, std=p.std or std) for name, p in declared(self, layer).items()}

    monkeypatch.setattr(TapePosition, "parameters", parameters)
    with pytest.raises(SystemExit, match="differ by .* so no figure is given"):
        train_step.main([TOY, f"--output={tmp_path / 'record.json'}", f"--precision={precision}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [["--precision=bf16", "--zero-stage=0"], ["--tensor-parallel=3"], ["--head-dim=31"]]
)
def test_what_cannot_be_trained_is_refused(options, capsys):
    assert train_step.main([TOY, *options]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_profile_has_parts_kernels_and_a_trace(blocks):
    record, folder = blocks
    for name in ENCODINGS:
        found = record["profile"][name]
        assert sum(found["by_part"].values()) == pytest.approx(found["seconds"], rel=0.5)
        assert (found["by_part"]["position update"] > 0.0) and found["by_part"]["attention"] > 0
        assert 0 < len(found["kernels"]) <= step_profile.KERNELS
        assert found["kernels"][0]["seconds"] >= found["kernels"][-1]["seconds"]
        with gzip.open(folder / found["trace"], "rt") as file:
            assert json.load(file)["traceEvents"]


def test_a_backward_operator_belongs_to_the_part_of_its_forward_operator():
    weight = torch.randn(64, 64, requires_grad=True)
    with profile() as profiler:
        with record_function("MLP"):
            hidden = torch.randn(64, 64) @ weight
        (hidden * 2).sum().backward()
    events = profiler.events()
    parts = step_profile.by_part(events, on_gpu=False)
    backward = next(e for e in events if e.name.startswith("autograd::engine::evaluate_function: Mm"))
    forward = next(e for e in events if e.name == "MLP")
    expected = (backward.cpu_time_total + forward.cpu_time_total) / 1e6
    assert parts["MLP"] == pytest.approx(expected) and parts["other"] > 0
    assert sum(parts.values()) == pytest.approx(sum(e.self_cpu_time_total for e in events) / 1e6)


def test_kernels_of_a_gpu_belong_to_the_part_that_launched_them():
    def event(name, kind, start=0, seconds=0, kernels=(), parent=None, sequence=-1, forward_thread=0, shadow=False):
        return SimpleNamespace(
            name=name, device_type=getattr(step_profile.DeviceType, kind), cpu_parent=parent, sequence_nr=sequence,
            fwd_thread=forward_thread, thread=1, kernels=[SimpleNamespace(duration=1e6 * k) for k in kernels],
            time_range=SimpleNamespace(start=start, elapsed_us=lambda: 1e6 * seconds), is_user_annotation=shadow,
        )  # fmt: skip

    part = event("attention", "CPU", 1)
    forward = event("aten::mm", "CPU", 2, kernels=[1], parent=part, sequence=7)
    node = event("autograd::engine::evaluate_function: MmBackward0", "CPU", 3, sequence=7, forward_thread=1)
    backward = event("aten::mm", "CPU", 4, kernels=[2, 3], parent=node)
    kernels = [event("gemm", "CUDA", seconds=seconds) for seconds in (1, 2, 3, 4)]
    shadows = [event("attention", "CUDA", seconds=9), event("anything", "CUDA", seconds=9, shadow=True)]
    parts = step_profile.by_part([part, forward, node, backward, *kernels, *shadows], on_gpu=True)
    assert parts["attention"] == 6 and parts["other"] == 4 and sum(parts.values()) == 10


def test_utilization_is_the_share_of_the_peak_and_of_a_matmul():
    assert utilization(10**9, 2e5, 2, 1e15, 5e14) == {"tflops": 100.0, "mfu": 0.1, "of_matmul": 0.2}
    assert utilization(10**9, 2e5, 1, None, 4e14) == {"tflops": 200.0, "mfu": None, "of_matmul": 0.5}


def test_peaks_are_known_by_the_names_that_cuda_gives():
    tflops = {
        "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989.4,
        "NVIDIA GH200 480GB": 989.4, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100 80GB PCIe": 312, "NVIDIA L40S": 362,
        "NVIDIA B200": 2250,
    }  # fmt: skip
    assert {name: peak_flops(name) / 1e12 for name in tflops} == pytest.approx(tflops)
    for unknown in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GB200", "NVIDIA GeForce RTX 4090", "Tesla T4"):
        assert peak_flops(unknown) is None


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
    assert chosen("--batch=3", "--precision=fp32", on_gpu=True)[1:3] == ("fp32", 0)
    with pytest.raises(SystemExit):
        chosen("--order=alternate", on_gpu=True)
    assert train_step.parse(["--heads=2"], False)[1] == dataclasses.replace(SHAPES["cpu"], heads=2)
