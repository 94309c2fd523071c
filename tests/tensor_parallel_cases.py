"""Models on two processes, for test_two_processes.py, which checks every returned value."""

import importlib
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from models import (
    SMALL,
    WINDOWS,
    build,
    load_whole,
    random_tokens,
    small_model,
    whole_weights,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.names import kind_of
from megatron_tape.model.weights import from_megatron, shard, to_megatron, unshard
from megatron_tape.ops import chunks
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.training.gradients import replicated_parameters, sum_over_group
from megatron_tape.training.model_building import freeze_parameters

VARIANTS = {
    "tape": {},
    "tape_per_head": {"num_query_groups": 4, "token_mixing": "per_head"},
    "tape_biased_qk_norm": {"qkv_bias": True, "qk_norm": True, "kv_channels": 12},
    "tape_gated_output": {
        "attention_output_gate": True,
        "gate_input": "attention",
        "kv_channels": 12,
    },
    "nope_tied": {"position_encoding": "nope", "tie_embeddings": True},
    "alibi": {"position_encoding": "alibi"},
    "t5": {"position_encoding": "t5", "t5_num_buckets": 6, "t5_max_distance": 9},
    "fire": {"position_encoding": "fire", "fire_threshold": 3.0},
    "xpos": {"position_encoding": "xpos", "xpos_scale_base": 8.0},
    "path": {"position_encoding": "path", "path_rank": 5},
    "cope": {"position_encoding": "cope", "cope_max_position": 5},
    "fox": {"position_encoding": "fox"},
    "randpe": {"position_encoding": "randpe", "randpe_range": 50},
    "repo": {"position_encoding": "repo", "repo_width": 5},
    "path_fox": {"position_encoding": "path_fox", "path_rank": 5},
    "selective_rope": {"position_encoding": "selective_rope", "selective_rope_bias": True},
    "selective_rope_fox": {"position_encoding": "selective_rope_fox", "selective_rope_rank": 5},
    "wall": {
        "position_encoding": "wall",
        "wall_bias_start": 1.0,
        "wall_scalar_gate": True,
        "wall_sink": True,
    },
    "rope_learned_increments": {"position_encoding": "rope", "increments": "learned"},
    "tape_signed_some_layers": {"increments": "signed", "layers_without_positions": 2},
    "tape_learned_increments_unit": {"increments": "learned", "state_norm": "unit"},
    **{
        name: WINDOWS[name]
        for name in ("tape_window", "swan", "rope_scaled_full_layers", "tape_scaled_full_layers")
    },
}
COUNTED = {
    name: {"position_encoding": name}
    for name in ("tape", "rope", "fox", "path_fox", "selective_rope_fox", "wall")
}
COUNTED |= {
    f"{name}_learned": {"position_encoding": name, "increments": "learned"}
    for name in ("tape", "rope")
}
"""Cases for which communication is counted."""
LORA = ExtensionConfig(trains=["lora"], lora_rank=3, lora_alpha=6.0)
SOME_LORA = ExtensionConfig(
    trains=["lora"],
    lora_rank=2,
    lora_alpha=1.0,
    lora_targets=["q", "v"],
)
ROPE = {"position_encoding": "rope"}
LORA_VARIANTS = {
    "tape_lora": {"lora": LORA},
    "tape_lora_for_q_and_v": {
        "lora": SOME_LORA,
        "changes": {"num_query_groups": 4, "qkv_bias": True},
    },
    "tape_lora_alone_recomputed": {"lora": LORA, "trained": ("lora",), "recompute": "full"},
}
LORA_WITHOUT_SEQUENCE_PARALLEL = {
    "rope_lora": {"lora": LORA, "changes": ROPE},
    "rope_lora_alone": {"lora": LORA, "changes": ROPE, "trained": ("lora",)},
}
SHARING = ("tape", "path_fox", "repo", "selective_rope", "rope_learned_increments")
"""Encodings with parameters or positions per group."""
OF_FOUR = (
    "tape",
    "tape_gated_output",
    "tape_learned_increments_unit",
    "t5",
    "fire",
    "path_fox",
    "wall",
    "repo",
    "selective_rope",
    "rope_scaled_full_layers",
    "tape_scaled_full_layers",
)


def gradients_of(built, model, tokens):
    """Return the unsharded gradients by the reference's names."""
    trained = {
        name: parameter for name, parameter in built.named_parameters() if parameter.requires_grad
    }
    own = [parameter.grad for parameter in trained.values()]
    flat = torch.cat([gradient.flatten() for gradient in own])
    shares = [torch.empty_like(flat) for _ in range(tokens.model_group.size())]
    dist.all_gather(shares, flat, group=tokens.model_group)
    by_rank = [split_like(share, own) for share in shares]
    gradients = {}
    for (name, parameter), *parts in zip(trained.items(), *by_rank):
        gradients |= from_megatron(name, unshard(parts, parameter), model)
    return gradients


def split_like(flat, tensors):
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors)]


