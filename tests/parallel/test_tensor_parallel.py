"""Two tensor-parallel processes against one: weights, logits, losses, every gradient, and what they send each other."""

import pytest
import tensor_parallel_cases
from launch import run_group
from models import small_model

from megatron_tape.position import MicroBatch, encoding_of

CASES = [*tensor_parallel_cases.VARIANTS, "tape_recompute", "tape_packed", "rope_without_sequence_parallel"]
CASES += [
    "head_gate_without_sequence_parallel",
    "tape_shifted",
    "increments_recompute",
    *tensor_parallel_cases.LORA_VARIANTS,
]


@pytest.fixture(scope="module")
def results():
    return run_group("tensor_parallel_cases", 2)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(results, case):
    result = results[case]
    assert result["same_start"]
    assert result["logits"] < 1e-5
    assert result["loss"] < 1e-5
    assert result["collectives"] == (0 if "without_sequence_parallel" in case else 1)
    assert len(result["gradients"]) > (20 if "alone" not in case else 3 * 2 * 4 - 1)
    for name, difference in result["gradients"].items():
        assert difference < 2e-5, name


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tape_moves_no_more_than_two_small_all_to_alls_a_layer(results, direction):
    """TAPE may add 2 * S*B*C/tp numbers a layer and direction to RoPE's collectives."""
    shape = results["shape"]
    tape, rope = (sum(results["numbers"][encoding][direction].values()) for encoding in ("tape", "rope"))
    assert rope > 0
    added = tape - rope
    assert 0 < added <= shape["layers"] * 2 * shape["S"] * shape["B"] * shape["C"] // 2


@pytest.mark.parametrize("encoding", [name for name in tensor_parallel_cases.COUNTED if name != "rope"])
def test_an_encoding_exchanges_what_the_estimate_counts(results, encoding):
    shape, settings = results["shape"], tensor_parallel_cases.COUNTED[encoding]
    declared = encoding_of(small_model(**settings, num_query_groups=4))
    tokens = shape["S"] * shape["B"]
    of_layers = [declared.exchanged_bytes(i, MicroBatch(tokens, tokens // 2, 4, 2)) for i in range(shape["layers"])]
    for direction, counted in zip(("forward", "backward"), zip(*of_layers)):
        own, without = (sum(results["numbers"][name][direction].values()) for name in (encoding, "rope"))
        assert 4 * (own - without) == sum(counted) > 0


def test_the_first_rank_of_a_node_goes_before_the_others(results):
    (_, first_left), (second_entered, _) = results["order_on_node"]
    assert first_left <= second_entered
