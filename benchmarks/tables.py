"""Markdown tables of benchmark results, for the benchmarks and the summary of a GPU trial. Does not
import torch.
"""

from collections.abc import Iterator

DIRECTIONS = ("forward", "forward+backward")


def attention_table(results: list[dict]) -> Iterator[str]:
    """Yield the lines of a table with one row for each candidate at each shape. There are no lines
    without results.

    `results` are those of `benchmarks.attention.measure`, one for each shape.
    """
    rows = []
    for result in results:
        timings_by_direction = [result["timed"].get(direction, {}) for direction in DIRECTIONS]
        for name in sorted({name for timings in timings_by_direction for name in timings}):
            cells = [_timing_cell(timings.get(name)) for timings in timings_by_direction]
            auto = " (auto)" if name in result["auto"].values() else ""
            rows.append(f"| {result['shape']} | {name}{auto} | {' | '.join(cells)} |")
        missing = dict.fromkeys(result["no_time"], "out of time") | result["rejected"]
        rows += [f"| {result['shape']} | {name} | {why} | |" for name, why in missing.items()]
    if rows:
        yield "| shape | candidate | forward: ms, TFLOP/s, time / RoPE's | forward + backward |"
        yield "|---|---|---|---|"
        yield from rows


def _timing_cell(timing: dict | None) -> str:
    """Return a cell: milliseconds, TFLOP/s and the ratio to RoPE; "" if `timing` is None, which it
    is for a candidate that failed.
    """
    if timing is None:
        return ""
    # A kernel that Triton interprets has no time.
    if "seconds" not in timing:
        return "exact, not timed"
    return (
        f"{1e3 * timing['seconds']:.3f}, {timing['tflops']:,.1f},"
        f" {timing.get('ratio', float('nan')):.2f}"
    )


def step_table(results: dict[str, dict]) -> Iterator[str]:
    """Yield the lines of a table of results of `benchmarks.train_step`, one row per model.

    The keys of `results` are the first column. Results without models have no rows. `of_matmul` is
    the share of the speed of a large matrix product, and `mfu_of_rope_flops` the MFU if only RoPE's
    FLOPs are counted; both are None or absent if they are not known.
    """
    rows = []
    for label, result in results.items():
        for name, model in result.get("models", {}).items():
            memory = model["memory"]
            # Transformers' Llama, which is measured as a baseline, has no estimate.
            peaks = [memory[key] for key in ("peak", "estimated_peak") if key in memory]
            cells = [
                label,
                name,
                model.get("attention", ""),
                f"{model['seconds_per_step']:.4f}",
                f"{model['tokens_per_second']:,.0f}",
                _percent_cell(model.get("mfu")),
                _percent_cell(model.get("mfu_of_rope_flops")),
                _percent_cell(model["of_matmul"]),
                " / ".join(f"{peak / 2**30:.2f}" for peak in peaks),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    if rows:
        yield (
            "| shape | model | attention | s/step | tokens/s | MFU | MFU by RoPE FLOPs | of matmul"
            " | GiB / estimate |"
        )
        yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
        yield from rows


def _percent_cell(share: float | None) -> str:
    """Return a cell, which is empty if the share is not known."""
    if share is None:
        return ""
    return f"{share:.1%}"
