"""The estimate against models that are built, tensors that are counted, and arithmetic by hand."""

import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from launch import run_group
from megatron_tape.planning.costs import activations, estimate
from models import build, random_tokens, small_model

from benchmarks.rates import of_links
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.weights import shard
from megatron_tape.ops.activation_checkpointing import AttentionRecorder
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count, parameters_per_rank, trained_parts
from megatron_tape.position import replaced, with_values
from megatron_tape.training.trained_parameters import select_trained, trained_by
from pretrain import estimate as command

RECIPES = Path(__file__).parent.parent / "pretrain" / "recipes"
GIB = 2**30

SHAPES = {
    "tape": {},
    "tape_multi_head": {"num_query_groups": 4},
    "tape_one_group": {"num_query_groups": 1},
    "tape_one_layer": {"num_layers": 1},
    "tape_deep_gate_from_attention": {"num_layers": 6, "gate_input": "attention"},
    "tape_per_head_tied": {"num_query_groups": 4, "token_mixing": "per_head", "tie_embeddings": True},
    "tape_default_position_mlp": {"position_mlp_size": None},
    "rope": {"position_encoding": "rope"},
    "rope_multi_head": {"position_encoding": "rope", "num_query_groups": None},
    "nope": {"position_encoding": "nope"},
    "nope_one_group": {"position_encoding": "nope", "num_query_groups": 1},
    "tape_biased_wide_heads": {"qkv_bias": True, "kv_channels": 12},
    "tape_qk_norm": {"qk_norm": True},
    "tape_gated_output": {"attention_output_gate": True},
    "tape_qk_norm_one_group": {"qk_norm": True, "num_query_groups": 1},
    "rope_qk_norm": {"position_encoding": "rope", "qk_norm": True},
    "randpe": {"position_encoding": "randpe"},
    "repo": {"position_encoding": "repo", "repo_width": 5},
    "repo_in_all_layers_qk_norm": {"position_encoding": "repo", "repo_first_layer": 0, "qk_norm": True},
    "nope_qk_norm_multi_head": {"position_encoding": "nope", "qk_norm": True, "num_query_groups": 4},
}
MIDDLE = dict(hidden_size=384, ffn_hidden_size=1024, num_attention_heads=6, num_query_groups=2, seq_length=256)


def middle_model(encoding):
    return small_model(
        position_encoding=encoding,
        num_layers=4,
        vocab_size=4096,
        position_mlp_size=24,
        **MIDDLE,
        attention_backend="torch",
    )


