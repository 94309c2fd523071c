"""Training steps are measured beside each other and recorded as they come in, if the models may be compared."""

import dataclasses
import gzip
import json
import math

import pytest
import torch
from launch import run_group
from megatron.core.models.gpt import gpt_layer_specs

from benchmarks import train_step
from benchmarks.measured_model import MeasuredModel
from benchmarks.rivals import Megatron, Rival
from benchmarks.shapes import ENCODINGS, SHAPES, run_config
from benchmarks.step_comparison import turns
from benchmarks.step_results import utilization
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.errors import ConfigError
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.position.tape import TapePosition

TOY = "--shape=toy"
RIVALS = ["transformers", "megatron"]


def measured(folder, *options, against=()):
    path = folder / "record.json"
    assert train_step.main([TOY, f"--output={path}", *options, "--against", *against]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """In blocks, in fp32, with a profile; and the folder of the record."""
    folder = tmp_path_factory.mktemp("blocks")
    return measured(folder, "--profile", "--commit=abc"), folder


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("alternating"), "--order=alternate", against=RIVALS)


@pytest.fixture(scope="module")
def two_processes():
    return run_group("train_step_cases", 2)


def check(record, processes=1):
    assert record["parity"]["difference"] <= record["parity"]["allowed"]
    tokens = record["run"]["tokens_per_step"]
    for block in record["blocks"]:
        assert all(math.isfinite(loss) for loss in block["losses"])
        assert len(block["seconds"]) == len(block["losses"]) and min(block["seconds"]) > 0
    for name, found in record["models"].items():
        encoding = name if name in ENCODINGS else "rope"
        model = run_config(encoding, SHAPES["toy"], 1, train_step.parse([TOY], False)[0]).model
        assert found["tokens_per_second"] == pytest.approx(tokens / found["seconds_per_step"])
        flops = flops_per_token(model) * found["tokens_per_second"] / processes
        assert found["tflops"] == pytest.approx(flops / 1e12) and found["mfu"] is None
        assert found["of_matmul"] == pytest.approx(flops / record["matmul_flops"])
        assert 0 < found["memory"]["peak"]


def test_blocks_are_recorded_with_phases_speed_and_memory(blocks):
    record, _ = blocks
    check(record)
    assert record["environment"]["commit"] == "abc" and record["run"]["zero_stage"] == 1
    assert [(block["model"],) for block in record["blocks"]] == turns("blocks", [])
    seconds = {name: record["models"][name]["seconds_per_step"] for name in ENCODINGS}
    assert record["ratio_time"] == seconds["tape"] / seconds["rope"]
    assert record["ratio_memory"] > 1
    assert record["models"]["tape"]["position_update"] == "plain torch"


def test_two_engines_in_one_process_train_as_one_after_the_other(blocks, alternating):
    tape, rope, again, last = blocks[0]["blocks"]
    assert tape["losses"] == last["losses"] and tape["losses"] != rope["losses"]
    assert tape["losses"][0] > tape["losses"][-1] and rope["losses"][0] > again["losses"][-1]
    check(alternating)
    assert [block["losses"] for block in alternating["blocks"][:2]] == [rope["losses"], tape["losses"]]
    rope, tape = (block["seconds"] for block in alternating["blocks"][:2])
    assert alternating["ratio_time"] == pytest.approx(sum(t / r for t, r in zip(tape, rope)) / 2)


def test_rivals_learn_the_same_tokens_in_the_same_turns(alternating):
    assert list(alternating["models"]) == [*ENCODINGS, *RIVALS]
    rope, _, *rivals = alternating["blocks"]
    for block in rivals:
        assert (
            block["losses"][0] == pytest.approx(rope["losses"][0], abs=0.3) and block["losses"][-1] < rope["losses"][0]
        )
    fastest, ratios = alternating["fastest_rival"], alternating["ratios_to_fastest_rival"]
    assert fastest == min(RIVALS, key=lambda name: alternating["models"][name]["seconds_per_step"])
    taken = {block["model"]: block["seconds"] for block in alternating["blocks"]}
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(sum(a / b for a, b in zip(taken[name], taken[fastest])) / 2)


