"""The table that benchmarks.train_step prints. Imports no torch."""

from collections.abc import Iterator

from benchmarks.shapes import ENCODINGS


def table(result: dict) -> list[str]:
    """Return the lines of the table of a record, as `benchmarks.step_comparison` makes it."""
    return list(_lines(result))


def _lines(result: dict) -> Iterator[str]:
    shape, run, encodings = result["shape"], result["run"], result["encodings"]
    yield (
        f"\n{shape['name']}: {shape['layers']} layers, {shape['heads']} heads x {shape['head_dim']}, "
        f"{shape['seq_length']} tokens, vocabulary {shape['vocab_size']}; {run['precision']}, "
        f"ZeRO {run['zero_stage']}, micro-batch {shape['micro_batch']} x {shape['accumulate']}, {run['device']}; "
        f"{run['processes']} process{'' if run['processes'] == 1 else 'es'}, {run['tensor_parallel']} tensor parallel"
    )
    yield f"{'':5}{'step':>11}{'tokens/s':>11}{'TFLOP/s':>9}{'MFU':>7}{'of matmul':>11}{'memory (estimate)':>22}"
    for name in ENCODINGS:
        one = encodings[name]
        memory = f"{_gib(one['memory']['peak'])} ({_gib(one['memory']['estimated_peak'])})"
        yield (
            f"{name:5}{one['seconds_per_step']:9.4f} s{one['tokens_per_second']:11,.0f}{one['tflops']:9.2f}"
            f"{_percent(one['mfu']):>7}{_percent(one['of_matmul']):>11}{memory:>22}"
        )
    for name in ENCODINGS:
        one = encodings[name]
        phases = ", ".join(f"{phase} {seconds:.4f} s" for phase, seconds in one["phases"].items())
        how = f"attention by {one['attention']}, rotation {one['rotation']}"
        if "position_update" in one:
            how += f", position update by {one['position_update']}"
        yield f"{name}: {phases}; {how}"
    rope, tape = (encodings[name]["seconds_by_block"] for name in ENCODINGS)
    if len(rope) > 1:
        blocks = ", ".join(f"{t / r:.3f}" for r, t in zip(rope, tape))
        yield f"pairs of blocks: {blocks}; RoPE's last block divided by its first: {rope[-1] / rope[0]:.3f}"
    ratios = f"TAPE / RoPE: time {result['ratio_time']:.3f}, memory {result['ratio_memory']:.3f}"
    strict = encodings["tape"]["mfu_of_rope_flops"]
    yield ratios if strict is None else f"{ratios}; TAPE's MFU by RoPE's FLOPs: {strict:.1%}"
    if "fell_back" in result:
        yield f"WARNING: TAPE was not measured with its fused kernels: {result['fell_back']}"
    for name, found in result.get("profile", {}).items():
        parts = sorted(found.get("by_part", {}).items(), key=lambda item: -item[1])
        listed = ", ".join(f"{part} {seconds:.4f} s" for part, seconds in parts)
        yield f"{name}, one profiled step: {listed or found['failed']}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
