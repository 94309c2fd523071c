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


def state(stage, precision, *overrides):
    """Return bytes of weights, gradients and optimizer state per parameter on each of 4 GPUs,
    without TP.
    """
    plan = of_recipe(
        4, ONE, f"--deepspeed.zero_stage={stage}", f"--train.precision={precision}", *overrides
    )
    found = memory(plan)
    parts = found.weights, found.gradients, found.optimizer
    return [round(part / plan.elements, 2) for part in parts]


@pytest.mark.parametrize(
    "stage, precision, expected",
    [
        # weights, gradients, two moments (and ZeRO's copy of the weights)
        (1, "fp32", [4, 4, 12 / 4]),
        (2, "fp32", [4, 4 / 4, 12 / 4]),
        (3, "fp32", [4 / 4, 4 / 4, 12 / 4]),
        (1, "bf16", [2, 4, 12 / 4]),
        (2, "bf16", [2, 4 / 4, 12 / 4]),
        (3, "bf16", [2 / 4, 4 / 4, 12 / 4]),
    ],
)
def test_state_is_sharded_according_to_the_zero_stage(stage, precision, expected):
    assert state(stage, precision) == expected


@pytest.mark.parametrize("stage", [1, 2])
def test_muon_has_one_moment_per_matrix_and_weight_averaging_adds_another(stage):
    layout = [ONE, f"--deepspeed.zero_stage={stage}", "--train.precision=fp32"]
    average = "--train.average={kind: ema}"
    muon = "--optimizer.kind=muon"
    plain, averaged, both = (
        of_recipe(4, *layout, *more) for more in ([], [average], [average, muon])
    )
    matrices = parameter_count(plain.model, kinds=MATRICES)
    found = [memory(plan).optimizer for plan in (plain, averaged, both)]
    assert found[1] - found[0] == pytest.approx(plain.elements, abs=8)
    assert found[1] - found[2] == pytest.approx(matrices, abs=8)
    assert checkpoint_bytes(averaged) - checkpoint_bytes(plain) == 4 * plain.elements
    assert checkpoint_bytes(averaged) - checkpoint_bytes(both) == 4 * matrices


