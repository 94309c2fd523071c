"""Predicted step times against arithmetic by hand, and the search for the fastest layout."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from megatron_tape.planning.costs import estimate

from benchmarks import rates
from benchmarks.utilization import peak_flops
from megatron_tape.checks.arguments import read_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.errors import ConfigError
from megatron_tape.planning.communication import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.hardware import KINDS, Group, Hardware, with_rates
from megatron_tape.planning.search import candidates, fits, search
from megatron_tape.planning.step_time import loads, product_flops, step_time
from pretrain import estimate as command

RECIPES = Path(__file__).parent.parent / "pretrain" / "recipes"
ROUND = Hardware(
    "round", memory=80, peak=2e12, matmul=1e12, attention=5e11, memory_bandwidth=1e11, inside=1e10, between=1e9,
    latency_inside=1e-3, latency_between=1e-2, operation_start=1e-9,
)  # fmt: skip


def recipe(name="tape_1b", *overrides):
    return read_run_config(["--config", str(RECIPES / f"{name}.yaml"), *overrides])


@pytest.mark.parametrize(
    "group, kind, calls, seconds",
    [
        # A ring of four in a node passes three quarters of the bytes on, in three hops.
        (Group(4, 1), ALL_GATHER, 1, 0.75e9 / 1e10 + 3e-3),
        (Group(4, 1), ALL_REDUCE, 2, 2 * (0.75e9 / 1e10 + 2 * 3e-3)),
        (Group(4, 1), ALL_TO_ALL, 1, 0.75e9 / 1e10 + 1e-3),
        # All eight members of a node share the node's links to another node; one member alone has one link.
        (Group(16, 1), ALL_GATHER, 1, 15 / 16 * 1e9 / 8e9 + 7e-3 + 1e-2),
        (Group(2, 8), ALL_GATHER, 1, 0.5e9 / 1e9 + 1e-2),
        (Group(32, 1), ALL_REDUCE, 1, 2 * (31 / 32 * 1e9 / 8e9 + 7e-3 + 2 * 1e-2)),
        # Of an all-to-all of four, two in each of two nodes, half goes to the other node.
        (Group(4, 4), ALL_TO_ALL, 1, 0.5e9 / 1e9 + 1e-2),
    ],
)
def test_collectives_take_what_a_ring_a_tree_or_single_messages_take(group, kind, calls, seconds):
    assert group.seconds(kind, 10**9, calls, ROUND) == pytest.approx(seconds)


@pytest.mark.parametrize("encoding", ["tape", "rope", "fox", "nope"])
@pytest.mark.parametrize("layout", [[], ["--parallel.tensor_model_parallel_size=1"], ["--model.qkv_bias=true"]])
def test_the_flops_of_the_phases_are_those_of_the_model(encoding, layout):
    config = recipe("tape_1b", f"--model.position_encoding={encoding}", *layout)
    found = loads(config)
    tokens = config.train.micro_batch_size * config.model.seq_length / config.parallel.ranks_per_sequence
    assert 3 * sum(load.forward for load in found.values()) == pytest.approx(flops_per_token(config.model) * tokens)
    # Attention computes its scores once more: a product of those of the forward pass.
    once = 2 * config.model.num_layers * config.model.hidden_size * config.model.seq_length / 2 * tokens
    assert found["attention"].backward == pytest.approx(2 * found["attention"].forward + once)


def test_a_step_takes_its_flops_and_bytes_at_the_rates():
    config = recipe(
        "tape_1b",
        "--model.position_encoding=rope",
        "--parallel.tensor_model_parallel_size=1",
        "--deepspeed.zero_stage=1",
    )
    found, model, tokens = step_time(config, 4, ROUND), config.model, 512 * 4096 / 4
    matrices = 16 * (2048 * 64 * (32 + 2 * 8) + 2048 * 2048 + 3 * 2048 * 8192)
    assert found.projections == pytest.approx(6 * matrices * tokens / 1e12)
    pairs = 16 * 2048 * 4096 / 2 * tokens
    assert found.attention == pytest.approx(2 * (2 + 5) * pairs / 5e11)
    assert found.position == found.host == found.tensor_parallel == found.context_parallel == found.recomputation == 0
    # bf16: norms and residuals, the MLP's activation, rotation; the backward pass takes twice the bytes.
    assert found.elementwise == pytest.approx(3 * 2 * 16 * tokens * (10 * 2048 + 5 * 8192 + 2 * 64 * 48) / 1e11)
    parameters = estimate(config, 4).parameters
    # Four GPUs average fp32 gradients in a ring there and back, and gather bf16 weights.
    sent = 2 * 4 * parameters * 3 / 4 + 2 * parameters * 3 / 4
    assert found.zero == pytest.approx(sent / 1e10, rel=0.2) and found.zero > sent / 1e10
    assert found.total == pytest.approx(sum(dataclasses.astuple(found))) and model.num_layers == 16


def test_settings_change_the_phases_that_they_should():
    def found(*overrides, processes=16, hardware=KINDS["H100"]):
        return step_time(recipe("tape_1b", *overrides), processes, hardware)

    plain, full = found(), found("--train.recompute=full")
    forward = sum(load.forward for name, load in loads(recipe()).items() if name not in ("loss", "elementwise"))
    assert full.recomputation > 16 * forward / KINDS["H100"].matmul and plain.recomputation == 0
    assert full.projections == plain.projections and full.tensor_parallel > plain.tensor_parallel
    # Attention is not computed again, but what is sent in a layer is sent again.
    selective, attention = found("--train.recompute=selective"), loads(recipe())["attention"]
    spared = 16 * attention.seconds(KINDS["H100"].attention, KINDS["H100"])[0]
    assert full.recomputation - selective.recomputation == pytest.approx(spared)
    assert selective.tensor_parallel == full.tensor_parallel and selective.attention == full.attention
    by_rows = "--model.position_encoding=cope"
    assert found(by_rows, "--train.recompute=selective") == found(by_rows, "--train.recompute=full")
    overlapping = found("--deepspeed.overlap_comm=true")
    assert overlapping.zero < plain.zero and overlapping.projections == plain.projections
    rope = found("--model.position_encoding=rope")
    assert rope.position == 0 and 1.2 < plain.attention / rope.attention < 1.5 and plain.projections == rope.projections
    assert plain.total < found(hardware=KINDS["A100-80GB"]).total
    # ZeRO 3 costs the host something for every parameter and rank.
    many = ["--train.global_batch_size=4096", "--parallel.tensor_model_parallel_size=1", "--train.micro_batch_size=1"]
    assert found(*many, "--deepspeed.zero_stage=3", processes=4096).host > 1
    assert found(*many, "--deepspeed.zero_stage=1", processes=4096).host == 0
    # Small products wait for the host.
    assert step_time(recipe("tape_demo", "--train.precision=bf16"), 1, KINDS["H100"]).host > 0


@pytest.mark.parametrize("kind, gpu", [("H100", "NVIDIA H100 80GB HBM3"), ("A100-80GB", "NVIDIA A100-SXM4-80GB"),
                                       ("H200", "NVIDIA H200"), ("B200", "NVIDIA B200")])  # fmt: skip
def test_peaks_are_those_of_the_benchmarks(kind, gpu):
    assert KINDS[kind].peak == peak_flops(gpu)
    assert KINDS[kind].attention < KINDS[kind].matmul < KINDS[kind].peak


def test_the_kind_of_gpu_may_be_written_in_small_letters(capsys):
    recipe = ["--config", str(RECIPES / "tape_1b.yaml")]
    outputs = [command.main([*recipe, "--gpu", kind]) or capsys.readouterr().out for kind in ("h200", "H200")]
    assert outputs[0] == outputs[1] and " s on H200, rates assumed" in outputs[0]


def test_measured_rates_replace_assumed_ones(tmp_path, capsys):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H100 80GB HBM3", "rates": {"matmul": 7e14, "between": 4e10}}))
    found = with_rates(KINDS["H100"], path)
    assert (found.matmul, found.between, found.attention) == (7e14, 4e10, KINDS["H100"].attention)
    assert command.main(["--config", str(RECIPES / "tape_1b.yaml"), "--rates", str(path)]) == 0
    assert "on H100, measured: matmul, between; else assumed" in capsys.readouterr().out


def test_rates_of_something_else_than_a_known_gpu_are_a_warning(tmp_path, capsys):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"gpu": "CPU", "rates": {"matmul": 1e11}}))
    assert command.main(["--config", str(RECIPES / "tape_1b.yaml"), "--rates", str(path)]) == 0
    assert (
        "warning: predicted for H100 with rates of CPU: what was not measured is that of another machine"
        in capsys.readouterr().err
    )


def test_a_search_names_the_settings_of_the_fastest_layout(tmp_path, capsys):
    arguments = ["--config", str(RECIPES / "tape_1b.yaml"), "--processes", "64"]
    assert command.main([*arguments, "--search"]) == 0
    output = capsys.readouterr().out
    settings = re.search(r"^the first of these: (.*)$", output, re.M)[1].split()
    assert command.main([*arguments, *settings]) == 0
    first = output.splitlines()[2].split()
    assert f" {first[6]} s on H100, rates assumed" in capsys.readouterr().out
    recipe = tmp_path / "sharded.yaml"
    recipe.write_text("parallel: {sequence_parallel: true}\n")
    assert command.main([*arguments, "--config", str(recipe), "--search"]) == 0
    assert "--parallel.sequence_parallel null" in capsys.readouterr().out


def test_the_benchmark_writes_rates_that_can_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "rates.json"
    rates.main(["--output", str(path)])
    found = with_rates(KINDS["H100"], path)
    assert set(found.measured) == {"matmul", "attention", "memory_bandwidth", "operation_start"}
    assert "matmul " in capsys.readouterr().out
    assert 1e8 < found.matmul < 1e16 and 1e6 < found.attention < 1e15 and 1e-8 < found.operation_start < 1e-2
    assert found.between == KINDS["H100"].between


@pytest.mark.parametrize(
    "text, named",
    [
        (None, "No such file"),
        ("{", "it is not JSON"),
        ('{"gpu": "x", "rates": {"matmul": "fast"}}', "rates.matmul is 'fast'"),
        ('{"gpu": "x", "rates": {"matmull": 1.0}}', "gives matmull; choose from matmul"),
        ('{"gpu": "x", "rates": {"matmul": 0.0}}', "gives matmul 0.0; it must be a number above 0"),
        ('{"gpu": "NVIDIA A100-SXM4-80GB", "rates": {}}', "was measured on NVIDIA A100-SXM4-80GB, but --gpu is H100"),
    ],
)
def test_rates_that_cannot_be_used_end_in_one_sentence(tmp_path, text, named):
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(named)) as error:
        with_rates(KINDS["H100"], path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_the_command_prints_phases_that_add_up(capsys):
    assert command.main(["--config", str(RECIPES / "tape_1b.yaml"), "--processes", "64"]) == 0
    output = capsys.readouterr().out
    expected = step_time(recipe(), 64, KINDS["H100"])
    total = re.search(r"^step time \(predicted, not measured\) +([\d.]+) s on H100, rates assumed$", output, re.M)
    phases = re.findall(r"^  [^\n]* ([\d.]+) s +\d+%$", output, re.M)
    assert float(total[1]) == pytest.approx(expected.total, abs=1e-3)
    assert sum(map(float, phases)) == pytest.approx(expected.total, abs=0.01) and len(phases) == 8
    assert re.search(rf"^tokens per second +{512 * 4096 / expected.total:,.0f}, ", output, re.M)


@pytest.mark.parametrize(
    "overrides, why", [(["--train.precision=fp32"], "is fp32"), (["--deepspeed.offload_optimizer=true"], "on the host")]
)
def test_what_cannot_be_predicted_is_said(capsys, overrides, why):
    assert command.main(["--config", str(RECIPES / "tape_1b.yaml"), *overrides]) == 0
    assert re.search(rf"^step time +not predicted: .*{why}", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit):
        command.main(["--config", str(RECIPES / "tape_1b.yaml"), *overrides, "--search", "--processes=8"])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and why in error


def test_a_search_finds_the_fastest_layouts_that_fit():
    config, hardware = recipe(), KINDS["H100"]
    found = search(config, 16, hardware, 40, validate)
    every = [
        (step_time(c, 16, hardware).total, fits(estimate(c, 16), 40))
        for c in candidates(config, 16, 8, validate, Counter())
    ]
    assert found.tried == len(every) > 50 and len(found.fitting) == 10 and found.too_large
    assert [layout.time.total for layout in found.fitting] == sorted(total for total, fitting in every if fitting)[:10]
    for layout in found.fitting:
        validate(layout.config, 16)
        assert layout.memory.peak <= 0.94 * 40 * 2**30
        assert layout.config.train.global_batch_size == config.train.global_batch_size
    assert all(layout.memory.peak > 0.94 * 40 * 2**30 for layout in found.too_large)
    assert config == recipe()


def test_the_command_lists_layouts_and_why_others_do_not_fit(capsys):
    arguments = ["--config", str(RECIPES / "tape_1b.yaml"), "--search", "--processes", "16", "--gpu-memory"]
    assert command.main([*arguments, "40"]) == 0
    output = capsys.readouterr().out
    rows = re.findall(
        r"^ +(\d+) +\d+ +\d+ +([123]) +\d+ +\w+ +([\d.]+) +[\d,]+ +[\d.]+% +([\d.]+)  (.*)$", output, re.M
    )
    fitting, others = rows[:10], rows[10:]
    assert [float(row[2]) for row in fitting] == sorted(float(row[2]) for row in fitting)
    assert all(float(row[3]) <= 0.94 * 40 for row in fitting) and "projections" in fitting[0][4]
    assert 0 < len(others) <= 5 and all(0.94 * 40 < float(row[3]) < 2 * 40 for row in others)
    assert "activations" in others[0][4] and "predicted for 16 GPUs, H100, rates assumed" in output
    assert command.main([*arguments, "1"]) == 0
    output = capsys.readouterr().out
    assert "none fits in 1 GiB, of which 6% must stay free; the smallest:\n" in output
    sizes = [float(size) for size in re.findall(r"% +([\d.]+)  ", output.partition("smallest:")[2])]
    assert len(sizes) == 5 and sizes == sorted(sizes)
    for chosen in ("--parallel.tensor_model_parallel_size=2", "--train.recompute=full"):
        with pytest.raises(SystemExit):
            command.main([*arguments, "40", chosen])
        assert f"--search chooses {chosen[2:].partition('=')[0]} itself" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([*arguments[:3]])
    assert "--search needs --processes" in capsys.readouterr().err
    assert command.main([*arguments[:3], "--processes", "63"]) == 0
    output = capsys.readouterr().out
    assert "\nno layout can run on 63 GPUs\n" in output and "fits in" not in output
    assert "cannot run: train.global_batch_size 512 is not divisible by" in output.splitlines()[2]


def test_recomputed_products_are_counted():
    plain, full = (product_flops(recipe("tape_1b", f"--train.recompute={how}"), 16) for how in ("none", "full"))
    assert 1.2 < full / plain < 1.34
