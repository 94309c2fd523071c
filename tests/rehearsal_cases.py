"""Rehearsals of small runs, correct and with planted mistakes, in a separate process."""

import contextlib
import io
import json
import sys
from collections import Counter
from unittest import mock

SMALL = """
model: {position_encoding: tape, num_layers: 2, hidden_size: 256, ffn_hidden_size: 512,
        num_attention_heads: 8, num_query_groups: 4, seq_length: 512, vocab_size: 2048,
        attention_backend: torch}
data: {prefix: nowhere/data}
train: {steps: 100, micro_batch_size: 2, global_batch_size: 64, eval_interval: 10}
parallel: {tensor_model_parallel_size: 2}
deepspeed: {zero_stage: 1, reduce_bucket_size: 1000000}
logging: {sample_tokens: 0, directory: nowhere/run}
"""
CHOSEN = "--model.attention_backend=auto"
ONE = "--parallel.tensor_model_parallel_size=1"
FOUR_LAYERS = "--model.num_layers=4"
WINDOWS = ["--model.sliding_window=64", "--model.full_attention_every=2"]
ZERO = {
    f"zero_{stage}": [f"--deepspeed.zero_stage={stage}"] for stage in (1, 3)
}  # the command rehearses ZeRO 2
EXTENSION = ["--extension.trains=[position,lora,embeddings,norms]", "--extension.lora_rank=4"]
QUICK_CASES = {
    **ZERO,
    "extension": [*EXTENSION, "--deepspeed.zero_stage=2", "--checkpoint.frozen=false"],
    "one_micro_batch": ["--train.global_batch_size=4"],
    "chosen": [CHOSEN, ONE, FOUR_LAYERS],
    # Layers 2 and 4 attend to all tokens; the others have frequencies of their own.
    "windows": [*WINDOWS, FOUR_LAYERS, "--model.position.rope_local_theta=1000"],
}
PACKED = ["--data.reset_attention_mask=true", "--data.tokenizer=nowhere/tokenizer"]
FULL = "--train.recompute=full"
ZERO_2 = "--deepspeed.zero_stage=2"
GATE = "--model.attention_output_gate=true"
BY_BF16 = "--deepspeed.communication_precision=bf16"
ROPE = "--model.position_encoding=rope"
SELECTIVE = "--train.recompute=selective"
EIGHT_GROUPS = "--model.num_query_groups=8"
FLASH = ["--model.attention_backend=flash_attn", "--model.kv_channels=64", FOUR_LAYERS]
ONE_MICRO_BATCH = [ONE, "--train.global_batch_size=16", "--model.num_layers=8"]
CONTEXT = ["--parallel.context_parallel_size=2", "--model.qk_norm=true"]


def stages(number):
    return [f"--parallel.pipeline_model_parallel_size={number}"]


# Attention averages [v | z] in one call.
ONE_CALL = {
    "chosen": [CHOSEN, ONE, FOUR_LAYERS, EIGHT_GROUPS],
    "chosen_grouped": [CHOSEN, ONE, FOUR_LAYERS],
    "chosen_recomputed": [CHOSEN, ONE, FOUR_LAYERS, FULL],
    "chosen_selectively_recomputed": [CHOSEN, ONE, FOUR_LAYERS, SELECTIVE],
    "chosen_tensor_parallel": [CHOSEN, FOUR_LAYERS],
    "chosen_stage_of_two": [CHOSEN, ONE, *stages(2), "--model.num_layers=6"],
    "chosen_bf16_state": [CHOSEN, ONE, FOUR_LAYERS, "--model.position.state_precision=bf16"],
    "chosen_learned": [CHOSEN, ONE, FOUR_LAYERS, "--model.position.increments=learned"],
    "flash_attn": [*FLASH, ONE, EIGHT_GROUPS],
    "flash_attn_grouped": [*FLASH, ONE],
    "flash_attn_selectively_recomputed": [*FLASH, ONE, SELECTIVE],
    "flash_attn_tensor_parallel": FLASH,
}
MANY = {
    "zero_1_recomputed": [FULL, GATE],
    "zero_2_recomputed": [ZERO_2, SELECTIVE],
    "zero_3_recomputed": ["--deepspeed.zero_stage=3", FULL],
    "zero_2_not_overlapping_in_bf16": [ZERO_2, "--deepspeed.overlap_comm=false", BY_BF16],
    "without_tensor_parallelism": [ONE, "--model.qk_norm=true"],
    "rope": [ROPE, ZERO_2],
    "muon": ["--optimizer.kind=muon"],
    "rope_without_sequence_parallelism": [ROPE, "--parallel.sequence_parallel=false", GATE],
    "packed": PACKED,
    "extension_zero_3": [*EXTENSION, "--deepspeed.zero_stage=3"],
    "lora_of_rope": [ROPE, "--extension.trains=[lora,embeddings,norms]"],
    "context_and_qk_norm": [*CONTEXT, "--train.average={kind: last, count: 2, every: 10}"],
    "stage_of_four": [*stages(4), FOUR_LAYERS],
    "stage_of_four_tied": [*stages(4), ONE, FOUR_LAYERS, "--model.tie_embeddings=true"],
    # Short sequences: tensors in flight between virtual stages are not fully counted, but small in
    # long ones.
    "virtual_stages_recomputed": [
        *stages(2),
        ONE,
        "--parallel.virtual_pipeline_size=2",
        FOUR_LAYERS,
        "--model.seq_length=128",
        FULL,
    ],
    # The first backward pass begins with all micro-batches of a step in flight.
    "one_micro_batch_in_bf16": [*ONE_MICRO_BATCH, BY_BF16],
    "one_micro_batch_one_bucket": [*ONE_MICRO_BATCH, "--deepspeed.reduce_bucket_size=100000000"],
    "one_micro_batch_zero_2": [*ONE_MICRO_BATCH, ZERO_2],
    "one_micro_batch_of_few_tokens": [*ONE_MICRO_BATCH, "--model.seq_length=128"],
    "one_micro_batch_recomputed": [*ONE_MICRO_BATCH, FULL],
    "one_micro_batch_per_stage": [
        *stages(4),
        ONE,
        "--model.num_layers=8",
        "--train.global_batch_size=16",
    ],
    "windows_of_packed_documents": [*WINDOWS, FOUR_LAYERS, *PACKED],
    # Layers share the mask of a window, and the recomputed ones refer to it.
    "windows_recomputed": [*WINDOWS, FOUR_LAYERS, FULL],
    "windows_and_context": [*WINDOWS, FOUR_LAYERS, *CONTEXT],
    "swan": [
        *WINDOWS,
        FOUR_LAYERS,
        ROPE,
        "--model.layers_without_positions=2",
        "--model.temperature_scale=0.1",
    ],
    "chosen_context_and_qk_norm": [CHOSEN, *CONTEXT],
    **ONE_CALL,
}