def counted(built, model, batch=2, packed=False):
    """Bytes that a forward pass saves for the backward pass, weights left out, as benchmarks/train_step.py counts."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = random_tokens(batch, model.seq_length + 1, model.vocab_size)
    documents = torch.zeros(batch, model.seq_length, dtype=torch.long) if packed else None
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, mock.patch.object(AttentionRecorder, "observer", pack):
        loss = built(tokens[:, :-1], tokens[:, 1:], documents=documents)
    del loss
    return sum(kept.values())


def on_cpu(model, *arguments, **settings):
    return activations(model, *arguments, fused_norms=False, **settings).saved


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_built_model_and_of_its_shards(shape):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    parameters = list(build(model)[0].parameters())
    assert parameters_per_rank(model, 1) == parameter_count(model) == sum(p.numel() for p in parameters)
    if model.query_groups % 2 == 0:
        assert parameters_per_rank(model, 2) == sum(shard(p, p, 0, 2).numel() for p in parameters)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_activations_are_those_counted(shape, precision, recompute):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    count = counted(build(model, recompute=recompute, dtype=dtype)[0], model)
    assert on_cpu(model, 2, precision, recompute) == pytest.approx(count, rel=0.004)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_activations_of_packed_documents_are_those_counted(shape, recompute):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    count = counted(build(model, recompute=recompute)[0], model, packed=True)
    assert on_cpu(model, 2, "fp32", recompute, masked=True) == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("encoding", ["tape", "rope"])
def test_saved_activations_of_a_larger_model_are_those_counted(encoding):
    model = middle_model(encoding)
    count = counted(build(model)[0], model)
    assert on_cpu(model, 2, "fp32") == pytest.approx(count, rel=0.01)
    # GPUs keep no normalised copy.
    assert activations(model, 2, "fp32").saved == pytest.approx(count, rel=0.15)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("name", ["tape_155m", "tape_1b", "tape_7b"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_layers_of_tape_keep_at_most_a_quarter_more_than_those_of_rope(backend, name, tensor_size, precision):
    """Also where the MLP is as narrow as Llama's, unless torch computes attention and the state travels, too."""
    model = recipe(name, f"--model.attention_backend={backend}").model
    narrow = 8 * model.hidden_size // 3
    widths = {model.ffn_hidden_size, narrow}
    if backend == "torch" and tensor_size > 1:
        widths = {max(width, 4 * model.hidden_size) for width in widths}
    for width in widths:
        for groups in (model.num_attention_heads, model.num_attention_heads // 4):
            same = with_values(model, ffn_hidden_size=width, num_query_groups=groups)
            tape, rope = (
                activations(changed, 1, precision, "none", tensor_size, tensor_size > 1).layers
                for changed in (same, with_values(same, position_encoding="rope"))
            )
            assert rope < tape <= 1.25 * rope, (width, groups)


def test_selective_recomputation_keeps_little_beside_the_layers_of_rope():
    """The shares that docs/training.md names."""
    shares = {"rope": [], "tape": [], "tape with a state in bf16": []}
    for name in ("tape_155m", "tape_1b", "tape_7b"):
        for size in (1, 2):
            tape = recipe(name).model
            rope = with_values(tape, position_encoding="rope")
            rounded = with_values(tape, position_state_precision="bf16")
            whole = activations(rope, 1, "bf16", "none", size, size > 1).layers
            for key, model in zip(shares, (rope, tape, rounded)):
                shares[key].append(activations(model, 1, "bf16", "selective", size, size > 1).layers / whole)
    assert {key: (round(min(found), 2), round(max(found), 2)) for key, found in shares.items()} == {
        "rope": (0.10, 0.11),
        "tape": (0.18, 0.28),
        "tape with a state in bf16": (0.17, 0.22),
    }


@pytest.mark.parametrize(
    "encoding, dim, backend", [("tape", 64, "triton"), ("tape", 48, "torch"), ("rope", 64, "torch")]
)
def test_an_estimate_counts_the_backend_that_a_gpu_chooses(encoding, dim, backend):
    """As `choose_backend` does where nothing was measured; flash-attn keeps what torch's SDPA keeps."""
    model = with_values(recipe().model, position_encoding=encoding, kv_channels=dim)
    kept = {
        name: activations(with_values(model, attention_backend=name), 1, "bf16").layers
        for name in ("auto", "triton", "torch")
    }
    assert kept["auto"] == kept[backend] and (encoding == "rope" or kept["triton"] < kept["torch"])


def test_a_built_tape_keeps_at_most_a_quarter_more_than_rope():
    tape, rope = (counted(build(model)[0], model) for model in map(middle_model, ("tape", "rope")))
    assert rope < tape <= 1.25 * rope


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "encoding, trains",
    [
        ("tape", ["tape", "embeddings", "norms"]),
        ("tape", ["tape", "lora", "embeddings", "norms"]),
        ("rope", ["lora", "embeddings", "norms"]),
        ("rope", ["norms", "output"]),
    ],
)
def test_an_extension_trains_and_saves_what_is_counted(encoding, trains, recompute):
    model, extension = middle_model(encoding), ExtensionConfig(trains=trains, lora_rank=4)
    built, _ = build(model, recompute=recompute, lora=extension if extension.adds_lora else None)
    select_trained(built, trained_by(extension), recompute != "none")
    parameters = list(built.parameters())
    sizes = [sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)]
    assert [parameter_count(model, extension), parameter_count(model, extension, trained_parts(extension))] == sizes
    assert on_cpu(model, 2, "fp32", recompute, extension=extension) == pytest.approx(counted(built, model), rel=0.02)


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_frozen_parameters_have_weights_but_no_gradient_and_no_optimizer_state(stage, precision):
    trains = ["--extension.trains=[tape,lora,embeddings,norms]", "--parallel.tensor_model_parallel_size=1"]
    settings = [f"--deepspeed.zero_stage={stage}", f"--train.precision={precision}"]
    config = recipe("tape_1b", *settings, *trains)
    found = estimate(config, 4)
    width, shared = (2 if precision == "bf16" else 4), (4 if stage == 3 else 1)
    held, trained = found.parameters, found.trained
    assert held == parameter_count(config.model, config.extension) and 0 < trained < 0.2 * held
    assert found.weights == pytest.approx(width * held / shared, abs=8)
    assert found.gradients == pytest.approx(4 * trained / (4 if stage > 1 else 1), abs=8)
    assert found.optimizer == pytest.approx(8 * trained if stage == 0 else 12 * trained / 4, abs=16)
    assert found.checkpoint_bytes == 4 * (held - trained) + 12 * trained
    lean = estimate(recipe("tape_1b", *settings, *trains, "--checkpoint.frozen=false"), 4)
    assert lean.checkpoint_bytes == 12 * trained
    # A third of the arithmetic of every frozen matrix is saved.
    whole, extended = flops_per_token(config.model), flops_per_token(config.model, config.extension)
    lora = parameter_count(config.model, config.extension, ["lora"])
    matrices = parameter_count(config.model, parts=["matrices", "output"])
    assert extended == whole - 2 * matrices + 6 * lora


