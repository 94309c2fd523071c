"""What test_tensor_parallel.py asks of two processes. Every value returned is checked there."""

import importlib
import time

import torch
import torch.distributed as dist
from models import SMALL, build, load_whole, random_tokens, small_model, whole_weights
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.weights import from_megatron, kind_of, shard, to_megatron, unshard
from megatron_tape.training.gradients import replicated_parameters, sum_over_group
from megatron_tape.training.trained import select_trained

VARIANTS = {
    "tape": {},
    "tape_multi_head": {"num_query_groups": 4},
    "tape_gate_from_attention": {"gate_input": "attention"},
    "tape_per_head": {"num_query_groups": 4, "token_mixing": "per_head"},
    "tape_tied": {"tie_embeddings": True},
    "tape_biased_qk_norm": {"qkv_bias": True, "qk_norm": True, "kv_channels": 12},
    "rope": {"position_encoding": "rope"},
    "tape_gated_output": {"attention_output_gate": True, "kv_channels": 12},
    "rope_biased_qk_norm": {"position_encoding": "rope", "qkv_bias": True, "qk_norm": True},
    "nope": {"position_encoding": "nope"},
    "alibi": {"position_encoding": "alibi"},
    "t5": {"position_encoding": "t5", "t5_num_buckets": 6, "t5_max_distance": 9},
    "fire": {"position_encoding": "fire", "fire_threshold": 3.0},
    "sincos": {"position_encoding": "sincos"},
    "xpos": {"position_encoding": "xpos", "xpos_scale_base": 8.0},
    "path": {"position_encoding": "path", "path_rank": 5},
    "cope": {"position_encoding": "cope", "cope_max_position": 5},
    "fox": {"position_encoding": "fox"},
    "randpe": {"position_encoding": "randpe", "randpe_range": 50},
    "repo": {"position_encoding": "repo", "repo_width": 5},
    "path_fox": {"position_encoding": "path_fox", "path_rank": 5},
    "rope_learned_increments": {"position_encoding": "rope", "position_increments": "learned"},
    "tape_learned_increments_unit": {"position_increments": "learned", "position_state_norm": "unit"},
}
COUNTED = {name: {"position_encoding": name} for name in ("tape", "rope", "fox", "path_fox")}
COUNTED |= {
    f"{name}_learned": {"position_encoding": name, "position_increments": "learned"} for name in ("tape", "rope")
}
"""Of which it is counted what the processes send each other."""
LORA = ExtensionConfig(trains=["lora"], lora_rank=3, lora_alpha=6.0)
SOME_LORA = ExtensionConfig(trains=["lora"], lora_rank=2, lora_alpha=1.0, lora_targets=["q", "v"])
ROPE = {"position_encoding": "rope"}
LORA_VARIANTS = {
    "tape_lora": {"lora": LORA},
    "tape_lora_for_q_and_v": {"lora": SOME_LORA, "changes": {"num_query_groups": 4, "qkv_bias": True}},
    "tape_lora_alone_recomputed": {"lora": LORA, "trained": ("lora",), "recompute": "full"},
    "rope_lora_without_sequence_parallel": {"lora": LORA, "changes": ROPE, "sequence_parallel": False},
    "rope_lora_alone_without_sequence_parallel": {
        "lora": LORA,
        "changes": ROPE,
        "trained": ("lora",),
        "sequence_parallel": False,
    },
}


def gradients_of(built, model, size):
    """Whole gradients by the reference's names, from all ranks' shares."""
    gradients = {}
    for name, parameter in built.gpt.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = [torch.empty_like(parameter.grad) for _ in range(size)]
        if size > 1:
            dist.all_gather(parts, parameter.grad.contiguous())
        else:
            parts = [parameter.grad]
        gradients |= from_megatron(name, unshard(parts, parameter), model)
    return gradients


def run(built, ids, labels, **kwargs):
    with torch.no_grad():
        logits = built(ids, **kwargs)
    loss = built(ids, labels, **kwargs)
    loss.backward()
    return logits, loss.detach()


