"""What a GPU trial learned, in ten lines and in tables; imports no torch.

The input is the record of `benchmarks.gpu_trial`: how each stage ended and, by the stage's name, its own results. Any
part of it may be missing, because a stage failed or its time was over.
"""

from collections.abc import Iterator

STEPS = {"step-155m": "155M at 1,024 tokens", "step-1.3b": "1.3B at 4,096 tokens"}
ATTENTION = ("12x64@1024", "16x128@4096", "32x128@8192")
"""Shapes of attention that are timed on a GPU; each has one of the ten lines."""
NOT_BEGUN = ("skipped", "not run")
DIRECTIONS = ("forward", "forward+backward")
RATIO_GOALS = {"step-155m": 1.10}
"""Most that a step of TAPE may take, as a multiple of RoPE's (docs/gpu.md)."""
MFU_GOALS = {"step-1.3b": {"rope": 0.45, "tape": 0.40}}
"""Least model FLOPs utilization (docs/gpu.md)."""


def summary(record: dict) -> list[str]:
    """Return the lines of summary.md: the ten lines, and then the tables."""
    found, toy = _found(record), toy_size(record)
    lines = ["# GPU trial", ""]
    if toy:
        lines += ["**No GPU: toy size on a CPU. The figures say nothing about a GPU.**", ""]
    elif toy is None:
        lines += ["**It is unknown which machine this was.**", ""]
    lines += [f"{number}. {line}" for number, line in enumerate(learned(record), 1)]
    origin = record["trial"]
    lines += ["", f"Commit {origin['commit']}, {origin['date']}: `{origin['command']}`"]
    attention = attention_table(found.get("attention", {}).get("results", []))
    for table in (_stages(record), _cases(found), attention, _steps(found), _training(found), _pretraining(found)):
        if rows := list(table):
            lines += ["", *rows]
    return lines


def learned(record: dict) -> list[str]:
    """Return the ten lines that say what was learned."""
    found, toy = _found(record), toy_size(record)
    grouped: dict[str, list[str]] = {}
    for where, why in _problems(record):
        grouped.setdefault(why, []).append(where)
    wrong = [f"{_listed(places)}: {why}" for why, places in grouped.items()]
    lines = [_machine(found), f"Wrong: {'; '.join(wrong)}" if wrong else "Nothing that ran was wrong."]
    lines += [_compiled(found, toy), _correct(found, toy)]
    lines += [_attention(record, i) for i in range(len(ATTENTION))]
    lines += [_step(record, stage) for stage in STEPS]
    return [*lines, _trained(found)]


def problems(record: dict) -> list[str]:
    """Return what is wrong: stages that did not end well, and results that are not what they should be."""
    return [f"{where}: {why}" for where, why in _problems(record)]


def _problems(record: dict) -> Iterator[tuple[str, str]]:
    """Yield where something is wrong, and what."""
    stages = record["stages"]
    if all(stage["status"] in NOT_BEGUN for stage in stages.values()):
        yield "nothing ran", next(iter(stages.values()))["reason"]
    for name, stage in stages.items():
        if stage["status"] not in ("done", *NOT_BEGUN):
            yield name, f"{stage['status']} ({stage.get('reason', 'no reason is known')})"
        results = stage.get("results", {})
        yield from ((f"{name} of {_case(case)}", why) for case in results.get("cases", []) if (why := _fault(case)))
        for result in results.get("results", []):
            yield from ((f"{result['shape']} {c}", why) for c, why in result["rejected"].items() if " " in c)
        yield from ((f"{rival} in {name}", why) for rival, why in results.get("rejected_rivals", {}).items())
        yield from ((test, how) for test, how in results.get("tests", {}).items() if how.startswith("failed"))


def toy_size(record: dict) -> bool | None:
    """Return whether stages ran at toy size on a CPU; None if no stage recorded it."""
    for results in _found(record).values():
        if arguments := results.get("arguments"):
            return arguments.get("toy", False) or arguments.get("shape") == "toy"
    return None


