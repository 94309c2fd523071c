"""What measured training steps say: medians, utilization of the GPU, ratios, and the table. Imports no torch."""

import statistics
from collections.abc import Iterator

from benchmarks.shapes import ENCODINGS
from megatron_tape.config.schema import ModelConfig
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count


def utilization(
    flops_per_token: int, tokens_per_second: float, gpus: int, peak: float | None, matmul: float
) -> dict[str, float | None]:
    """Return model FLOP/s per GPU in TFLOP/s, and as shares of the GPU's peak (MFU) and of a large matmul's speed."""
    flops = flops_per_token * tokens_per_second / gpus
    return {"tflops": flops / 1e12, "mfu": None if peak is None else flops / peak, "of_matmul": flops / matmul}


def summarize(result: dict, models: dict[str, ModelConfig]) -> None:
    """Add to a record what its blocks of steps so far say: a summary of each model, and ratios."""
    found = result["models"]
    for name, model in models.items():
        if own := [block for block in result["blocks"] if block["model"] == name and block["seconds"]]:
            found[name] = _summary(result, model, own)
    rope, tape = (found.get(encoding) for encoding in ENCODINGS)
    if rope and tape:
        tape["mfu_of_rope_flops"] = tape["mfu"] and tape["mfu"] * rope["flops_per_token"] / tape["flops_per_token"]
        result["ratio_time"] = _ratio(result, "tape", "rope")
        if rope["memory"] and tape["memory"]:
            result["ratio_memory"] = tape["memory"]["peak"] / rope["memory"]["peak"]
    if rivals := [name for name in found if name not in ENCODINGS]:
        fastest = min(rivals, key=lambda name: found[name]["seconds_per_step"])
        result["fastest_rival"] = fastest
        result["ratios_to_fastest_rival"] = {name: _ratio(result, name, fastest) for name in found}


def _ratio(result: dict, name: str, other: str) -> float:
    """Divide the seconds of steps: of the same turn if they alternate, so that a busy machine delays both."""
    if result["run"]["order"] != "alternate":
        return result["models"][name]["seconds_per_step"] / result["models"][other]["seconds_per_step"]
    taken = {block["model"]: block["seconds"] for block in result["blocks"]}
    return statistics.median(own / others for own, others in zip(taken[name], taken[other]))


def _summary(result: dict, model: ModelConfig, blocks: list[dict]) -> dict:
    all_seconds = [seconds for block in blocks for seconds in block["seconds"]]
    seconds, run = statistics.median(all_seconds), result["run"]
    speed, flops = run["tokens_per_step"] / seconds, flops_per_token(model)
    memory = [block["memory"] for block in blocks if block["memory"]]
    return {
        **{key: value for key, value in blocks[0].items() if isinstance(value, str) and key != "model"},
        "seconds_per_step": seconds,
        "seconds_by_block": [statistics.median(block["seconds"]) for block in blocks],
        "tokens_per_second": speed,
        **utilization(flops, speed, run["processes"], result["peak_flops"], result["matmul_flops"]),
        "memory": {key: max(peaks[key] for peaks in memory) for key in memory[0]} if memory else {},
        "parameters": parameter_count(model),
        "flops_per_token": flops,
    }


def table(result: dict) -> Iterator[str]:
    """Yield the lines of the table of a record, as `benchmarks.step_comparison` makes it."""
    shape, run, models = result["shape"], result["run"], result["models"]
    yield (
        f"\n{shape['name']}: {shape['layers']} layers, {shape['heads']} heads x {shape['head_dim']}, "
        f"{shape['seq_length']} tokens, vocabulary {shape['vocab_size']}; {run['precision']}, "
        f"ZeRO {run['zero_stage']}, micro-batch {shape['micro_batch']} x {shape['accumulate']}, {run['device']}; "
        f"{run['processes']} process{'' if run['processes'] == 1 else 'es'}, {run['tensor_parallel']} tensor parallel"
    )
    yield f"{'':18}{'step':>11}{'tokens/s':>11}{'TFLOP/s':>9}{'MFU':>7}{'of matmul':>11}{'memory (estimate)':>22}"
    for name, one in models.items():
        memory = _gib(one["memory"]["peak"])
        if "estimated_peak" in one["memory"]:
            memory += f" ({_gib(one['memory']['estimated_peak'])})"
        yield (
            f"{name:18}{one['seconds_per_step']:9.4f} s{one['tokens_per_second']:11,.0f}{one['tflops']:9.2f}"
            f"{_percent(one['mfu']):>7}{_percent(one['of_matmul']):>11}{memory:>22}"
        )
    for name in ENCODINGS:
        one = models[name]
        update = f", position update by {one['position_update']}" if "position_update" in one else ""
        yield f"{name}: attention by {one['attention']}{update}"
    rope, tape = (models[name]["seconds_by_block"] for name in ENCODINGS)
    if len(rope) > 1:
        blocks = ", ".join(f"{t / r:.3f}" for r, t in zip(rope, tape))
        yield f"pairs of blocks: {blocks}; RoPE's last block divided by its first: {rope[-1] / rope[0]:.3f}"
    ratios = f"TAPE / RoPE: time {result['ratio_time']:.3f}, memory {result['ratio_memory']:.3f}"
    strict = models["tape"]["mfu_of_rope_flops"]
    yield ratios if strict is None else f"{ratios}; TAPE's MFU by RoPE's FLOPs: {strict:.1%}"
    if "fastest_rival" in result:
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in result["ratios_to_fastest_rival"].items())
        yield f"time, as a multiple of {result['fastest_rival']}, the faster of what one would train instead: {ratios}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