TWO = [("tape", "none", True), ("tape", "selective", True), ("rope", "none", True), ("rope", "none", False)]


def main(folder):
    """What each of two tensor-parallel processes holds and saves."""
    found = []
    for encoding, recompute, sequence_parallel in TWO:
        model = middle_model(encoding)
        built, _ = build(model, tp=2, recompute=recompute, sequence_parallel=sequence_parallel)
        found.append((sum(p.numel() for p in built.parameters()), counted(built, model, batch=1)))
    return [*found, of_links(2, torch.device("cpu")), of_links(1, torch.device("cpu"))]


def test_two_tensor_parallel_processes_hold_and_save_what_is_estimated():
    *found, in_a_node, in_two_nodes = run_group("test_costs", 2)
    assert in_a_node.keys() == {"inside", "latency_inside"} and in_two_nodes.keys() == {"between", "latency_between"}
    assert min(*in_a_node.values(), *in_two_nodes.values()) > 0
    for (parameters, count), (encoding, recompute, sequence_parallel) in zip(found, TWO, strict=True):
        model = middle_model(encoding)
        settings = dict(tensor_size=2, sequence_parallel=sequence_parallel)
        assert parameters == parameters_per_rank(model, 2)
        assert on_cpu(model, 1, "fp32", recompute, **settings) == pytest.approx(count, rel=0.01)


def recipe(name="tape_1b", *overrides):
    return parse_run_config(["--config", str(RECIPES / f"{name}.yaml"), *overrides])


def state(stage, precision, *overrides):
    """Bytes of weights, gradients and optimizer state per parameter: one GPU's share on 4 of them without TP."""
    settings = [f"--deepspeed.zero_stage={stage}", f"--train.precision={precision}", *overrides]
    found = estimate(recipe("tape_1b", "--parallel.tensor_model_parallel_size=1", *settings), 4)
    parts = found.weights, found.gradients, found.optimizer, found.host
    return [round(part / found.parameters, 2) for part in parts]


@pytest.mark.parametrize(
    "stage, precision, expected",
    [
        # weights, gradients, two moments (and ZeRO's copy of the weights)
        (0, "fp32", [4, 4, 8, 0]),
        (1, "fp32", [4, 4, 12 / 4, 0]),
        (2, "fp32", [4, 4 / 4, 12 / 4, 0]),
        (3, "fp32", [4 / 4, 4 / 4, 12 / 4, 0]),
        (1, "bf16", [2, 4, 12 / 4, 0]),
        (2, "bf16", [2, 4 / 4, 12 / 4, 0]),
        (3, "bf16", [2 / 4, 4 / 4, 12 / 4, 0]),
    ],
)
def test_state_is_sharded_as_the_zero_stage_says(stage, precision, expected):
    assert state(stage, precision) == expected


