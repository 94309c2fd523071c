"""The analysis of a step's trace has sums, idle times and launches that were computed by hand."""

import pytest

from benchmarks.tables import kernel_table, profile_table
from benchmarks.trace_analysis import (
    CLASSES,
    CLASSES_BY_FILE,
    KERNELS,
    NO_PHASE,
    OTHER,
    PHASE,
    STEP,
    analyze,
    class_differences,
    kernel_class,
    own_kernels,
)

MAIN = 1
AUTOGRAD = 2
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
    " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)


def event(category, name, start, end, thread=MAIN, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 1,
        "tid": thread,
        "args": args,
    }


def launched(number, kernel, launch, start, end, **options):
    """Return a launch, which starts and ends at `launch`, and its kernel from `start` to `end`."""
    thread = options.get("thread", MAIN)
    call = options.get("call", "cudaLaunchKernel")
    driver = "cuda_driver" if call.startswith("cuL") else "cuda_runtime"
    return [
        event(driver, call, *launch, thread, number),
        event(
            options.get("category", "kernel"), kernel, start, end, options.get("stream", 7), number
        ),
    ]


@pytest.fixture
def trace():
    """Return a trace of one step, from 0 to 1,000 microseconds, and of a kernel before it."""
    accumulates = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    events = [
        {"ph": "M", "name": "process_name"},
        event("gpu_user_annotation", STEP, 50, 925, 7),
        event("user_annotation", STEP, 0, 1000),
        event("user_annotation", f"{PHASE}forward", 10, 200),
        event("user_annotation", f"{PHASE}backward", 200, 600),
        event("user_annotation", f"{PHASE}communication", 244, 260, AUTOGRAD),
        event("user_annotation", f"{PHASE}optimizer", 600, 900),
        event("gpu_user_annotation", f"{PHASE}forward", 50, 170, 7),
        event("cpu_op", "aten::mm", 12, 28),
        event("cpu_op", "_LinearCrossEntropy", 30, 60),
        event("cpu_op", "aten::mul", 35, 55),
        event("cpu_op", accumulates, 210, 240, AUTOGRAD),
        # On another thread than the launch, so it does not enclose it.
        event("cpu_op", "_LinearCrossEntropyBackward", 215, 245),
        *launched(0, ELEMENTWISE, (-50, -45), -20, -10),
        *launched(1, "nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_TNT", (20, 24), 50, 150),
        *launched(2, ELEMENTWISE, (40, 46), 150, 170),
        *launched(3, ELEMENTWISE, (220, 225), 260, 300, thread=AUTOGRAD),
        *launched(4, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", (250, 255), 258, 400, stream=9),
        *launched(5, "_update_backward", (300, 308), 400, 450, call="cuLaunchKernelEx"),
        *launched(6, "mystery", (500, 503), 510, 530),
        *launched(7, ELEMENTWISE, (700, 710), 720, 800, call="cudaLaunchKernelExC"),
        *launched(
            8,
            "Memcpy DtoH (Device -> Pinned)",
            (910, 950),
            915,
            925,
            call="cudaMemcpyAsync",
            category="gpu_memcpy",
        ),
    ]
    return {"traceEvents": events}


def test_times_are_summed_by_class_and_gaps_by_phase(trace):
    found = analyze(trace)
    microseconds = 1e-6
    assert found["seconds_by_class"] == pytest.approx(
        {
            "position update": 50 * microseconds,
            "matrix products": 100 * microseconds,
            "loss": 20 * microseconds,
            "gradient accumulation": 40 * microseconds,
            "optimizer": 80 * microseconds,
            "communication": 142 * microseconds,
            "copies and casts": 10 * microseconds,
            OTHER: 20 * microseconds,
        }
    )
    # Kernel 3 runs while kernel 4 does.
    assert found["seconds"] == pytest.approx(1000 * microseconds)
    assert found["busy_seconds"] == pytest.approx(422 * microseconds)
    assert found["idle_seconds"] == pytest.approx(
        {
            "forward": 50 * microseconds,
            "communication": 88 * microseconds,
            "backward": 60 * microseconds,
            "optimizer": 190 * microseconds,
            NO_PHASE: 115 * microseconds,
            "end of step": 75 * microseconds,
        }
    )
    (unknown,) = found["unknown_kernels"]
    assert unknown == {"name": "mystery", "class": OTHER, "seconds": 2e-5, "number": 1}
    assert [entry["class"] for entry in found["largest_kernels"]] == [
        "communication",
        "matrix products",
        "optimizer",
        "position update",
        "gradient accumulation",
        "loss",
        OTHER,
        "copies and casts",
    ]


def test_launches_have_the_times_of_the_host(trace):
    found = analyze(trace)
    # The copy is not a launch.
    assert (found["kernels"], found["launches"]) == (8, 7)
    # The launches take 4, 6, 5, 5, 8, 3 and 10 us; the gaps are 16, 174, 25, 45, 192 and 197.
    assert found["launch_seconds"] == pytest.approx(41 / 7 * 1e-6, abs=1e-9)
    assert found["launch_median_seconds"] == pytest.approx(5e-6)
    assert found["launch_gap_seconds"] == pytest.approx((45 + 174) / 2 * 1e-6)


def test_a_kernel_without_a_launch_has_time_but_no_launch(trace):
    trace["traceEvents"].append(event("kernel", "_rotate", 960, 970, 7, 99))
    found = analyze(trace)
    assert (found["kernels"], found["launches"]) == (9, 7)
    assert found["seconds_by_class"]["rotation"] == pytest.approx(10e-6)


def test_kernels_of_a_graph_have_one_launch(trace):
    trace["traceEvents"] += [
        *launched(9, "_update", (960, 970), 975, 980, call="cudaGraphLaunch"),
        event("kernel", "_swiglu", 980, 985, 7, 9),
    ]
    found = analyze(trace)
    assert (found["kernels"], found["launches"]) == (10, 8)
    assert found["seconds_by_class"]["activation"] == pytest.approx(5e-6)


def test_without_kernels_the_outermost_operations_stand_for_them():
    events = [
        event("user_annotation", STEP, 0, 100),
        event("user_annotation", f"{PHASE}forward", 0, 100),
        event("cpu_op", "LinearFunction", 10, 50),
        event("cpu_op", "aten::mm", 20, 40),
        event("cpu_op", "aten::resolve_conj", 22, 24),
        event("cpu_op", "aten::add", 60, 70),
    ]
    found = analyze({"traceEvents": events}, on_gpu=False)
    assert found["seconds_by_class"] == pytest.approx(
        {"matrix products": 20e-6, "other elementwise": 10e-6}
    )
    assert found["kernels"] == 2
    with pytest.raises(ValueError, match="no range"):
        analyze({"traceEvents": events[1:]}, on_gpu=False)
    with pytest.raises(ValueError, match="no kernels"):
        analyze({"traceEvents": events})


# Names in traces of public issues, shortened.
@pytest.mark.parametrize(
    "name, kind",
    [
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90Flash", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(float*)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(float*)", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)", "attention"),
        ("_backward_keys", "attention"),
        ("_update", "position update"),
        ("_rotate_and_join_backward", "rotation"),
        ("_join", "rotation"),
        ("_swiglu_backward", "activation"),
        ("liger_vocab_parallel_ce_forward_kernel", "loss"),
        ("nvjet_tst_192x208_64x4_2x1_v_bz_coopB_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_128x64>", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matrix products"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norms"),
        ("at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>", "norms"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimizer"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "copies and casts"),
        ("elementwise_kernel<128, 4, direct_copy_kernel_cuda(...)>", "copies and casts"),
        ("at::native::vectorized_elementwise_kernel<4, FillFunctor>", "copies and casts"),
        ("Memset (Device)", "copies and casts"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", "other elementwise"),
        (ELEMENTWISE, "other elementwise"),
        ("triton_poi_fused_add_mul_3", "other elementwise"),
        ("mystery", OTHER),
    ],
)  # fmt: skip
def test_names_of_kernels_have_classes(name, kind):
    assert kind in CLASSES
    assert kernel_class(name) == kind


def test_every_file_of_kernels_has_a_class():
    assert CLASSES_BY_FILE.keys() == {path.stem for path in KERNELS.glob("triton_*.py")}
    assert set(CLASSES_BY_FILE.values()) < set(CLASSES)
    # Each file has kernels.
    assert set(own_kernels().values()) == set(CLASSES_BY_FILE.values())


def test_operations_and_phases_decide_for_elementwise_kernels():
    attention = "autograd::engine::evaluate_function: _AttentionBackward"
    for operation, kind in {
        "autograd::engine::evaluate_function: _LinearCrossEntropyBackward": "loss",
        "_Update": "position update",
        "autograd::engine::evaluate_function: _CompactUpdateBackward": "position update",
        "_RotatedAndJoined": "rotation",
        "autograd::engine::evaluate_function: _SplitBackward": "rotation",
        "autograd::engine::evaluate_function: SplitBackward0": "other elementwise",
        "aten::unsafe_split": "other elementwise",
        attention: "attention",
        "aten::_fused_rms_norm_backward": "norms",
        "_SwiGLU": "activation",
        "MulBackward0": "other elementwise",
    }.items():
        assert kernel_class(ELEMENTWISE, "backward", [operation, "aten::mul"]) == kind
    # The innermost operation decides.
    assert kernel_class(ELEMENTWISE, "backward", [attention, "_Update"]) == "position update"
    gemm = "sm90_xmma_gemm_bf16bf16"
    assert kernel_class(gemm, "forward", ["_LinearCrossEntropy"]) == "matrix products"
    assert kernel_class(gemm, "backward", ["_UpdateBackward"]) == "position update"
    assert kernel_class("aten::matmul", "forward", ["_TiledAttention"]) == "attention"
    # Small gradients are accumulated by the kernel that optimizers use, too.
    accumulation = "void at::native::multi_tensor_apply_kernel<...>"
    assert kernel_class(accumulation, "backward") == "gradient accumulation"
    assert kernel_class(accumulation, "optimizer") == "optimizer"
    assert kernel_class(ELEMENTWISE, "optimizer", [attention]) == "optimizer"
    assert kernel_class("ncclDevKernel_AllGather", "optimizer") == "communication"


def test_the_table_has_differences_of_tape_and_rope(trace):
    tape = analyze(trace)
    for each in trace["traceEvents"]:
        if each["name"] == "_update_backward":
            each["name"] = "_swiglu"
    rope = analyze(trace)
    differences = class_differences(tape, rope)
    assert differences["position update"] == pytest.approx(50e-6)
    assert differences["activation"] == pytest.approx(-50e-6)
    assert differences["loss"] == 0

    models = {name: {"seconds_per_step": 0.002} for name in ("tape", "rope")}
    result = {"profiles": {"tape": tape, "rope": rope}, "models": models}
    lines = list(profile_table("155m", result))
    assert lines[0] == "| 155m: ms of a step | tape | rope | tape - rope |"
    assert "| position update | 0.05 |  | 0.05 |" in lines
    assert "| GPU idle: backward | 0.06 | 0.06 | 0.00 |" in lines
    assert "| kernels, launches | 8, 7 | 8, 7 | |" in lines
    host = "5.9, 5.0, 109.5"
    title = "host: us of a launch (mean, median), until the next one"
    assert f"| {title} | {host} | {host} | |" in lines
    assert lines[-1] == "Kernels of class other, in ms: `mystery` 0.02."
    assert "| 0.020 | 1 | other | `mystery` |" in list(kernel_table(tape))
    assert list(profile_table("155m", {"models": models})) == []
