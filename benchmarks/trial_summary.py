"""What a GPU trial learned, in ten lines and in tables; imports no torch.

The input is the record of `benchmarks.gpu_trial`: how each stage ended and, by the stage's name, its own results. Any
part of it may be missing, because a stage failed or its time was over.
"""

from collections.abc import Iterator

STEPS = {"step-155m": "155M at 1,024 tokens", "step-1.3b": "1.3B at 4,096 tokens"}
ATTENTION = 3
"""Shapes of attention that the ten lines have room for."""


def summary(record: dict) -> list[str]:
    """Return the lines of summary.md: the ten lines, and then the tables."""
    found = {name: stage.get("results", {}) for name, stage in record["stages"].items()}
    lines = ["# GPU trial", ""]
    if not _gpus(found):
        lines += ["**No GPU: toy size on a CPU. The code runs; the figures say nothing about a GPU.**", ""]
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
    found = {name: stage.get("results", {}) for name, stage in record["stages"].items()}
    wrong = problems(record)
    shapes = found.get("attention", {}).get("results", [])
    lines = [_machine(found), f"Wrong: {'; '.join(wrong)}" if wrong else "Nothing that ran was wrong."]
    lines += [_compiled(found), _correct(found)]
    lines += [_fastest(shapes[i]) if i < len(shapes) else "Attention: not measured" for i in range(ATTENTION)]
    lines += [f"A step of {name}: {_step(found.get(stage, {}))}" for stage, name in STEPS.items()]
    return [*lines, _trained(found)]


def problems(record: dict) -> list[str]:
    """Return what is wrong: stages that did not end well, and results that are not what they should be."""
    wrong = []
    for name, stage in record["stages"].items():
        if stage["status"] not in ("done", "skipped"):
            wrong.append(f"{name} {stage['status']} ({stage.get('reason', 'no reason is known')})")
        results = stage.get("results", {})
        wrong += [f"{name} of {_case(case)}: {why}" for case in results.get("cases", []) if (why := _fault(case))]
        for result in results.get("results", []):
            wrong += [f"{result['shape']} {c}: {why}" for c, why in result["rejected"].items() if " " in c]
        wrong += [f"{rival} in {name}: {why}" for rival, why in results.get("rejected_rivals", {}).items()]
        wrong += [f"{test}: {how}" for test, how in results.get("tests", {}).items() if how.startswith("failed")]
    return wrong


def _gpus(found: dict) -> list[str]:
    return next((gpus for each in found.values() if (gpus := each.get("environment", {}).get("gpus"))), [])


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


def _compiled(found: dict) -> str:
    stage = found.get("compile", {})
    if not (cases := stage.get("cases")):
        return "Kernels: none were compiled"
    slowest = max(cases, key=lambda case: case.get("seconds", 0))
    good = sum(_fault(case) is None for case in cases)
    longest = f"the longest took {slowest.get('seconds', 0):.0f} s ({slowest['shape']} {slowest['name']})"
    return f"Kernels: {good} of {stage['planned']} compile and run; {longest}"


def _correct(found: dict) -> str:
    stage = found.get("correctness", {})
    if not (cases := stage.get("cases")):
        return "Correctness: not checked"
    wrong = [_case(case) for case in cases if _fault(case)]
    good = f"Correctness: {len(cases) - len(wrong)} of {stage['planned']} cases are as exact as plain torch"
    return good + (f"; not these: {', '.join(wrong[:4])}{' ...' * (len(wrong) > 4)}" if wrong else "")


def _fastest(result: dict) -> str:
    """Say which backends are fastest for one shape of attention, and what TAPE costs."""
    parts = []
    for direction in result["timed"]:
        if of_rope := result["of_rope"].get(direction):
            tape, rope = (result["timed"][direction][of_rope[name]] for name in ("tape", "rope"))
            parts.append(
                f"{direction} {of_rope['tape']} {_speed(tape)}, {of_rope['rope']} {_speed(rope)}, "
                f"ratio {of_rope['ratio']:.2f}"
            )
    return f"Attention {result['shape']}: {'; '.join(parts) or 'nothing was timed'}"


def _speed(timing: dict) -> str:
    return f"{1e3 * timing['seconds']:.3f} ms ({timing['tflops']:,.1f} TFLOP/s)"


def _step(result: dict) -> str:
    models = result.get("models", {})
    parts = []
    if "ratio_time" in result:
        parts.append(f"TAPE takes {result['ratio_time']:.3f} times as long as RoPE")
        if rival := result.get("fastest_rival"):
            ratios = result["ratios_to_fastest_rival"]
            parts.append(f"RoPE {ratios['rope']:.3f} times {rival}")
    for name in ("tape", "rope"):
        if name in models:
            model = models[name]
            mfu = f", MFU {model['mfu']:.1%}" if model.get("mfu") else ""
            parts.append(f"{name} by {model['attention']}: {model['tokens_per_second']:,.0f} tokens/s{mfu}")
    return "; ".join(parts) or "not measured"


def _trained(found: dict) -> str:
    tests, models = found.get("training", {}).get("tests"), found.get("pretraining", {}).get("models", {})
    line = "Training: not compared with the CPU"
    if tests:
        passed = sum(how == "passed" for how in tests.values())
        line = f"Training: {passed} of {len(tests)} tests agree with the CPU"
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
        both = result["timed"]
        for name in sorted({name for timings in both.values() for name in timings}):
            cells = [_timing(timings.get(name)) for timings in both.values()]
            rows.append(f"| {result['shape']} | {name} | {' | '.join(cells)} |")
        rows += [f"| {result['shape']} | {name} | {why} | |" for name, why in result["rejected"].items()]
    if rows:
        yield "| attention | | forward: ms, TFLOP/s, over RoPE's fastest | forward + backward |"
        yield "|---|---|---|---|"
        yield from rows


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