@pytest.mark.parametrize("stage, precision", [(1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_frozen_parameters_have_weights_but_no_gradient_and_no_optimizer_state(stage, precision):
    settings = [f"--deepspeed.zero_stage={stage}", f"--train.precision={precision}", *EXTENSION]
    plan = of_recipe(4, *settings)
    found = memory(plan)
    model = plan.model
    extension = plan.extension
    width = 2 if precision == "bf16" else 4
    shared = 4 if stage == 3 else 1
    held = plan.elements
    trained = plan.trained_elements
    assert held == parameter_count(model, extension) and 0 < trained < 0.2 * held
    assert found.weights == pytest.approx(width * held / shared, abs=8)
    assert found.gradients == pytest.approx(4 * trained / (4 if stage > 1 else 1), abs=8)
    assert found.optimizer == pytest.approx(12 * trained / 4, abs=16)
    assert checkpoint_bytes(plan) == 4 * (held - trained) + 12 * trained
    assert checkpoint_bytes(of_recipe(4, *settings, "--checkpoint.frozen=false")) == 12 * trained
    # Frozen matrices need a third less arithmetic.
    lora = parameter_count(model, extension, ["lora"])
    matrices = parameter_count(model, kinds=[*MATRICES, "output"])
    assert flops_per_token(model, extension) == flops_per_token(model) - 2 * matrices + 6 * lora


def test_the_parts_of_memory_sum_to_the_peak():
    found = memory(of_recipe(8))
    stays = found.weights + found.gradients + found.optimizer
    assert (
        found.peak
        == stays + found.layer_activations + found.output_gradient + found.buffers + found.working
    )
    assert found.peak > stays + found.layer_activations + found.output_gradient


def test_memory_peaks_in_the_step_of_adam_if_activations_are_small():
    small = [
        "--train.micro_batch_size=1",
        "--model.seq_length=64",
        "--deepspeed.reduce_bucket_size=1000000",
    ]
    plan = of_recipe(1, ONE, *small)
    # bf16 weights; fp32 gradients, weights and moments; and the largest matrix in fp64, for its
    # norm.
    largest = plan.model.vocab_size * plan.model.hidden_size
    assert memory(plan).peak == (2 + 4 + 12) * plan.elements + 8 * largest


def test_a_single_micro_batch_has_no_gradients_while_the_loss_is_computed():
    settings = [ONE, "--train.micro_batch_size=1", "--model.vocab_size=262144"]
    settings += ["--deepspeed.reduce_bucket_size=1000000"]
    one, two = (
        memory(of_recipe(8, *settings, f"--train.global_batch_size={size}")) for size in (8, 16)
    )
    assert one.gradients == 0 and two.gradients == 4 * of_recipe(8, *settings).elements
    assert one.peak == two.peak - two.gradients


@pytest.mark.parametrize("bucket, part", [(100_000_000, (0.05, 0.2)), (10**10, (1, 1))])
def test_a_single_micro_batch_allocates_the_gradients_of_a_bucket_at_its_first_gradient(
    bucket, part
):
    """1.1 billion gradients, in 12 buckets or in one, while the layers' activations dominate the
    memory.
    """
    plan = of_recipe(
        8, ONE, "--train.global_batch_size=32", f"--deepspeed.reduce_bucket_size={bucket}"
    )
    found = memory(plan)
    assert part[0] <= found.gradients / (4 * plan.elements) <= part[1]
    assert found.peak < memory(of_recipe(8, ONE)).peak or bucket > plan.elements


def test_overlapping_averaging_needs_a_second_bucket():
    def found(size):
        return memory(
            of_recipe(
                16, "--train.micro_batch_size=1", ZERO_2, f"--deepspeed.reduce_bucket_size={size}"
            )
        )

    elements = of_recipe(16).elements
    whole = found(2 * elements)
    half = found(elements // 2)
    assert whole.buffers - half.buffers == 4 * (elements - elements // 2)  # in fp32
    assert (whole.bucket_copy, half.bucket_copy) == (0, 4 * (elements // 2))
    assert half.peak < whole.peak


def test_flops_tokens_and_disk_follow_from_the_configuration():
    plan = of_recipe(4, name="tape_155m")
    assert plan.tokens_per_step == 512 * 1024 and plan.tokens == 10_000 * 512 * 1024
    assert flops_per_step(plan) == flops_per_token(plan.model) * 512 * 1024
    one = checkpoint_bytes(plan)
    assert one == 12 * plan.elements and checkpoints_bytes(plan) == 3 * one
    assert (
        checkpoints_bytes(of_recipe(4, "--checkpoint.keep_every=2000", name="tape_155m"))
        == (3 + 5) * one
    )
    # Every tensor-parallel rank saves the norms and TAPE's matrices.
    two = of_recipe(8, TWO)
    assert 0 < checkpoint_bytes(two) / (12 * parameter_count(two.model)) - 1 < 0.01


def test_memory_saving_settings_reduce_the_peak():
    def peak(*overrides):
        return memory(of_recipe(8, TWO, ZERO_2, *overrides)).peak

    assert peak("--train.recompute=full") < peak()
    assert peak("--train.micro_batch_size=2") < peak()
    assert peak() < peak(ONE)
    by_torch = "--model.attention_backend=torch"
    by_triton = "--model.attention_backend=triton"
    packed = "--data.reset_attention_mask=true"
    assert (
        peak("--model.position_encoding=rope")
        < peak(by_triton)
        == peak(packed)
        == peak(by_triton, packed)
    )
    assert peak(by_triton) < peak(by_torch) < peak(by_torch, packed)
    for precision in ("fp32", "bf16"):
        # ZeRO 3 does not free the gathered weights of small models.
        fixed = (
            f"--train.precision={precision}",
            ONE,
            "--deepspeed.overlap_comm=true",
            "--model.num_layers=64",
        )
        peaks = [peak(f"--deepspeed.zero_stage={stage}", *fixed) for stage in (3, 2, 1)]
        assert peaks == sorted(peaks)