def run(built, tokens, batch, by_token):
    """Return the logits, optionally the losses of all tokens, and the loss of this rank's
    sequences.
    """
    own = {
        key: value.chunk(tokens.data_shards)[tokens.data_group.rank()]
        for key, value in batch.items()
    }
    given = {key: value for key, value in own.items() if key not in ("labels", "loss_weights")}
    with torch.no_grad():
        outputs = {"logits": built(**given)}
        if by_token:
            outputs["by_token"] = built(**given, labels=own["labels"], by_token=True)
    loss = built(**own)
    loss.backward()
    return outputs, tokens.average(loss)


@dataclass
class Case:
    """A model to run on one process and on several; `trained` limits the kinds of trainable
    parameters.
    """

    changes: dict = field(default_factory=dict)
    recompute: str = "none"
    sequence_parallel: bool | None = None
    lora: ExtensionConfig | None = None
    trained: tuple | None = None
    shifted_sparse: bool = False
    fused_loss: bool = False
    """Whether the ranks, but not the single process, compute the loss with Liger's kernels."""
    by_token: bool = False
    """Whether to compare the losses of all tokens, too."""
    inputs: dict = field(default_factory=dict)
    """Arguments of the model's forward in addition to tokens and labels."""

    def built(self, tp, cp=1, **options):
        same = dict(lora=self.lora, shifted_sparse=self.shifted_sparse)
        built, layout = build(self.model, tp, cp=cp, **same, **options)
        if self.trained is not None:
            freeze_parameters(built, lambda name, parameter: kind_of(name) in self.trained)
        return built, layout

    def alone(self):
        """Compute the expected results of all layouts."""
        self.model = small_model(**self.changes)
        self.batch = {
            "tokens": random_tokens(seed=1),
            "labels": random_tokens(seed=2),
            **self.inputs,
        }
        built, layout = self.built(1)
        self.weights = whole_weights(built, self.model)
        # Every rank computes the whole batch.
        everything = replace(
            layout.token_layout,
            data_group=layout.token_layout.model_group,
            replica_group=layout.token_layout.model_group,
        )
        self.results = run(built, everything, self.batch, self.by_token)
        self.gradients = gradients_of(built, self.model, layout.token_layout)
        self.initial = whole_weights(self.built(1, randomize=False)[0], self.model)

    def compared(self, tp, cp=1):
        """Return the largest differences from one process, relative to the largest value."""
        built, layout = self.built(
            tp,
            cp,
            recompute=self.recompute,
            randomize=False,
            sequence_parallel=self.sequence_parallel,
        )
        tokens = built.token_layout
        built.output.fused = self.fused_loss
        # Checkpoints and all-to-alls rely on Megatron's order of ranks.
        assert layout.replica_rank == layout.rank // tp
        context_rank = layout.groups.cp.rank()
        assert tokens.sequence_group.rank() == context_rank * tp + layout.tensor_parallel_rank
        same_start = True
        for name, parameter in built.named_parameters():
            whole = to_megatron(self.initial, name, self.model)
            own = shard(whole, parameter, layout.tensor_parallel_rank, tp)
            same_start = same_start and torch.equal(parameter, own)
        load_whole(built, self.weights, self.model, layout)
        outputs, loss = run(built, tokens, self.batch, self.by_token)
        # As ZeRO averages them.
        own = [parameter.grad for parameter in built.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in own])
        dist.all_reduce(flat, group=tokens.replica_group)
        for gradient, summed in zip(own, split_like(flat, own)):
            gradient.copy_(summed / tokens.replica_group.size())
        replicated = [parameter.grad for parameter in replicated_parameters(built)]
        assert bool(replicated) == tokens.sequence_parallel
        with CountCollectives() as summing:
            sum_over_group(replicated, layout.groups.tp)
        gradients = gradients_of(built, self.model, tokens)
        all_outputs, expected_loss = self.results
        differences = []
        for key, output in outputs.items():
            expected = all_outputs[key].chunk(tokens.data_shards)[tokens.data_group.rank()]
            differences.append(((output - expected).abs().max() / expected.abs().max()).item())
        return {
            "same_start": same_start,
            "outputs": differences,
            "loss": (loss - expected_loss).abs().item(),
            "collectives": summing.calls,
            "gradients": {
                name: ((gradients[name] - whole).norm() / whole.norm().clamp(min=1e-12)).item()
                for name, whole in self.gradients.items()
            },
        }


