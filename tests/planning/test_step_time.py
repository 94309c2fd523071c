"""Predicted step times against arithmetic by hand, the rates they use, and the search for the fastest layout."""

import dataclasses
import json
from collections import Counter

import pytest
from plans import GIB, of_recipe

from megatron_tape.checks.settings import validate
from megatron_tape.errors import FileError
from megatron_tape.ops.backends.table import HOPPER
from megatron_tape.planning.communication import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from megatron_tape.planning.flops import flops_per_token, loads, product_flops
from megatron_tape.planning.hardware import KINDS, Group, Hardware, with_rates
from megatron_tape.planning.memory import memory
from megatron_tape.planning.search import candidates, fits, search
from megatron_tape.planning.step_time import step_time

H100 = KINDS["H100"]
ROUND = Hardware(
    "round", HOPPER, memory=80, peak=2e12, matmul=1e12, attention=5e11, state_attention=4e11, memory_bandwidth=1e11,
    intra_node_bandwidth=1e10, inter_node_bandwidth=1e9, intra_node_latency=1e-3, inter_node_latency=1e-2,
    operation_start=1e-9,
)  # fmt: skip
ONE = "--parallel.tensor_model_parallel_size=1"


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
        # Four context ranks side by side, and the next four eight stages further: half a node has members.
        (Group(8, 8, neighbours=4, near=1), ALL_GATHER, 1, 7 / 8 * 1e9 / 4e9 + 3e-3 + 1e-2),
        (Group(8, 16, neighbours=4, near=2), ALL_GATHER, 1, 7 / 8 * 1e9 / 4e9 + 3e-3 + 1e-2),
        # Of an all-to-all of four, two in each of two nodes, half goes to the other node.
        (Group(4, 4), ALL_TO_ALL, 1, 0.5e9 / 1e9 + 1e-2),
    ],
)
def test_collectives_take_what_a_ring_a_tree_or_single_messages_take(group, kind, calls, seconds):
    assert group.seconds(kind, 10**9, calls, ROUND) == pytest.approx(seconds)


@pytest.mark.parametrize("encoding", ["tape", "rope", "fox", "nope"])
@pytest.mark.parametrize("layout", [[], [ONE], ["--model.qkv_bias=true"]])
def test_the_flops_of_the_phases_are_those_of_the_model(encoding, layout):
    plan = of_recipe(8, f"--model.position_encoding={encoding}", *layout)
    found = loads(plan)
    tokens = plan.batch.tokens / plan.config.parallel.ranks_per_sequence
    assert 3 * sum(load.forward for load in found.values()) == pytest.approx(flops_per_token(plan.model) * tokens)
    # Attention computes its scores once more: a product of those of the forward pass.
    once = 2 * plan.model.num_layers * plan.model.hidden_size * plan.model.seq_length / 2 * tokens
    assert found["attention"].backward == pytest.approx(2 * found["attention"].forward + once)


def test_a_step_takes_its_flops_and_bytes_at_the_rates():
    apart = "--deepspeed.overlap_comm=false"
    plan = of_recipe(4, "--model.position_encoding=rope", ONE, "--deepspeed.zero_stage=1", apart)
    found, tokens = step_time(plan, ROUND), 512 * 4096 / 4
    matrices = 16 * (2048 * 64 * (32 + 2 * 8) + 2048 * 2048 + 3 * 2048 * 8192)
    assert found.projections == pytest.approx(6 * matrices * tokens / 1e12)
    pairs = 16 * 2048 * 4096 / 2 * tokens
    assert found.attention == pytest.approx(2 * (2 + 5) * pairs / 5e11)
    assert found.position == found.host == found.tensor_parallel == found.context_parallel == found.recomputation == 0
    # bf16: norms and residuals, the MLP's activation, rotation; the backward pass takes twice the bytes.
    assert found.elementwise == pytest.approx(3 * 2 * 16 * tokens * (10 * 2048 + 3 * 8192 + 2 * 64 * 48) / 1e11)
    # Four GPUs scatter the sums of fp32 gradients around a ring, and gather bf16 weights.
    sent = 4 * plan.elements * 3 / 4 + 2 * plan.elements * 3 / 4
    assert found.zero == pytest.approx(sent / 1e10, rel=0.2) and found.zero > sent / 1e10
    assert found.total == pytest.approx(sum(dataclasses.astuple(found))) and plan.model.num_layers == 16


@pytest.mark.parametrize(
    "backend, dim, forward, backward, rate",
    [
        ("torch", 64, 4, 10, 5e11),
        ("torch", 128, 4, 10, 5e11),
        ("torch_wide", 64, 3, 7, 5e11),
        ("triton", 64, 3, 7, 4e11),
        ("triton", 128, 3, 8, 4e11),
        ("triton --train.deterministic=true", 64, 3, 10, 4e11),
        ("triton --train.deterministic=true", 128, 3, 11, 4e11),
    ],
)
def test_attention_takes_the_products_of_its_backend_at_its_rate(backend, dim, forward, backward, rate):
    settings = f"--model.attention_backend={backend} --model.kv_channels={dim} {ONE}".split()
    # The last layer averages no state.
    plan, two = (of_recipe(4, *settings, f"--model.num_layers={layers}") for layers in (1, 2))
    one, both = loads(plan)["attention"], loads(two)["attention"]
    product = 2 * 32 * dim * 4096 / 2 * plan.batch.tokens
    assert one.forward == 2 * product
    assert both.forward - one.forward == forward * product
    assert both.backward - one.backward == backward * product
    assert step_time(plan, ROUND).attention == pytest.approx((one.forward + one.backward) * plan.micro_batches / rate)


