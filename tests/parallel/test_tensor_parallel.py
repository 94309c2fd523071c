"""Two processes that share the model or the tokens against one: weights, logits, losses, every gradient, and what they
send each other."""

import partition_cases
import pytest
import tensor_parallel_cases
from launch import run_group
from models import small_model
from plans import middle_model, of_model

from megatron_tape.planning.activations import activations
from megatron_tape.planning.communication import ALL_TO_ALL, CONTEXT, communication
from megatron_tape.position import MicroBatch, encoding_of

BOTH = [*tensor_parallel_cases.cases()]
LAYOUTS = [
    *(("tp2_cp1", case) for case in [*BOTH, *tensor_parallel_cases.without_sequence_parallel()]),
    *(("tp1_cp2", case) for case in [*BOTH, *tensor_parallel_cases.shared_groups()]),
]


@pytest.fixture(scope="module")
def results():
    return run_group("tensor_parallel_cases", 2)


@pytest.mark.parametrize("layout, case", LAYOUTS)
def test_two_processes_equal_one(results, layout, case):
    result = results[f"{case}_{layout}"]
    tensor_parallel_cases.assert_equal(result)
    assert len(result["gradients"]) > (20 if "alone" not in case else 3 * 2 * 4 - 1)
    summed = layout == "tp2_cp1" and case not in tensor_parallel_cases.without_sequence_parallel()
    assert result["collectives"] == summed


def test_shifting_positions_changes_no_logit(results):
    assert all(0 < change < 1e-4 for change in results["shifted"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tape_moves_no_more_than_two_small_all_to_alls_a_layer(results, direction):
    """TAPE may add 2 * S*B*C/tp numbers a layer and direction to RoPE's collectives."""
    shape = results["shape"]
    for layout in ("tp2_cp1", "tp1_cp2"):
        tape, rope = (sum(results["numbers"][f"{name}_{layout}"][direction].values()) for name in ("tape", "rope"))
        assert rope > 0
        added = tape - rope
        assert 0 < added <= shape["layers"] * 2 * shape["S"] * shape["B"] * shape["C"] // 2


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_context_parallel_attention_moves_its_own_tensors_and_tape_at_most_half_as_much(results, direction):
    """Queries, keys, values and the output of S*B/cp tokens each, (2 H + 2 G) D numbers a token and layer."""
    shape, model = results["shape"], small_model(num_query_groups=4)
    tape, rope = (results["numbers"][f"{name}_tp1_cp2"][direction] for name in ("tape", "rope"))
    own = 2 * (model.num_attention_heads + model.query_groups) * model.head_dim
    assert rope["alltoall_base_"] == shape["layers"] * own * shape["S"] * shape["B"] // 2
    assert 0 < tape["alltoall_base_"] - rope["alltoall_base_"] <= rope["alltoall_base_"] // 2


@pytest.mark.parametrize("encoding", [name for name in tensor_parallel_cases.COUNTED if name != "rope"])
def test_an_encoding_exchanges_what_the_estimate_counts(results, encoding):
    shape, settings = results["shape"], tensor_parallel_cases.COUNTED[encoding]
    declared = encoding_of(small_model(**settings, num_query_groups=4))
    tokens = shape["S"] * shape["B"]
    for layout, sizes in (("tp2_cp1", (2, 1)), ("tp1_cp2", (1, 2))):
        batch = MicroBatch(tokens, tokens // 2, 4, *sizes)
        of_layers = [declared.exchanged_bytes(i, batch) for i in range(shape["layers"])]
        for direction, counted in zip(("forward", "backward"), zip(*of_layers)):
            numbers = (results["numbers"][f"{name}_{layout}"][direction] for name in (encoding, "rope"))
            own, without = (sum(found.values()) for found in numbers)
            assert 4 * (own - without) == sum(counted) > 0


@pytest.mark.parametrize("encoding", tensor_parallel_cases.COUNTED)
def test_the_estimate_counts_what_context_ranks_send(results, encoding):
    model = small_model(**tensor_parallel_cases.COUNTED[encoding], num_query_groups=4)
    plan = of_model(model, 2, "fp32", train__global_batch_size=2, parallel__context_parallel_size=2)
    numbers = results["numbers"][f"{encoding}_tp1_cp2"]
    sent = sum(numbers[direction]["alltoall_base_"] for direction in ("forward", "backward"))
    assert communication(plan)[CONTEXT, ALL_TO_ALL].bytes == 4 * sent


@pytest.mark.parametrize("case", range(len(tensor_parallel_cases.HELD)))
def test_each_of_two_processes_holds_and_saves_what_is_estimated(results, case):
    (encoding, recompute, sequence_parallel), (elements, saved) = (
        tensor_parallel_cases.HELD[case],
        results["held"][case],
    )
    layout = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": sequence_parallel}
    plan = of_model(middle_model(encoding), 1, "fp32", recompute, **layout)
    assert elements == plan.elements
    assert activations(plan, fused_norms=False).saved == pytest.approx(saved, rel=0.01)


def test_links_inside_and_between_nodes_are_measured(results):
    in_a_node, in_two_nodes = results["links"]
    assert in_a_node.keys() == {"intra_node_bandwidth", "intra_node_latency"}
    assert in_two_nodes.keys() == {"inter_node_bandwidth", "inter_node_latency"}
    assert min(*in_a_node.values(), *in_two_nodes.values()) > 0


@pytest.mark.parametrize("cp", [1, 2])
def test_under_zero_3_each_rank_draws_its_part_of_the_whole_weights(results, cp):
    partition_cases.assert_right(results["partitions"][cp], 2)


def test_the_first_rank_of_a_node_goes_before_the_others(results):
    (_, first_left), (second_entered, _) = results["order_on_node"]
    assert first_left <= second_entered