@pytest.mark.parametrize("stage, expected", [(1, [2, 4, 0]), (2, [2, 0, 0]), (3, [0.5, 0, 0])])
def test_an_offloaded_optimizer_is_on_the_host(stage, expected):
    *on_gpu, host = state(stage, "bf16", "--deepspeed.offload_optimizer=true")
    assert on_gpu == expected
    assert 20 / 4 <= host < 20 / 4 + 0.15  # the largest matrix comes on top


def test_everything_adds_up_to_the_peak():
    found = estimate(recipe(), 8)
    stays = found.weights + found.gradients + found.optimizer
    assert found.peak == stays + found.layer_activations + found.logits + found.buffers + found.working
    assert found.peak > stays + found.layer_activations + found.logits


def test_the_step_of_adam_is_the_peak_where_activations_are_few():
    small = ["--train.micro_batch_size=1", "--model.seq_length=64", "--deepspeed.reduce_bucket_size=1000000"]
    found = estimate(recipe("tape_1b", "--parallel.tensor_model_parallel_size=1", *small), 1)
    # bf16 weights, fp32 gradients, copy and moments, and the step's square roots.
    assert found.peak == (2 + 4 + 12 + 4) * found.parameters


def test_a_bucket_that_holds_all_gradients_is_reduced_when_the_activations_are_gone():
    few = ["--train.micro_batch_size=1", "--train.recompute=full", "--model.vocab_size=1024"]
    found = estimate(recipe("tape_1b", *few), 16)
    held = found.parameters_per_rank
    gathered = 4096 * 2048 * 2  # Megatron's buffer for the input of a matrix, in bf16
    # bf16 weights, an eighth of fp32 gradients, copy and moments, the bf16 bucket, and its fp32 copy to be sent.
    assert held < 500_000_000
    assert found.peak == pytest.approx((2 + 16 / 8) * held + 2 * 500_000_000 + 4 * held + gathered, rel=1e-6)


def test_flops_tokens_and_disk_follow_from_the_configuration():
    config = recipe("tape_155m")
    found = estimate(config, 4)
    assert found.tokens_per_step == 512 * 1024
    assert found.tokens == 10_000 * 512 * 1024
    assert found.flops_per_step == flops_per_token(config.model) * 512 * 1024
    assert found.flops_per_gpu == found.flops_per_step // 4
    assert found.checkpoint_bytes == 12 * found.parameters
    assert found.checkpoints_bytes == 3 * found.checkpoint_bytes
    config = replaced(config, {"checkpoint.keep_every": 2000})
    assert estimate(config, 4).checkpoints_bytes == (3 + 5) * found.checkpoint_bytes
    # Tensor-parallel ranks save the norms and TAPE's matrices each.
    assert 0 < estimate(recipe(), 8).checkpoint_bytes / (12 * estimate(recipe(), 8).parameters) - 1 < 0.01


def test_settings_that_should_save_memory_do():
    def peak(*overrides):
        return estimate(recipe("tape_1b", *overrides), 8).peak

    assert peak("--train.recompute=full") < peak()
    assert peak("--train.micro_batch_size=2") < peak()
    assert peak() < peak("--parallel.tensor_model_parallel_size=1")
    assert peak("--deepspeed.offload_optimizer=true") < peak()
    assert peak("--model.position_encoding=rope") < peak() == peak("--data.reset_attention_mask=true")
    by_torch = "--model.attention_backend=torch"
    assert peak() < peak(by_torch) < peak(by_torch, "--data.reset_attention_mask=true")
    for precision, stages in (("fp32", (3, 2, 1, 0)), ("bf16", (3, 2, 1))):
        fixed = (
            f"--train.precision={precision}",
            "--parallel.tensor_model_parallel_size=1",
            "--deepspeed.overlap_comm=true",
            "--model.num_layers=64",  # ZeRO 3 keeps the weights of small ones gathered
        )
        peaks = [peak(f"--deepspeed.zero_stage={stage}", *fixed) for stage in stages]
        assert peaks == sorted(peaks)


def outputs(capsys, *arguments, name="tape_1b"):
    assert command.main(["--config", str(RECIPES / f"{name}.yaml"), *arguments]) == 0
    output, error = capsys.readouterr()
    return output, error