def mistakes():
    """Return the patches that plant each mistake. Mistakes planted together do not stop the run or
    hide each other.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    from megatron_tape.model.layers import RMSNorm
    from megatron_tape.ops.kernels import triton_position_update
    from megatron_tape.parallel.token_layout import TokenLayout
    from megatron_tape.position.rope import RotaryPosition
    from megatron_tape.training import gradients

    norm = RMSNorm.forward
    summed = gradients.sum_over_group
    update = triton_position_update.update

    def reads(self, hidden_states):
        hidden_states.abs().max().item()
        return norm(self, hidden_states)

    def keeps(self, hidden_states):
        self.buffer = hidden_states.detach().float()
        return norm(self, hidden_states)

    def keeps_in_update(z, rounded, u, *others):
        return update(z, rounded, u.double().exp().to(u.dtype), *others)

    def to_heads(self, x_sBN):
        whole = gather_from_sequence_parallel_region(x_sBN.contiguous(), group=self.model_group)
        return self.local_heads(whole, 2).contiguous()

    def over_data(parts, group):
        from megatron.core import parallel_state

        return summed(parts, parallel_state.get_data_parallel_group())

    constant = "constant"
    copied = lambda self, name, make, device: make().to(device, non_blocking=True)  # noqa: E731
    return {
        "frequencies_on_the_cpu": [
            (RotaryPosition, constant, lambda self, name, make, device: make())
        ],
        "an_item_and_a_copy_in_a_layer": [
            (RMSNorm, "forward", reads),
            (RotaryPosition, constant, copied),
        ],
        "a_tensor_in_fp64_kept_by_the_update": [
            (triton_position_update, "update", keeps_in_update)
        ],
        "a_collective_in_the_wrong_group_a_buffer_kept_twice_and_an_all_gather_of_the_state": [
            (gradients, "sum_over_group", over_data),
            (RMSNorm, "forward", keeps),
            (TokenLayout, "to_heads", to_heads),
        ],
    }


def described(outcome):
    rows = {row.name: (row.rehearsed, row.estimated, row.agrees) for row in outcome.rows()}
    waits = Counter()
    for wait, count in outcome.waits.items():
        waits[wait.partition(" at ")[0]] += count
    return {
        "rows": rows,
        "faults": [*outcome.faults],
        "backend": outcome.config.model.attention_backend,
        "waits": waits,
    }


def main(which, recipe):
    from megatron_tape.checks.arguments import parse_run_config
    from megatron_tape.checks.combinations import validate
    from pretrain import rehearse as command

    processes = 4 if which == "quick" else 8
    with open(recipe, "w") as file:
        file.write(SMALL)
    found = {}
    if which == "quick":
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            settings = ["--deepspeed.zero_stage=2", "--model.num_layers=3", "--train.steps=9"]
            status = command.main(["--config", recipe, "--processes=4", "--rank=3", *settings])
        found["command"] = {"status": status, "report": output.getvalue()}
    from megatron_tape.planning.rehearsal import install_fake_world, rehearse

    if which != "quick":
        install_fake_world(processes, 5)

    def run(settings, patches=()):
        config = parse_run_config(["--config", recipe, *settings])
        validate(config, processes)
        with contextlib.ExitStack() as planted:
            for patch in patches:
                planted.enter_context(mock.patch.object(*patch))
            return described(rehearse(config))

    cases = QUICK_CASES if which == "quick" else MANY
    for name, settings in cases.items():
        found[name] = run(settings)
    if which == "quick":
        for name, patches in mistakes().items():
            found[name] = run([], patches)
    return found


if __name__ == "__main__":
    print(
        json.dumps(main(*sys.argv[1:])),
        file=sys.__stdout__,
    )
