"""Markdown tables of benchmark results, for the benchmarks and the summary of a GPU trial. Does not
import torch.
"""

from collections.abc import Iterator

from benchmarks.trace_analysis import CLASSES

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


def results_by_batch(label: str, result: dict) -> dict[str, dict]:
    """Return the result of `benchmarks.train_step` and those of its further batches, by label.

    `label` is that of the first one. Batches that failed have no figures and are left out.
    """
    results = {label: result}
    for batch, other in result.get("batches", {}).items():
        if "ratio_time" in other:
            results[f"{label} {batch}"] = other
    return results


def profile_table(label: str, result: dict) -> Iterator[str]:
    """Yield the lines of a table of where the time of one step goes, in ms, by model. There are no
    lines without profiles.

    `result` is one of `benchmarks.train_step`, and its `profiles` are of
    `trace_analysis.analyze`. The last column is TAPE's time minus RoPE's.
    """
    profiles = result.get("profiles", {})
    if not profiles:
        return
    names = list(profiles)
    records = list(profiles.values())

    def row(title: str, times: list[float | None]) -> str:
        """Return a row of times in seconds by model. The cell of None, which counts as 0, is
        empty.
        """
        cells = [title]
        cells += ["" if time is None else f"{1e3 * time:.2f}" for time in times]
        difference = ""
        if {"tape", "rope"} <= profiles.keys():
            seconds = dict(zip(names, times))
            difference = f"{1e3 * ((seconds['tape'] or 0) - (seconds['rope'] or 0)):.2f}"
        return f"| {' | '.join([*cells, difference])} |"

    yield f"| {label}: ms of a step | {' | '.join(names)} | tape - rope |"
    yield "|---" + "|--:" * (len(names) + 1) + "|"
    for kind in CLASSES:
        times = [record["seconds_by_class"].get(kind) for record in records]
        if any(times):
            yield row(kind, times)
    yield row("sum of kernels", [sum(record["seconds_by_class"].values()) for record in records])

    yield row("GPU busy", [record["busy_seconds"] for record in records])
    phases = dict.fromkeys(phase for record in records for phase in record["idle_seconds"])
    for phase in phases:
        times = [record["idle_seconds"].get(phase) for record in records]
        if any(times):
            yield row(f"GPU idle: {phase}", times)
    yield row("profiled step", [record["seconds"] for record in records])
    models = result["models"]
    yield row("timed step", [models[name]["seconds_per_step"] for name in names])

    numbers = " | ".join(f"{record['kernels']:,}, {record['launches']:,}" for record in records)
    yield f"| kernels, launches | {numbers} | |"
    host = []
    for record in records:
        keys = ("launch_seconds", "launch_median_seconds", "launch_gap_seconds")
        times = [record.get(key) for key in keys]
        host.append(", ".join("-" if time is None else f"{1e6 * time:.1f}" for time in times))
    yield f"| host: us of a launch (mean, median), until the next one | {' | '.join(host)} | |"

    unknown = {}
    for record in records:
        for kernel in record["unknown_kernels"]:
            unknown[kernel["name"]] = f"`{kernel['name']}` {1e3 * kernel['seconds']:.2f}"
    if unknown:
        yield ""
        yield f"Kernels of class other, in ms: {', '.join(unknown.values())}."


def kernel_table(profile: dict) -> Iterator[str]:
    """Yield the lines of a table of the kernels that took the most time. `profile` is a record of
    `trace_analysis.analyze`.
    """
    yield "| ms of a step | kernels | class | name |"
    yield "|--:|--:|---|---|"
    for kernel in profile["largest_kernels"]:
        milliseconds = f"{1e3 * kernel['seconds']:.3f}"
        yield f"| {milliseconds} | {kernel['number']} | {kernel['class']} | `{kernel['name']}` |"


def _percent_cell(share: float | None) -> str:
    """Return a cell, which is empty if the share is not known."""
    if share is None:
        return ""
    return f"{share:.1%}"
