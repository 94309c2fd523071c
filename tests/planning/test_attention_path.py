"""The attention backend that a plan assumes, against the table by which `auto` chooses, and what `estimate` prints."""

import dataclasses
import itertools

import pytest
from plans import of_recipe, recipe

from megatron_tape.ops.backends import HEAD_DIMS
from megatron_tape.ops.backends.table import BLACKWELL, HOPPER, OTHER_GPU, Case, rows
from megatron_tape.planning.plan import Plan
from pretrain import estimate

GENERATIONS = (OTHER_GPU, HOPPER, BLACKWELL)
PACKED, DETERMINISTIC = "--data.reset_attention_mask=true", "--train.deterministic=true"


def path(generation, *overrides, name="tape_1b"):
    return Plan(recipe(name, *overrides), 1, generation=generation).attention


@pytest.mark.parametrize("encoding", ["tape", "rope", "fox", "cope"])
@pytest.mark.parametrize("dim", [48, 64, 128])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_plan_assumes_the_first_row_whose_package_torch_brings_along(generation, dim, encoding):
    settings = [f"--model.position_encoding={encoding}", f"--model.kv_channels={dim}"]
    for packed, deterministic in itertools.product((False, True), repeat=2):
        overrides = [*settings, *[PACKED] * packed, *[DETERMINISTIC] * deterministic]
        plan = Plan(recipe("tape_1b", *overrides), 1, generation=generation)
        needs = plan.encoding.needs
        case = Case(generation, needs, dim, packed=packed, deterministic=deterministic, grouped=True)
        without = {"flash_attn", "fla"} | (set() if dim in HEAD_DIMS else {"triton"})
        expected = next(row for row in rows(case) if row.backend not in without)
        assert plan.attention == expected


@pytest.mark.parametrize(
    "generation, overrides, backend",
    [
        (HOPPER, [], "torch_wide"),
        (BLACKWELL, [], "torch_wide"),
        (OTHER_GPU, [], "triton"),
        (HOPPER, ["--model.kv_channels=128"], "torch"),
        (HOPPER, ["--model.kv_channels=60"], "torch"),  # no multiple of 8, which cuDNN needs
        (HOPPER, [PACKED], "triton"),
        (HOPPER, [DETERMINISTIC], "triton"),
        (HOPPER, ["--extension.attention=shifted_sparse"], "triton"),
        (HOPPER, ["--train.precision=fp32"], "triton"),
        (OTHER_GPU, ["--model.kv_channels=48"], "torch"),
        (HOPPER, ["--model.position_encoding=rope"], "torch"),
        (HOPPER, ["--model.position_encoding=rope", PACKED], "triton"),
        (OTHER_GPU, ["--model.attention_backend=flash_attn"], "flash_attn"),
    ],
)
def test_the_backend_follows_the_generation_and_what_a_run_needs(generation, overrides, backend):
    assert path(generation, *overrides).backend == backend


@pytest.mark.parametrize("name", ["tape_155m", "tape_1b", "tape_7b", "tape_70b", "tape_405b"])
def test_recipes_take_one_call_on_an_h100_if_their_heads_are_narrow(name):
    config = recipe(name)
    assert path(HOPPER, name=name).backend == ("torch_wide" if config.model.head_dim <= 64 else "torch")


def test_a_searched_or_changed_plan_keeps_the_generation_of_its_gpus():
    from collections import Counter

    from megatron_tape.checks.combinations import validate
    from megatron_tape.planning.search import candidates, smaller

    plan = dataclasses.replace(of_recipe(8), generation=OTHER_GPU)
    assert {candidate.generation for candidate in candidates(plan, validate, Counter())} == {OTHER_GPU}
    assert smaller(plan, 1, validate).plan.generation == OTHER_GPU


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--gpu=H100"], "torch_wide, one call of cuDNN on [v | z]"),
        (["--gpu=H100", "--model.attention_backend=triton"], "triton, as model.attention_backend says"),
        (["--gpu=A100-80GB"], "triton, "),
    ],
)
@pytest.mark.parametrize("more", [[], ["--processes=8", "--search"]])
def test_an_estimate_says_which_backend_it_assumes(capsys, arguments, said, more):
    estimate.main(["--config", "pretrain/recipes/tape_1b.yaml", *arguments, *more])
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("attention") and "assumed" in line
    ]
    assert said in line
