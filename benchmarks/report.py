"""The table of goals met and missed that `benchmarks.check_gpu` prints, in Markdown. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.goals import GOALS, SLICES, TARGETS, Goal, numbers
from benchmarks.machine import DONE, Machine, Outcome

Record = dict[str, Any]
WORDS = {True: "yes", False: "**no**", None: "so far"}


def table(machine: Machine, outcomes: Mapping[str, Outcome], files: Mapping[str, Path]) -> list[str]:
    """Return the goals met and missed, and the figures behind them; `files` are the slices' results by name."""
    records = {name: record for name, path in files.items() if (record := read_results(path)) is not None}
    parts = (
        _heading(machine, records),
        _goals(machine, outcomes, records),
        _slices(machine, outcomes, records),
        _steps(records),
    )
    return "\n\n".join("\n".join(lines) for lines in parts).strip().splitlines()


def read_results(path: Path) -> Record | None:
    """Return a slice's record; of JUnit's report, the names of all `tests` and of those that `failed`.

    None if there are no results, or damaged ones.
    """
    try:
        if path.suffix == ".json":
            record = json.loads(path.read_text(encoding="utf-8"))
            return record if isinstance(record, dict) else None
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ValueError, ElementTree.ParseError):
        return None
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    ran = [case.get("name") for case in cases if case.find("skipped") is None]
    return {"tests": ran, "failed": list(dict.fromkeys(failed))}


def _heading(machine: Machine, records: Mapping[str, Record]) -> Iterator[str]:
    yield "# No GPU" if machine.toy else f"# {len(machine.gpus)} x {machine.gpus[0]}"
    yield ""
    origins = [record["environment"] for record in records.values() if isinstance(record.get("environment"), dict)]
    commits = sorted({str(origin.get("commit")) for origin in origins})
    dates = sorted(str(origin.get("date")) for origin in origins)
    versions = ", ".join([f"Python {machine.python}", *machine.versions(), *machine.gpu_software.values()])
    yield f"{versions}; {f'{dates[0]} to {dates[-1]}; ' if dates else ''}commit {', '.join(commits) or 'unknown'}"
    if machine.toy:
        yield ""
        yield "**Toy size on a CPU: this shows that the code runs. No figure here says anything about a GPU.**"


def _goals(machine: Machine, outcomes: Mapping[str, Outcome], records: Mapping[str, Record]) -> Iterator[str]:
    yield "| goal | of the slice | measured | met |"
    yield "|---|---|---|---|"
    for goal in GOALS:
        ended = outcomes.get(goal.slice)
        measured, met = judged(goal, records.get(goal.slice, {}), ended is not None and ended.status == DONE)
        if goal.of_speed and met and machine.toy:
            met = "at toy size"
        elif goal.of_speed and met and not any(target in gpu for target in TARGETS for gpu in machine.gpus):
            met += f" (a goal for {' and '.join(TARGETS)})"
        yield f"| {goal.aim} | {goal.slice} | {measured} | {met} |"


def judged(goal: Goal, record: Record, complete: bool) -> tuple[str, str]:
    """Return what was measured, and whether it meets the goal: so far, if some of it has not been measured."""
    if not goal.of_speed:
        if not record.get("tests") and not record.get("failed"):
            return "not measured", ""
        failed = record["failed"]
        names = ", ".join(failed[:3]) + " ..." * (len(failed) > 3)
        met = False if failed else True if complete else None
        return f"not these {len(failed)}: {names}" if failed else f"all {len(record['tests'])} tests", WORDS[met]
    found = numbers(record, goal.place)
    values = [value for value in found if value is not None]
    if not values:
        return "not measured", ""
    worst = max(values) if goal.at_least is None else min(values)
    of = "" if len(values) == len(found) else f" ({len(values)} of {len(found)} shapes)"
    met = goal.met(worst) and (True if complete and len(values) == len(found) else None)
    return f"{worst:.3f} times{of}" if goal.at_least is None else f"{worst:.1%}", WORDS[met]


def _slices(machine: Machine, outcomes: Mapping[str, Outcome], records: Mapping[str, Record]) -> Iterator[str]:
    yield "| slice | outcome | seconds |"
    yield "|---|---|---|"
    for part in SLICES:
        ended = outcomes.get(part.name)
        if ended is None:
            state = "has not ended" if part.name in records else machine.why_not(part) or "not run"
            yield f"| {part.name} | {state} | |"
            continue
        elsewhere = "" if ended.gpus == machine.gpus else ", elsewhere"
        because = f": {ended.reason}" if ended.reason else ""
        yield f"| {part.name} | {ended.status}{elsewhere}{because} | {ended.seconds:.0f} |"


def _steps(records: Mapping[str, Record]) -> Iterator[str]:
    """Yield the speed of training steps."""
    rows = []
    for name, record in records.items():
        for model, found in record.get("models", {}).items():
            mfu, strict = (_percent(found.get(key)) for key in ("mfu", "mfu_of_rope_flops"))
            memory = f"{found['memory']['peak'] / 2**30:.1f}" if found.get("memory") else ""
            speed = f"{found['tokens_per_second']:,.0f}"
            rows.append(f"| {name} | {model} | {speed} | {mfu} | {strict} | {memory} |")
    if rows:
        yield "| training step | | tokens/s | MFU | MFU counting RoPE's FLOPs alone | GiB |"
        yield "|---|---|---|---|---|---|"
        yield from rows


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