def compare(
    changes=None, recompute="none", sequence_parallel=True, lora=None, trained=None, shifted_sparse=False, **kwargs
):
    """Largest differences between one process and two, relative to the largest value.

    Parameters of other kinds than `trained` are frozen, if it is given.
    """

    def trains(name, parameter):
        return trained is None or kind_of(name) in trained

    changes = changes or {}
    model = small_model(**changes)
    ids, labels = random_tokens(seed=1), random_tokens(seed=2)
    same = dict(lora=lora, shifted_sparse=shifted_sparse)
    alone, _ = build(model, **same)
    select_trained(alone, trains, recompute != "none")
    weights = whole_weights(alone, model)
    logits, loss = run(alone, ids, labels, **kwargs)
    expected = gradients_of(alone, model, 1)

    fresh, _ = build(model, randomize=False, **same)
    initial = whole_weights(fresh, model)
    parallel, layout = build(
        model, tp=2, recompute=recompute, randomize=False, sequence_parallel=sequence_parallel, **same
    )
    select_trained(parallel, trains, recompute != "none")
    same_start = all(
        torch.equal(parameter, shard(to_megatron(initial, name, model), parameter, layout.rank, 2))
        for name, parameter in parallel.gpt.named_parameters()
    )
    load_whole(parallel, weights, model, layout)
    parallel_logits, parallel_loss = run(parallel, ids, labels, **kwargs)
    replicated = [parameter.grad for parameter in replicated_parameters(parallel)]
    assert bool(replicated) == sequence_parallel
    with CountCollectives() as summing:
        sum_over_group(replicated, layout.groups.tp, layout.device)
    gradients = gradients_of(parallel, model, 2)
    return {
        "same_start": same_start,
        "logits": ((parallel_logits - logits).abs().max() / logits.abs().max()).item(),
        "loss": (parallel_loss - loss).abs().item(),
        "collectives": summing.calls,
        "gradients": {
            name: ((gradients[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)).item()
            for name in expected
        },
    }


class CountCollectives(TorchDispatchMode):
    """Counts collectives, and adds up the numbers each kind moves, of 4 bytes: the size of its larger buffer."""

    def __init__(self):
        super().__init__()
        self.numbers = {}
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            sizes = []
            torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: sizes.append(tensor.nbytes // 4), args)
            kind = function._schema.name.split("::")[1]
            self.numbers[kind] = self.numbers.get(kind, 0) + max(sizes, default=0)
            self.calls += 1
        return function(*args, **(kwargs or {}))


def count(changes):
    model = small_model(**changes, num_query_groups=4)
    built, _ = build(model, tp=2)
    ids, labels = random_tokens(seed=1), random_tokens(seed=2)
    with CountCollectives() as forward:
        loss = built(ids, labels)
    with CountCollectives() as backward:
        loss.backward()
    return {"forward": forward.numbers, "backward": backward.numbers}


def order_on_node(folder):
    """When each rank was in a block that the first of its node enters first."""
    _, layout = build(small_model(), tp=2)
    with layout.first_on_node():
        entered = time.monotonic()
        time.sleep(0.05)
        left = time.monotonic()
    times = [None, None]
    dist.all_gather_object(times, (entered, left))
    return times


def main(folder):
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7])
    results = {name: compare(changes) for name, changes in VARIANTS.items()}
    results |= {name: compare(**settings) for name, settings in LORA_VARIANTS.items()}
    results["tape_recompute"] = compare({}, recompute="full")
    results["increments_recompute"] = compare(VARIANTS["tape_learned_increments_unit"], recompute="full")
    results["tape_packed"] = compare({}, documents=documents)
    results["tape_shifted"] = compare({}, recompute="full", shifted_sparse=True, documents=documents)
    results["rope_without_sequence_parallel"] = compare({"position_encoding": "rope"}, sequence_parallel=False)
    importlib.import_module("toy_encodings.head_gate")
    results["head_gate_without_sequence_parallel"] = compare(
        {"position_encoding": "toy_head_gate"}, sequence_parallel=False
    )
    results["order_on_node"] = order_on_node(folder)
    results["numbers"] = {name: count(changes) for name, changes in COUNTED.items()}
    results["shape"] = {"S": 16, "B": 2, "C": SMALL["hidden_size"], "layers": SMALL["num_layers"]}
    return results
