"""Two tensor- or context-parallel processes have the weights, logits, losses, gradients and
checkpoints of one process, and the estimated communication."""

import pytest
import tensor_parallel_cases
from datasets_for_tests import write_all
from launch import run_group
from models import small_model
from plans import of_model, on_cpu
from position_cases import BUILT_IN, RESUMED, UNDER_ZERO_3, settings_of
from toy_encodings import TOYS, registered
from training_cases import assert_same_state

from megatron_tape.planning.communication import ALL_TO_ALL, CONTEXT, communication
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import MicroBatchSizes, encoding_of

BOTH = [*tensor_parallel_cases.cases()]
LAYOUTS = [
    *(("tp2_cp1", case) for case in [*BOTH, *tensor_parallel_cases.without_sequence_parallel()]),
    *(("tp1_cp2", case) for case in [*BOTH, *tensor_parallel_cases.shared_groups()]),
]


@pytest.fixture(scope="module", autouse=True)
def toys():
    with registered():
        yield


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    return run_group(
        "two_process_cases", 2, write_all(tmp_path_factory.mktemp("data")), timeout=840
    )


@pytest.fixture(scope="module")
def results(group):
    return group["models"]


@pytest.mark.parametrize("layout, case", LAYOUTS)
def test_two_processes_equal_one(results, layout, case):
    result = results[f"{case}_{layout}"]
    tensor_parallel_cases.assert_equal(result)
    assert len(result["gradients"]) > (20 if "alone" not in case else 3 * 2 * 4 - 1)
    summed = layout == "tp2_cp1" and case not in tensor_parallel_cases.without_sequence_parallel()
    assert result["collectives"] == summed


def test_tensors_that_are_not_contiguous_are_summed_over_the_ranks(results):
    summed, gradient = results["strided"]
    assert summed == gradient == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "encoding", [name for name in tensor_parallel_cases.COUNTED if name != "rope"]
)
def test_an_encoding_sends_the_estimated_bytes(results, encoding):
    shape = results["shape"]
    settings = tensor_parallel_cases.COUNTED[encoding]
    declared = encoding_of(small_model(**settings, num_query_groups=4))
    tokens = shape["S"] * shape["B"]
    for layout, sizes in (("tp2_cp1", (2, 1)), ("tp1_cp2", (1, 2))):
        batch = MicroBatchSizes(tokens, tokens // 2, 4, *sizes)
        costs = [declared.costs(i, batch) for i in range(shape["layers"])]
        estimates = {
            "forward": sum(cost.sent_forward for cost in costs),
            "backward": sum(cost.sent_backward for cost in costs),
        }
        for direction, estimate in estimates.items():
            sent, by_rope = (
                sum(results["numbers"][f"{name}_{layout}"][direction].values())
                for name in (encoding, "rope")
            )
            assert 4 * (sent - by_rope) == estimate > 0


@pytest.mark.parametrize("encoding", tensor_parallel_cases.COUNTED)
def test_context_ranks_send_the_estimated_bytes(results, encoding):
    model = small_model(**tensor_parallel_cases.COUNTED[encoding], num_query_groups=4)
    plan = of_model(model, 2, "fp32", train__global_batch_size=2, parallel__context_parallel_size=2)
    numbers = results["numbers"][f"{encoding}_tp1_cp2"]
    sent = sum(numbers[direction]["alltoall_base_"] for direction in ("forward", "backward"))
    assert communication(plan)[CONTEXT, ALL_TO_ALL] == 4 * sent


@pytest.mark.parametrize("name", (*TOYS, *BUILT_IN))
@pytest.mark.parametrize("layout", ["tensor", "sharded"])
def test_an_encoding_has_the_same_losses_and_weights_under_every_layout(group, name, layout):
    """The layout "sharded" uses ZeRO 3, under which parameters that attention reads must be
    gathered.
    """
    steps = group["encodings"]["steps"][name]
    found = steps[layout]
    expected = steps["alone"]
    assert found["numbers"] == pytest.approx(expected["numbers"], rel=5e-5)
    assert_same_state(found["weights"], expected["weights"])


def assert_resumed(whole, continued):
    assert [row["step"] for row in whole] == [row["step"] for row in continued] == [1, 2]
    assert all(
        whole[1][key] == continued[1][key]
        for key in ("train/loss", "train/grad_norm", "validation/loss")
    )


@pytest.mark.parametrize("name", RESUMED)
def test_an_encoding_resumes_under_tensor_parallelism(group, name):
    assert_resumed(*group["encodings"]["resumed"][name])


@pytest.mark.parametrize("name", UNDER_ZERO_3)
def test_every_encoding_resumes_under_zero_3_with_parameters_of_one_element(group, name):
    assert_resumed(*group["encodings"]["under_zero_3"][name])


@pytest.mark.parametrize("name", (*TOYS, *BUILT_IN))
def test_parameters_and_activations_of_an_encoding_per_process_equal_the_estimate(group, name):
    model = small_model(**settings_of(name))
    parameters, activation_bytes = group["encodings"]["costs"][name]
    assert parameters == parameter_count(model, tensor_size=2)
    estimate = on_cpu(model, 2, "fp32", parallel__tensor_model_parallel_size=2)
    assert estimate == pytest.approx(activation_bytes, rel=0.02)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_each_rank_keeps_only_the_tensors_that_it_writes(group, zero_stage):
    assert group["saves"]["states"][zero_stage]


def test_resuming_reads_each_file_once_on_the_planned_rank(group):
    result = group["saves"]["resumed"]
    assert result["same"]
    assert result["changed"]
    assert result["opened"] == result["planned"]
    assert sorted(sum(result["opened"], [])) == [
        f"tensors-tp00-dp0000{number}.safetensors" for number in (0, 1)
    ]
    assert all(result["opened"])


def test_a_read_error_on_one_rank_is_reported_on_all_ranks(group):
    messages, messages_of_rank_1 = group["saves"]["unreadable"]
    assert messages == messages_of_rank_1
    assert all("(rank 1): " in message for message in messages)
    directory, missing, unreadable = messages
    assert "step-00000003 does not exist on node" in directory
    assert "cannot be read ([Errno 2]" in missing
    assert ".safetensors cannot be read ([Errno 5]" in unreadable


def test_a_full_disk_on_one_rank_is_reported_on_all_and_damages_no_checkpoint(group):
    result = group["saves"]
    (message,) = set(result["messages"])
    assert "checkpoint 2" in message
    assert "rank 1" in message
    assert result["after_failure"] == "step-00000001"
    assert result["after_retry"] == "step-00000003"
    assert result["unfinished"] == []
    assert result["left"] == [".attempt-000001", "step-00000001", "step-00000003"]
