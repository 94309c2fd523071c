"""The attention backend that a plan assumes equals the choice of `auto`, and `estimate` prints
it.
"""

import pytest
from plans import recipe

from megatron_tape.ops.backends.table import HOPPER, OTHER_GPU
from megatron_tape.planning.plan import Plan
from pretrain import estimate

PACKED = "--data.reset_attention_mask=true"
DETERMINISTIC = "--train.deterministic=true"


def path(generation, *overrides, name="tape_1b"):
    return Plan(recipe(name, *overrides), 1, generation=generation).attention


@pytest.mark.parametrize(
    "generation, overrides, backend",
    [
        (HOPPER, [], "torch_wide"),
        (OTHER_GPU, [], "triton"),
        (HOPPER, ["--model.kv_channels=60"], "torch"),  # no multiple of 8, which cuDNN needs
        (HOPPER, [PACKED], "triton"),
        (HOPPER, [DETERMINISTIC], "triton"),
        (HOPPER, ["--extension.attention=shifted_sparse"], "triton"),
        (HOPPER, ["--train.precision=fp32"], "triton"),
        (HOPPER, ["--model.position_encoding=rope"], "torch"),
        (HOPPER, ["--model.sliding_window=512"], "triton"),
        (HOPPER, ["--model.position_encoding=rope", "--model.sliding_window=512"], "triton"),
        (HOPPER, ["--model.position_encoding=fox", "--model.sliding_window=512"], "flex"),
        # A window of the whole sequence is none.
        (HOPPER, ["--model.sliding_window=1_000_000"], "torch_wide"),
        (OTHER_GPU, ["--model.attention_backend=flash_attn"], "flash_attn"),
    ],
)
def test_the_planned_backend_depends_on_the_gpu_generation_and_the_run(
    generation, overrides, backend
):
    assert path(generation, *overrides).backend == backend


def test_an_estimate_names_the_assumed_backend(capsys):
    estimate.main(["tape_1b", "--gpu=H100"])
    assert "assumed" in capsys.readouterr().out.partition("torch_wide, one call of cuDNN")[0]
