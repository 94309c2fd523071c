"""Estimated memory, FLOPs and disk space equal arithmetic by hand."""

import pytest
from plans import of_recipe

from megatron_tape.model.names import MATRICES
from megatron_tape.planning.flops import flops_per_step, flops_per_token
from megatron_tape.planning.memory import checkpoint_bytes, checkpoints_bytes, memory
from megatron_tape.planning.parameters import parameter_count

ONE = "--parallel.tensor_model_parallel_size=1"
TWO = "--parallel.tensor_model_parallel_size=2"
ZERO_2 = "--deepspeed.zero_stage=2"
EXTENSION = ["--extension.trains=[position,lora,embeddings,norms]", ONE]


@pytest.mark.parametrize(
    "stage, precision, expected",
    [
        # weights, gradients, two moments (and ZeRO's copy of the weights)
        (1, "fp32", [4, 4, 12 / 4]),
        (3, "fp32", [4 / 4, 4 / 4, 12 / 4]),
        (1, "bf16", [2, 4, 12 / 4]),
        (2, "bf16", [2, 4 / 4, 12 / 4]),
        (3, "bf16", [2 / 4, 4 / 4, 12 / 4]),
    ],
)
def test_state_is_sharded_according_to_the_zero_stage(stage, precision, expected):
    settings = [f"--deepspeed.zero_stage={stage}", f"--train.precision={precision}"]
    plan = of_recipe(4, ONE, *settings)
    found = memory(plan)
    parts = found.weights, found.gradients, found.optimizer
    assert [round(part / plan.elements, 2) for part in parts] == expected


def test_muon_has_one_moment_per_matrix_and_weight_averaging_adds_another():
    average = "--train.average={kind: ema}"
    plain = of_recipe(4, ONE)
    averaged = of_recipe(4, ONE, average)
    both = of_recipe(4, ONE, average, "--optimizer.kind=muon")
    matrices = parameter_count(plain.model, kinds=MATRICES)
    found = [memory(plan).optimizer for plan in (plain, averaged, both)]
    assert found[1] - found[0] == pytest.approx(plain.elements, abs=8)
    assert found[1] - found[2] == pytest.approx(matrices, abs=8)
    assert checkpoint_bytes(averaged) - checkpoint_bytes(plain) == 4 * plain.elements
    assert checkpoint_bytes(averaged) - checkpoint_bytes(both) == 4 * matrices


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_have_weights_but_no_gradient_and_no_optimizer_state(stage):
    settings = [f"--deepspeed.zero_stage={stage}", *EXTENSION]
    plan = of_recipe(4, *settings)
    found = memory(plan)
    trained = plan.trained_elements
    frozen = plan.elements - trained
    sharded = {1: (1, 1, 4), 2: (1, 4, 4), 3: (4, 4, 4)}[stage]
    assert 0 < trained < 0.2 * plan.elements
    assert found.weights == pytest.approx(2 * plan.elements / sharded[0], abs=8)
    assert found.gradients == pytest.approx(4 * trained / sharded[1], abs=8)
    assert found.optimizer == pytest.approx(12 * trained / sharded[2], abs=16)
    assert checkpoint_bytes(plan) == 4 * frozen + 12 * trained
    assert checkpoint_bytes(of_recipe(4, *settings, "--checkpoint.frozen=false")) == 12 * trained


def test_frozen_matrices_need_a_third_less_arithmetic():
    plan = of_recipe(4, *EXTENSION)
    model, extension = plan.model, plan.extension
    lora = parameter_count(model, extension, ["lora"])
    matrices = parameter_count(model, kinds=[*MATRICES, "output"])
    assert flops_per_token(model, extension) == flops_per_token(model) - 2 * matrices + 6 * lora


def test_memory_peaks_in_the_step_of_adam_if_activations_are_small():
    small = [
        "--train.micro_batch_size=1",
        "--model.seq_length=64",
        "--deepspeed.reduce_bucket_size=1000000",
        "--deepspeed.zero_stage=3",
    ]
    plan = of_recipe(1, ONE, *small)
    # bf16 weights; fp32 gradients, weights and moments; a copy of the gradients, and the bucket.
    assert memory(plan).peak == (2 + 4 + 12 + 4) * plan.elements + 4 * 1_000_000


def test_a_single_micro_batch_has_no_gradients_while_the_loss_is_computed():
    settings = [ONE, "--train.micro_batch_size=1", "--model.vocab_size=262144"]
    settings += ["--deepspeed.reduce_bucket_size=1000000"]
    one, two = (
        memory(of_recipe(8, *settings, f"--train.global_batch_size={size}")) for size in (8, 16)
    )
    assert one.gradients == 0
    assert two.gradients == 4 * of_recipe(8, *settings).elements
    assert one.peak == two.peak - two.gradients


@pytest.mark.parametrize(
    "bucket, least, most",
    [(100_000_000, 0.05, 0.2), (10**10, 1, 1)],
)
def test_a_single_micro_batch_allocates_the_gradients_of_a_bucket_at_its_first_gradient(
    bucket, least, most
):
    """About a billion gradients, in several buckets or in one, while the layers' activations
    dominate the memory.
    """
    size = f"--deepspeed.reduce_bucket_size={bucket}"
    few_logits = "--model.vocab_size=4096"
    plan = of_recipe(8, ONE, "--train.global_batch_size=32", size, few_logits)
    assert least <= memory(plan).gradients / (4 * plan.elements) <= most


def test_overlapping_averaging_needs_a_second_bucket():
    elements = of_recipe(16).elements
    settings = ["--train.micro_batch_size=1", ZERO_2, "--deepspeed.reduce_bucket_size"]
    whole, half = (
        memory(of_recipe(16, *settings[:2], f"{settings[2]}={size}"))
        for size in (2 * elements, elements // 2)
    )
    assert whole.buffers - half.buffers == 4 * (elements - elements // 2)  # in fp32
    assert (whole.bucket_copy, half.bucket_copy) == (0, 4 * (elements // 2))
    assert half.peak < whole.peak


def test_flops_tokens_and_disk_follow_from_the_configuration():
    plan = of_recipe(4, name="tape_155m")
    assert plan.tokens_per_step == 512 * 1024
    assert plan.tokens == 10_000 * 512 * 1024
    assert flops_per_step(plan) == flops_per_token(plan.model) * 512 * 1024
    one = checkpoint_bytes(plan)
    assert one == 12 * plan.elements
    assert checkpoints_bytes(plan) == 3 * one
    permanent = of_recipe(4, "--checkpoint.keep_every=2000", name="tape_155m")
    assert checkpoints_bytes(permanent) == (3 + 5) * one
    # Every tensor-parallel rank saves the norms and TAPE's matrices.
    two = of_recipe(8, TWO)
    assert 0 < checkpoint_bytes(two) / (12 * parameter_count(two.model)) - 1 < 0.01