def test_in_blocks_and_bf16_the_second_half_is_in_reverse_order_so_that_a_drift_cancels(tmp_path):
    record = measured(tmp_path, "--precision=bf16", against=RIVALS)
    there = ["tape", "rope", *RIVALS]
    assert [block["model"] for block in record["blocks"]] == [*there, *reversed(there)]
    for name in RIVALS:
        first, again = (block["losses"] for block in record["blocks"] if block["model"] == name)
        assert again[-1] < first[0] and (first == again) == (name != RIVALS[-1])  # which is built only once
        ratio = (
            record["models"][name]["seconds_per_step"] / record["models"][record["fastest_rival"]]["seconds_per_step"]
        )
        assert record["ratios_to_fastest_rival"][name] == ratio


def test_a_rival_that_cannot_take_a_step_is_left_out_with_the_reason(tmp_path, monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Rival, "step", step)
    record = measured(tmp_path, against=["transformers"])
    assert set(record["models"]) == set(ENCODINGS) and "no room" in record["rejected_rivals"]["transformers"]


def test_the_layers_of_transformer_engine_are_taken_where_it_is_installed(monkeypatch):
    taken, local = [], gpt_layer_specs.get_gpt_layer_local_spec
    monkeypatch.setattr(
        gpt_layer_specs,
        "get_gpt_layer_with_transformer_engine_spec",
        lambda: taken.append("engine") or local(normalization="RMSNorm"),
    )
    model = run_config("rope", SHAPES["toy"], 1, train_step.parse([TOY], False)[0]).model
    layout = initialize_distributed()
    assert Megatron(model, torch.float32, layout, transformer_engine=False).mask is not None and not taken
    assert Megatron(model, torch.float32, layout, transformer_engine=True).mask is None and taken


def test_rivals_are_those_that_can_train_here(monkeypatch, capsys):
    assert train_step.rivals_here(None, 1) == RIVALS and train_step.rivals_here(None, 2) == []
    assert train_step.main([TOY, "--against", "transformer_engine"]) == 2
    assert "--against names transformer_engine, which needs a GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="is not installed"):
        train_step.rivals_here(["transformer_engine"], 1)
    with pytest.raises(ConfigError, match="trains on one process"):
        train_step.rivals_here(["megatron"], 2)
    monkeypatch.setattr(train_step.importlib.util, "find_spec", lambda name: name)
    assert train_step.rivals_here(None, 1) == [*RIVALS, "transformer_engine"]


def test_bf16_trains_under_zero_1_and_models_can_be_measured_once(tmp_path):
    record = measured(tmp_path, "--precision=bf16", "--order=once", "--rope-backend=tiled", "--recompute=full")
    check(record)
    assert record["run"]["zero_stage"] == 1 and record["run"]["recompute"] == "full"
    assert [block["model"] for block in record["blocks"]] == ["tape", "rope"]
    assert record["models"]["rope"]["attention"] == "tiled"


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
    for ours, alone in zip(case["record"]["blocks"], alternating["blocks"][:2], strict=True):
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
    assert train_step.main([TOY, "--order=alternate", f"--output={tmp_path / 'record.json'}", "--against"]) == 1
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


@pytest.mark.parametrize("options", [["--tensor-parallel=3"]])
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


def test_the_155m_shape_is_the_recipe():
    arguments, shape = train_step.parse(["--shape=155m-1k"], False)
    recipe = parse_run_config(["--config", "pretrain/recipes/tape_155m.yaml"])
    ours = run_config("tape", shape, 1, arguments)
    assert ours.model == recipe.model
    assert ours.train.global_batch_size * 4 == recipe.train.global_batch_size


def test_layers_and_tokens_can_differ_from_the_shape():
    _, shape = train_step.parse([TOY, "--layers=3", "--tokens=48"], False)
    assert shape == dataclasses.replace(SHAPES["toy"], layers=3, seq_length=48)


def test_the_defaults_of_a_cpu_and_a_gpu():
    def chosen(*options, on_gpu):
        arguments, shape = train_step.parse(list(options), on_gpu)
        names = ("shape", "precision", "zero_stage", "order")
        return *(getattr(arguments, name) for name in names), shape.micro_batch

    assert chosen(on_gpu=False) == ("cpu", "fp32", 1, "alternate", 1)
    assert chosen(on_gpu=True) == ("155m-1k", "bf16", 1, "blocks", 32)
    assert chosen("--micro-batch=3", "--precision=fp32", on_gpu=True)[1:3] == ("fp32", 1)
    with pytest.raises(SystemExit):
        chosen("--order=alternate", on_gpu=True)