def test_attention_over_that_of_rope_on_an_h100_is_what_the_products_and_rates_say():
    """Forward and backward, in the layers that average the state; docs/scaling.md names these figures."""

    def seconds(backend, dim):
        settings = [f"--model.attention_backend={backend}", f"--model.kv_channels={dim}", ONE]
        one, two = (step_time(of_recipe(8, *settings, f"--model.num_layers={n}"), H100).attention for n in (1, 2))
        return two - one

    rope = {dim: seconds("torch", dim) / 2 for dim in (64, 128)}
    found = {
        (backend, dim): round(seconds(backend, dim) / rope[dim], 2)
        for backend, dim in (("torch_wide", 64), ("triton", 64), ("triton", 128))
    }
    assert found == {("torch_wide", 64): 1.43, ("triton", 64): 2.71, ("triton", 128): 2.98}


def test_settings_change_the_phases_that_they_should():
    layout = ["--parallel.tensor_model_parallel_size=2", "--deepspeed.zero_stage=2"]

    def found(*overrides, processes=16, hardware=H100):
        plan = of_recipe(processes, *layout, *overrides)
        return step_time(dataclasses.replace(plan, generation=hardware.generation), hardware)

    plain, full, of_phases = found(), found("--train.recompute=full"), loads(of_recipe(16, *layout))
    forward = sum(load.forward for name, load in of_phases.items() if name not in ("loss", "elementwise"))
    assert full.recomputation > 16 * forward / H100.matmul and plain.recomputation == 0
    assert full.projections == plain.projections and full.tensor_parallel > plain.tensor_parallel
    # Attention is not computed again, but what is sent in a layer is sent again.
    selective, attention = found("--train.recompute=selective"), of_phases["attention"]
    spared = 16 * max(attention.forward / H100.attention, attention.moved / H100.memory_bandwidth)
    assert full.recomputation - selective.recomputation == pytest.approx(spared)
    assert selective.tensor_parallel == full.tensor_parallel and selective.attention == full.attention
    by_rows = "--model.position_encoding=cope"
    assert found(by_rows, "--train.recompute=selective") == found(by_rows, "--train.recompute=full")
    apart = found("--deepspeed.overlap_comm=false")
    assert plain.zero < apart.zero and plain.projections == apart.projections
    # The last bucket is complete only when the backward pass ends.
    in_two, in_six = (found(f"--deepspeed.reduce_bucket_size={size}").zero for size in (300_000_000, 100_000_000))
    assert in_six < in_two < apart.zero
    rope = found("--model.position_encoding=rope")
    assert 1.2 < plain.attention / rope.attention < 10 / 7
    assert rope.position == 0 and plain.projections == rope.projections
    assert plain.total < found(hardware=KINDS["A100-80GB"]).total
    # ZeRO 3 costs the host something for every parameter, whatever the number of ranks.
    few = ["--model.seq_length=256", ONE, "--train.micro_batch_size=1", "--train.global_batch_size=4096"]
    of_one, of_three = (
        [found(*few, f"--deepspeed.zero_stage={stage}", processes=count).host for count in (2048, 4096)]
        for stage in (1, 3)
    )
    assert of_three[0] - of_one[0] == pytest.approx(2 * (of_three[1] - of_one[1])) and of_three[1] > of_one[1] > 0
    # Small products wait for the host.
    assert step_time(of_recipe(1, "--train.precision=bf16", name="tape_demo"), H100).host > 0


def test_recomputed_products_are_counted():
    plain, full = (product_flops(of_recipe(16, f"--train.recompute={how}")) for how in ("none", "full"))
    assert 1.2 < full / plain < 1.34


def test_measured_rates_replace_assumed_ones(tmp_path):
    path = tmp_path / "rates.json"
    measured = {"matmul": 7e14, "inter_node_bandwidth": 4e10}
    path.write_text(json.dumps({"gpu": "NVIDIA H100 80GB HBM3", "rates": measured}))
    assert with_rates(H100, path) == dataclasses.replace(H100, **measured, measured=tuple(measured))


@pytest.mark.parametrize(
    "text, problem",
    [
        (None, "No such file"),
        ("{", "it is not JSON"),
        ('{"gpu": "x", "rates": {"matmul": "fast"}}', "rates.matmul is 'fast'"),
        ('{"gpu": "x", "rates": {"matmull": 1.0}}', "gives matmull"),
        ('{"gpu": "x", "rates": {"matmul": 0.0}}', "gives matmul 0.0"),
        ('{"gpu": "NVIDIA A100-SXM4-80GB", "rates": {}}', "was measured on NVIDIA A100-SXM4-80GB, but --gpu is H100"),
    ],
)
def test_rates_that_cannot_be_used_are_refused(tmp_path, text, problem):
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FileError) as error:
        with_rates(H100, path)
    assert error.value.subject == str(path) and problem in error.value.problem


def test_a_search_finds_the_fastest_layouts_that_fit():
    plan = of_recipe(16)
    found = search(plan, H100, 40, validate)
    every = [
        (step_time(candidate, H100).total, fits(memory(candidate), 40))
        for candidate in candidates(plan, 8, validate, Counter())
    ]
    assert found.tried == len(every) > 50 and len(found.fitting) == 10 and found.too_large
    fitting = sorted(total for total, fitting in every if fitting)
    assert [prediction.time.total for prediction in found.fitting] == fitting[:10]
    for prediction in found.fitting:
        validate(prediction.plan.config, 16)
        assert prediction.memory.peak <= 0.94 * 40 * GIB
        assert prediction.plan.config.train.global_batch_size == plan.config.train.global_batch_size
    assert all(prediction.memory.peak > 0.94 * 40 * GIB for prediction in found.too_large)