def assert_equal(result):
    assert result["same_start"]
    assert max(result["outputs"]) < 1e-5
    assert result["loss"] < 1e-5
    for name, difference in result["gradients"].items():
        assert difference < 2e-5, name


class CountCollectives(TorchDispatchMode):
    """Counts collectives and sums the 4-byte elements that each kind moves: the size of its larger
    buffer.
    """

    def __init__(self):
        super().__init__()
        self.numbers = {}
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            sizes = []
            torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda tensor: sizes.append(tensor.nbytes // 4), args
            )
            kind = function._schema.name.split("::")[1]
            self.numbers[kind] = self.numbers.get(kind, 0) + max(sizes, default=0)
            self.calls += 1
        return function(*args, **(kwargs or {}))


def count(changes, tp, cp):
    """Return the number of elements that a rank's collectives move in a forward and backward pass,
    by kind.
    """
    built, _ = build(small_model(**changes), tp, cp=cp)
    ids = random_tokens(seed=1)
    labels = random_tokens(seed=2)
    with CountCollectives() as forward:
        loss = built(ids, labels)
    with CountCollectives() as backward:
        loss.backward()
    return {"forward": forward.numbers, "backward": backward.numbers}


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7])


def cases():
    """Return the cases for tensor and context parallelism."""
    weights = (
        torch.rand(
            2,
            16,
            generator=torch.Generator().manual_seed(4),
        )
        / 16
    )
    found = {name: Case(changes, by_token=name == "tape") for name, changes in VARIANTS.items()}
    found |= {name: Case(**settings) for name, settings in LORA_VARIANTS.items()}
    found["tape_recompute"] = Case(recompute="full")
    found["increments_recompute"] = Case(
        VARIANTS["tape_learned_increments_unit"], recompute="selective"
    )
    found["tape_packed"] = Case(inputs={"documents": DOCUMENTS})
    found["tape_shifted"] = Case(
        recompute="full", shifted_sparse=True, inputs={"documents": DOCUMENTS}
    )
    for name in ("swan", "tape_scaled_full_layers", "selective_rope"):
        found[f"{name}_packed"] = Case(
            VARIANTS[name], recompute="selective", inputs={"documents": DOCUMENTS}
        )
    for name, changes in VARIANTS.items():
        # The variants of rope and tape with windows have names of their own.
        if changes.get("position_encoding") == name:
            found[f"{name}_window_packed"] = Case(
                changes | {"sliding_window": 5, "full_attention_every": 2},
                recompute="selective",
                inputs={"documents": DOCUMENTS},
            )
    found["tape_window_shifted"] = Case(
        {"sliding_window": 3, "full_attention_every": 2},
        shifted_sparse=True,
        inputs={"documents": DOCUMENTS},
    )
    found["tape_weighted"] = Case(fused_loss=True, by_token=True, inputs={"loss_weights": weights})
    return found


