"""Tests of the assignment of a large checkpoint's files to the ranks that write and read them,
without tensors.
"""

import math
from collections import Counter

import pytest
from configurations import model_config

from megatron_tape.checkpoint.index import readers, shard_of, tensor_file, writers
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.planning.parameters import parameter_count

LARGE = model_config(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    seq_length=8192,
    vocab_size=128256,
)
CUT = [f"linear_{name}.weight" for name in ("qkv", "proj", "fc1", "fc2")] + [
    "embedding.weight",
    "output.weight",
]
RANKS = 4096


def checkpoint(tensor_size, ranks, limit=None):
    """Return the sizes of the files that `ranks` ranks write, the total size, and the size of the
    largest tensor.
    """
    sizes = {}
    for name, shape in parameter_shapes(LARGE).items():
        shards = tensor_size if any(cut in name for cut in CUT) else 1
        sizes |= {
            f"{kind}/{name}": 4 * math.prod(shape) // shards
            for kind in ("weight", "exp_avg", "exp_avg_sq")
        }
    writer_of = writers(sizes, tensor_size, ranks // tensor_size, limit)
    loads = Counter()
    for key, rank in writer_of.items():
        loads[rank] += sizes[key]
    files = {
        tensor_file(shard, number): loads[rank]
        for shard in range(tensor_size)
        for number, rank in enumerate(loads)
    }
    return files, tensor_size * sum(sizes.values()), max(sizes.values())


@pytest.mark.parametrize("limit", [None, 8, 64, 100, 4096])
def test_a_large_checkpoint_is_spread_evenly_over_at_most_the_given_number_of_files(limit):
    files, total, largest = checkpoint(8, RANKS, limit)
    assert parameter_count(LARGE) > 70e9
    assert total >= 12 * parameter_count(LARGE)
    assert sum(files.values()) == total
    assert len(files) <= (limit or 512)
    assert len(files) >= min(limit or 512, 512) // 8 * 8
    assert max(files.values()) <= total / len(files) + largest
    if limit in (None, 8, 64):
        assert max(files.values()) < 1.1 * total / len(files)


@pytest.mark.parametrize("tensor_size", [1, 2, 4, 8, 16, 64])
def test_resuming_70_billion_parameters_on_4096_ranks_opens_few_files_and_reads_each_byte_once(
    tensor_size,
):
    """The checkpoint was saved by 8 tensor-parallel ranks. `tests/full_disk_cases.py` checks what
    ranks really read.
    """
    files, total, _ = checkpoint(8, RANKS)
    small = {"state.json": 10_000, "index.json": 5 << 20, "random.safetensors": RANKS * 16_000}
    plan = readers(files | small, 8, tensor_size, RANKS // tensor_size)
    assert plan.keys() == files.keys() | small.keys()
    assert set(plan.values()) <= set(range(RANKS))
    # Rank 0 also reads the JSON files, and sends them to the others. Every rank reads its row of
    # the random states.
    opened = len(plan) + 2 * len(small) + RANKS
    read = sum(files.values()) + 3 * sum(small.values())
    assert opened < 20_000
    assert read < 1.2 * total
    loads = Counter()
    for name, rank in plan.items():
        loads[rank] += (files | small)[name]
        if tensor_size == 8 and name in files:
            assert rank % tensor_size == shard_of(name), (
                "it is read by a rank that needs its tensors"
            )
    assert max(loads.values()) < 1.1 * max(files.values()), "no rank reads more than about one file"