def test_the_command_prints_the_numbers(capsys):
    output, error = outputs(capsys, "--processes", "4", name="tape_155m")
    found = estimate(recipe("tape_155m"), 4)
    assert re.search(rf"^parameters +{found.parameters:,}$", output, re.M)
    assert re.search(rf"^memory per GPU +{found.peak / GIB:.2f} GiB$", output, re.M)
    assert re.search(r"^fits on GPUs of +24 GB, .*141 GB$", output, re.M)
    assert re.search(r"^tokens per step +524,288$", output, re.M)
    assert re.search(r"^tokens of the run +5,242,880,000 ", output, re.M)
    assert f"{found.flops_per_step:.3e}" in output
    assert f"{found.checkpoint_bytes / 1e9:.2f} GB" in output
    parts = re.findall(r"^  .* ([\d.]+) GiB$", output, re.M)
    assert sum(map(float, parts)) == pytest.approx(found.peak / GIB, abs=0.05)
    assert error == ""


def test_the_command_reads_overrides_and_takes_as_many_processes_as_the_model_needs(capsys):
    output, _ = outputs(capsys, "--train.micro_batch_size", "1", "--parallel.tensor_model_parallel_size=4")
    assert re.search(r"^layout +4 processes: 4 tensor parallel x 1 data parallel", output, re.M)
    assert re.search(r"^  per tensor-parallel rank", output, re.M)


def test_the_copy_of_an_asynchronous_save_is_shared_by_its_writers(capsys):
    found = {}
    for writers in ("2", "4", "null"):
        saves = ["--checkpoint.asynchronous=true", f"--checkpoint.writers={writers}"]
        output, _ = outputs(capsys, "--processes=8", "--parallel.tensor_model_parallel_size=2", *saves)
        (row,) = re.findall(r"^host memory of each writer of a save +([\d.]+) GiB, (\d+) writers$", output, re.M)
        found[writers] = float(row[0]), int(row[1])
    assert found["2"] == (pytest.approx(2 * found["4"][0], abs=0.01), 2) and found["4"][1] == 4
    # By default one for each GiB, as far as there are processes.
    assert found["null"] == (pytest.approx(found["4"][0] / 2, abs=0.01), 8)
    output, _ = outputs(capsys, "--processes=8", "--parallel.tensor_model_parallel_size=2")
    total = float(re.search(r"^checkpoint +([\d.]+) GB", output, re.M)[1]) * 1e9 / 2**30
    assert found["2"][0] == pytest.approx(total / 2, rel=0.01) and "writer" not in output


def test_settings_that_the_encoding_does_not_read_are_a_warning(capsys):
    recipe = ["--config", str(RECIPES / "tape_demo.yaml"), "--model.t5_num_buckets", "16"]
    for encoding, warned in (("alibi", True), ("t5", False)):
        assert command.main([*recipe, "--model.position_encoding", encoding]) == 0
        told = capsys.readouterr().err
        assert ("warning: alibi does not read model.t5_num_buckets\n" in told) == warned, told


def test_slower_attention_than_that_of_rope_is_a_warning(capsys):
    for encoding, warned in (
        ("cope", "compute scores from whole rows"),
        ("fire", "tile by tile"),
        ("tape", ""),
        ("xpos", ""),
    ):
        recipe = ["--config", str(RECIPES / "tape_155m.yaml"), "--model.position_encoding", encoding]
        for more in ([], ["--processes", "8", "--search"]):
            assert command.main([*recipe, *more]) == 0
            told = capsys.readouterr().err
            assert (f"warning: {encoding} must " in told) == bool(warned) and warned in told, told


def test_what_does_not_fit_is_a_warning_that_names_the_first_change(capsys):
    _, error = outputs(capsys, "--gpu-memory", "1")
    more = r"; --processes N --search lists layouts\n"
    assert re.fullmatch(
        rf"warning: .*first raise parallel\.tensor_model_parallel_size to 4 .* not enough yet{more}", error
    )
    _, error = outputs(capsys, "--gpu-memory", "16", "--processes", "8")
    assert re.fullmatch(rf"warning: .*first set train\.recompute to selective: .* GiB, which fits{more}", error)
    _, error = outputs(capsys, "--gpu-memory", "80", "--processes", "8")
    assert error == ""
    _, error = outputs(capsys, "--gpu", "A100-40GB", "--processes", "1", "--parallel.tensor_model_parallel_size", "1")
    assert "does not fit in 40 GiB, of which" in error
    _, error = outputs(capsys, "--processes", "8", "--train.micro_batch_size=64")
    assert "does not fit in 140 GiB, the most that is usual, of which" in error