def without_sequence_parallel():
    """Return the cases for tensor parallelism without sequence parallelism."""
    found = {name: {"changes": {"position_encoding": name}} for name in ("rope", "toy_head_gate")}
    found |= LORA_WITHOUT_SEQUENCE_PARALLEL
    return {
        f"{name}_split_by_heads": Case(**case, sequence_parallel=False)
        for name, case in found.items()
    }


def shared_groups():
    """Return the cases for context parallelism with key/value groups that the number of ranks does
    not divide.
    """
    three = {
        "hidden_size": 48,
        "num_attention_heads": 12,
        "num_query_groups": 3,
        "kv_channels": 8,
    }
    found = {"tape_of_one_group": Case({"num_query_groups": 1})}
    found |= {f"{name}_of_three_groups": Case(VARIANTS[name] | three) for name in SHARING}
    found["tape_shifted_of_three_groups"] = Case(three, shifted_sparse=True)
    return found


def every_layout(of_both, of_tensor, of_context, layouts):
    """Return the results of each case under each layout (tensor and context parallel sizes), by
    name.

    `of_tensor` and `of_context` are run only under that kind of parallelism.
    """
    for case in (of_both | of_tensor | of_context).values():
        case.alone()
    results = {}
    # One process computes the loss of all 32 tokens at once; several take chunks of 2, or of 5 with
    # tp 2.
    with mock.patch.dict(chunks.LOGITS, dict.fromkeys(chunks.LOGITS, 160)):
        for tp, cp in layouts:
            chosen = of_both | (of_tensor if cp == 1 else of_context if tp == 1 else {})
            results |= {
                f"{name}_tp{tp}_cp{cp}": case.compared(tp, cp) for name, case in chosen.items()
            }
    return results


def main():
    importlib.import_module("toy_encodings.head_gate")
    results = every_layout(
        cases(),
        without_sequence_parallel(),
        shared_groups(),
        [(2, 1), (1, 2)],
    )
    results["strided"] = reduced_transpose(2)
    results["numbers"] = {
        f"{name}_tp{tp}_cp{cp}": count(changes | {"num_query_groups": 4}, tp, cp)
        for tp, cp in ((2, 1), (1, 2))
        for name, changes in COUNTED.items()
    }
    results["shape"] = {
        "S": 16,
        "B": 2,
        "C": SMALL["hidden_size"],
        "layers": SMALL["num_layers"],
    }
    return results


def reduced_transpose(tp):
    """Return the sums over the ranks of a transposed tensor and of a transposed gradient, whose
    values are the rank.
    """
    group = initialize_distributed(tp).groups.tp
    ranks = torch.full((3, 2), float(group.rank()))
    summed = mappings.reduce_from_tensor_model_parallel_region(ranks.T, group=group)
    leaf = torch.zeros(2, 3, requires_grad=True)
    mappings.copy_to_tensor_model_parallel_region(leaf, group=group).backward(ranks.T)
    return summed.tolist(), leaf.grad.tolist()


def of_four_processes():
    """Run the cases of four processes within the group of training_cases."""
    found = {name: Case(VARIANTS[name], by_token=name == "tape") for name in OF_FOUR}
    found["tape_packed_recompute"] = Case(recompute="selective", inputs={"documents": DOCUMENTS})
    found["swan_packed"] = Case(VARIANTS["swan"], recompute="full", inputs={"documents": DOCUMENTS})
    found["tape_lora"] = Case(**LORA_VARIANTS["tape_lora"])
    found["tape_shifted"] = Case(shifted_sparse=True)
    return every_layout(
        found,
        {},
        shared_groups(),
        [(2, 2), (1, 4)],
    )