def _found(record: dict) -> dict[str, dict]:
    """Return the results of each stage by its name."""
    return {name: stage.get("results", {}) for name, stage in record["stages"].items()}


def _why_not(record: dict, name: str) -> str:
    """Say why a stage has no result."""
    stage = record["stages"].get(name, {"status": "was not asked for"})
    if stage["status"] == "done":
        return "not measured: there was no time left"
    return f"not measured: stage {stage['status']}" + (f" ({stage['reason']})" if "reason" in stage else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _machine(found: dict) -> str:
    origin = next((each["environment"] for each in found.values() if "environment" in each), None)
    if origin is None:
        return "Machine: unknown"
    parts = [" + ".join(origin["gpus"]) or origin["cpu"], f"Python {origin['python']}"]
    parts += [f"{name} {origin['packages'].get(name, 'missing')}" for name in ("torch", "triton")]
    parts += origin["gpu_software"].values()
    rates = found.get("machine", {})
    if "matmul_flops" in rates:
        parts.append(f"matrix product {rates['matmul_flops'] / 1e12:,.1f} TFLOP/s")
    if "copy_bytes_per_second" in rates:
        parts.append(f"copy {rates['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    return f"Machine: {', '.join(parts)}"


def _case(case: dict) -> str:
    return f"{case['shape']} {case['name']} at {case['length']} tokens"


def _fault(case: dict) -> str | None:
    return case.get("error") or "; ".join(case.get("inexact", [])) or None


def _compiled(found: dict, toy: bool | None) -> str:
    stage = found.get("compile", {})
    if not (cases := stage.get("cases")):
        return "Kernels: none were compiled"
    slowest = max(cases, key=lambda case: case.get("seconds", 0))
    good = sum(_fault(case) is None for case in cases)
    longest = f"the longest took {slowest.get('seconds', 0):.0f} s ({slowest['shape']} {slowest['name']})"
    how = "run in fp32, interpreted" if toy else "compile and run"
    return f"Kernels: {good} of {stage['planned']} {how}; {longest}"


def _correct(found: dict, toy: bool | None) -> str:
    stage = found.get("correctness", {})
    if not (cases := stage.get("cases")):
        return "Correctness: not checked"
    wrong = [_case(case) for case in cases if _fault(case)]
    good = f"Correctness: {len(cases) - len(wrong)} of {stage['planned']} cases are as exact as plain torch"
    return good + (" in fp32, interpreted" if toy else "") + (f"; not these: {_listed(wrong)}" if wrong else "")


def _attention(record: dict, number: int) -> str:
    """Say which backends are fastest for one shape of attention, what TAPE costs, and what `auto` takes."""
    results, toy = _found(record).get("attention", {}).get("results", []), toy_size(record)
    if number >= len(results):
        why = "not measured at toy size" if toy and results else _why_not(record, "attention")
        return f"Attention {ATTENTION[number]}: {why}"
    result = results[number]
    shape = f"Attention {result['shape']}{' in fp32' if toy else ''}"
    direction = next((each for each in reversed(DIRECTIONS) if result["timed"].get(each)), None)
    if direction is None:
        ended = record["stages"]["attention"]["status"] == "done"
        causes = [f"{name} {why}" for name, why in _not_timed(result).items()][:4]
        return f"{shape}: {'; '.join(['not measured', *causes] if ended else [_why_not(record, 'attention')])}"
    timings = result["timed"][direction]
    tape, rope = (fastest(timings, encoding) for encoding in ("tape", "rope"))
    ratio = f": {timings[tape]['seconds'] / timings[rope]['seconds']:.2f} times" if tape and rope else ""
    auto = " and ".join(_taken(name, timings) for name in map(result["auto"].get, ("tape", "rope")))
    return (
        f"{shape}, {direction.replace('+', ' + ')}: fastest for TAPE is {_taken(tape, timings)}, "
        f"for RoPE {_taken(rope, timings)}{ratio}; auto takes {auto}"
    )


def _taken(name: str | None, timings: dict) -> str:
    """Return the backend of a candidate, with its time."""
    if name is None:
        return "none"
    seconds = timings.get(name, {}).get("seconds")
    return f"{name.split()[1]} ({'not timed' if seconds is None else f'{1e3 * seconds:.3f} ms'})"


def fastest(timings: dict[str, dict], encoding: str) -> str | None:
    """Return the fastest candidate of an encoding, or None if none was timed."""
    timed = [name for name, timing in timings.items() if "seconds" in timing and name.startswith(encoding)]
    return min(timed, key=lambda name: timings[name]["seconds"], default=None)


def _step(record: dict, stage: str) -> str:
    """Say what a training step takes, and whether the goals are met."""
    result, toy = _found(record).get(stage, {}), toy_size(record)
    models, shape = result.get("models", {}), result.get("shape")
    name = "the toy model" if toy else STEPS[stage]
    if toy and shape:
        size = f"{shape['layers']} layers, {shape['heads']}x{shape['head_dim']}, {shape['seq_length']} tokens"
        name += f" ({size}, {result['run']['precision']})"
    parts = []
    if "ratio_time" in result:
        ratio, goal = result["ratio_time"], RATIO_GOALS.get(stage)
        met = f" (goal {goal:.2f}: {_met(ratio <= goal)})" if goal and not toy else ""
        parts.append(f"TAPE takes {ratio:.3f} times as long as RoPE{met}")
        if rival := result.get("fastest_rival"):
            parts.append(f"RoPE {result['ratios_to_fastest_rival']['rope']:.3f} times {rival}")
    for encoding in ("tape", "rope"):
        if model := models.get(encoding):
            mfu, goal = model.get("mfu"), MFU_GOALS.get(stage, {}).get(encoding)
            share = f", MFU {mfu:.1%}" if mfu else ""
            share += f" (goal {goal:.0%}: {_met(mfu >= goal)})" if mfu and goal and not toy else ""
            parts.append(f"{encoding} by {model['attention']}: {model['tokens_per_second']:,.0f} tokens/s{share}")
    return f"A step of {name}: {'; '.join(parts) or _why_not(record, stage)}"


def _met(goal: bool) -> str:
    return "met" if goal else "missed"


def _trained(found: dict) -> str:
    tests, models = found.get("training", {}).get("tests"), found.get("pretraining", {}).get("models", {})
    line = "Training: not compared with the CPU"
    if tests:
        passed = sum(how == "passed" for how in tests.values())
        skipped = [how for how in tests.values() if how.startswith("skipped")]
        line = f"Training: {passed} of {len(tests) - len(skipped)} tests agree with the CPU"
        if skipped:
            line = "Training:" if len(skipped) == len(tests) else f"{line};"
            line += f" {len(skipped)} skipped ({skipped[0].removeprefix('skipped: ')})"
    if models:
        after = ", ".join(
            f"{name} " + " / ".join(f"{loss:.3f}" for loss in model["lengths"].values())
            for name, model in models.items()
            if model["lengths"]
        )
        line += f"; losses after pretraining, at 1 / 2 / 4 times the length: {after or 'not evaluated'}"
    return line


def _stages(record: dict) -> Iterator[str]:
    yield "| stage | ended | seconds | |"
    yield "|---|---|--:|---|"
    for name, stage in record["stages"].items():
        yield f"| {name} | {stage['status']} | {stage['seconds']:.0f} | {stage.get('reason', '')} |"


def _cases(found: dict) -> Iterator[str]:
    """Yield errors as shares of the allowed ones, by kernel and shape."""
    cases = found.get("correctness", {}).get("cases", [])
    columns = list(dict.fromkeys(f"{case['shape']}@{case['length']}" for case in sorted(cases, key=_case)))
    if cases:
        yield "| error / allowed error | " + " | ".join(columns) + " |"
        yield "|---" + "|--:" * len(columns) + "|"
    for name in dict.fromkeys(case["name"] for case in sorted(cases, key=_case)):
        of = {f"{case['shape']}@{case['length']}": case for case in cases if case["name"] == name}
        yield f"| {name} | " + " | ".join(_worst(of.get(column)) for column in columns) + " |"


def _worst(case: dict | None) -> str:
    if case is None:
        return ""
    if "error" in case:
        return "**fails**"
    if case["worst"] is None:
        return "**NaN**"
    return f"**{case['worst']:.2f}**" if case["inexact"] else f"{case['worst']:.2f}"


def attention_table(results: list[dict]) -> Iterator[str]:
    """Yield the lines of a table of the results of `benchmarks.attention`."""
    rows = []
    for result in results:
        both = [result["timed"].get(direction, {}) for direction in DIRECTIONS]
        for name in sorted({name for timings in both for name in timings}):
            cells = [_timing(timings.get(name)) for timings in both]
            rows.append(f"| {result['shape']} | {name} | {' | '.join(cells)} |")
        rows += [f"| {result['shape']} | {name} | {why} | |" for name, why in _not_timed(result).items()]
    if rows:
        yield "| attention | | forward: ms, TFLOP/s, over RoPE's fastest | forward + backward |"
        yield "|---|---|---|---|"
        yield from rows


def _not_timed(result: dict) -> dict[str, str]:
    return dict.fromkeys(result["no_time"], "had no time left") | result["rejected"]


def _timing(timing: dict | None) -> str:
    if timing is None:
        return ""
    if "seconds" not in timing:
        return "exact, not timed"
    return f"{1e3 * timing['seconds']:.3f}, {timing['tflops']:,.1f}, {timing.get('ratio', float('nan')):.2f}"


def _steps(found: dict) -> Iterator[str]:
    rows = []
    for stage in STEPS:
        for name, model in found.get(stage, {}).get("models", {}).items():
            mfu, strict = (f"{model[key]:.1%}" if model.get(key) else "" for key in ("mfu", "mfu_of_rope_flops"))
            memory = f"{model['memory']['peak'] / 2**30:.1f}" if model.get("memory") else ""
            cells = [stage, name, model.get("attention", ""), f"{model['seconds_per_step']:.4f}"]
            cells += [f"{model['tokens_per_second']:,.0f}", mfu, strict, f"{model['of_matmul']:.1%}", memory]
            rows.append(f"| {' | '.join(cells)} |")
    if rows:
        yield "| step | | attention | seconds | tokens/s | MFU | MFU by RoPE's FLOPs | of a matmul | GiB |"
        yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
        yield from rows


def _training(found: dict) -> Iterator[str]:
    tests = found.get("training", {}).get("tests", {})
    if tests:
        yield "| training | |"
        yield "|---|---|"
        yield from (f"| {test} | {how} |" for test, how in tests.items())


def _pretraining(found: dict) -> Iterator[str]:
    models = found.get("pretraining", {}).get("models", {})
    if not models:
        return
    curves = {name: {row["step"]: row for row in model["curve"]} for name, model in models.items()}
    steps = sorted({step for curve in curves.values() for step, row in curve.items() if "validation_loss" in row})
    lengths = list(dict.fromkeys(length for model in models.values() for length in model["lengths"]))
    yield "| pretraining | " + " | ".join(models) + " |"
    yield "|---" + "|--:" * len(models) + "|"
    for step in steps[:: max(1, len(steps) // 10)]:
        losses = (curve.get(step, {}).get("validation_loss") for curve in curves.values())
        yield f"| validation loss at step {step} | {_losses(losses)} |"
    for length in lengths:
        yield f"| loss at {length} tokens | {_losses(model['lengths'].get(length) for model in models.values())} |"


def _losses(losses: Iterator[float | None]) -> str:
    return " | ".join("" if loss is None else f"{loss:.4f}" for loss in losses)