@pytest.mark.parametrize(
    "gib, micro_batch_size, change",
    [
        (48, 4, "lower train.micro_batch_size to 2"),
        (36, 1, "raise deepspeed.zero_stage to 3"),
        (31, 1, "raise parallel.tensor_model_parallel_size to 4"),
    ],
)
def test_the_change_named_is_the_first_that_is_enough(capsys, gib, micro_batch_size, change):
    wide = ["--model.hidden_size=8192", "--model.ffn_hidden_size=16384", "--model.seq_length=16384"]
    fixed = ["--train.recompute=full", f"--train.micro_batch_size={micro_batch_size}"]
    _, error = outputs(capsys, "--processes=8", f"--gpu-memory={gib}", *wide, *fixed)
    assert f"first {change}: " in error and "which fits" in error


def test_where_tensor_parallelism_cannot_grow_context_parallelism_is_named(capsys):
    long = [
        "--model.seq_length=65536",
        "--train.recompute=full",
        "--train.micro_batch_size=1",
        "--deepspeed.zero_stage=3",
    ]
    few = ["--model.num_query_groups=2", "--parallel.tensor_model_parallel_size=2", "--train.global_batch_size=8"]
    _, error = outputs(capsys, "--processes=8", "--gpu-memory=12", *long, *few)
    assert "first raise parallel.context_parallel_size to 2: " in error


def test_zero_3_needs_less_than_whole_weights_from_the_start(capsys):
    sharded = ["--parallel.tensor_model_parallel_size=1", "--deepspeed.zero_stage=3", "--train.recompute=full"]
    small = ["--train.micro_batch_size=1", "--train.global_batch_size=512"]
    # Its weights take 129 GiB in bf16.
    _, error = outputs(capsys, "--processes=512", "--gpu-memory=80", *sharded, *small, name="tape_70b")
    assert error == ""


def test_a_model_that_does_not_fit_any_gpu_is_a_warning(capsys):
    output, error = outputs(capsys, "--model.seq_length=131072", "--train.micro_batch_size=8")
    assert re.search(r"^fits on GPUs of +none of 24 GB", output, re.M)
    assert error.startswith("warning: ")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--processes", "3"], "the number of processes, 3"),
        (["--processes", "many"], "--processes"),
        (["--processes", "0"], "--processes is 0; give 1 or more"),
        (["--gpu-memory", "-1"], "--gpu-memory is -1.0; give a number of GiB above 0"),
        (["--model.num_layers", "1000000000"], "model.num_layers is 1000000000; set it to at most 10000"),
        (["--train.stepps", "3"], "train.stepps"),
        (["--model.num_attention_heads", "7"], "model.num_attention_heads 7"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, arguments, named):
    with pytest.raises(SystemExit) as stop:
        command.main(["--config", str(RECIPES / "tape_1b.yaml"), *arguments])
    output, error = capsys.readouterr()
    assert stop.value.code == 2 and output == ""
    assert error.startswith("error: ") and error.count("\n") == 1 and named in error


def test_help_shows_both_options_and_where_the_settings_are_explained(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "--processes" in output and "--gpu-memory" in output and "python -m pretrain.train --help" in output


def test_an_estimate_needs_no_torch_and_little_time():
    program = (
        "import sys\nfrom pretrain.estimate import main\n"
        "main(sys.argv[1:])\nassert not {'torch', 'megatron', 'deepspeed'} & set(sys.modules)"
    )
    command_line = [sys.executable, "-c", program, "--config", str(RECIPES / "tape_1b.yaml")]
    started = time.monotonic()
    subprocess.run(command_line, check=True, capture_output=True, cwd=RECIPES.parents[1])
    assert time.monotonic() - started < 10  # a third of a second on an idle machine
