"""The goals of `benchmarks.check_gpu`, and the tables of what its results say. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.slices import DONE, SLICES, Machine

Record = dict[str, Any]

TARGETS = ("H100", "H200")
"""GPUs that the goals for speed were set for."""
WORDS = {True: "yes", False: "**no**", None: "so far"}


@dataclass(frozen=True)
class Goal:
    """What one slice's record should show."""

    slice: str
    aim: str
    read: Callable[[Record], Any]
    """Returns the measured value; raises KeyError, TypeError or ValueError if the record does not hold it."""
    met: Callable[[Any], bool | None]
    """Whether the value meets the goal; None: it does so far, but something has not been measured."""
    shown: Callable[[Any], str]
    of_speed: bool = True


def _at_most(limit: float) -> dict[str, Callable]:
    return {"met": lambda value: value <= limit, "shown": "{:.3f} times".format}


def _share(limit: float) -> dict[str, Callable]:
    return {"met": lambda value: value >= limit, "shown": "{:.1%}".format}


def _none_wrong(failures: list[str]) -> str:
    return (
        "all" if not failures else f"not these {len(failures)}: {', '.join(failures[:3])}{' ...' * (len(failures) > 3)}"
    )


def _all_right() -> dict[str, Any]:
    return {"met": lambda failures: not failures, "shown": _none_wrong, "of_speed": False}


def _checks_that_failed(record: Record) -> list[str]:
    """Return the names of the checks in a record that did not pass, and of what was not checked.

    Raises ValueError if the record holds no checks.
    """
    if not record["checks"]:
        raise ValueError("no check has been made")
    failed = [
        ": ".join(filter(None, (check.get("unit"), check["name"]))) for check in record["checks"] if not check["passed"]
    ]
    return failed + [
        f"{name} is {state}" for name, state in record.get("units", {}).items() if not state.startswith("done")
    ]


def _ratio(record: Record) -> float:
    return float(record["ratio_time"])


@dataclass(frozen=True)
class _Worst:
    """The largest ratio of several shapes, of which some may lack one: time ran out, or nothing exact was left."""

    ratio: float
    measured: int
    shapes: int

    def __str__(self) -> str:
        where = "" if self.measured == self.shapes else f" ({self.measured} of {self.shapes} shapes)"
        return f"{self.ratio:.3f} times{where}"


def _worst_shape(record: Record) -> _Worst:
    """Return the largest ratio to RoPE's attention. Raises ValueError if there is none."""
    ratios = [float(result["of_rope"]["ratio"]) for result in record["results"] if "of_rope" in result]
    return _Worst(max(ratios), len(ratios), len(record["results"]))


def _in_every_shape(limit: float) -> Callable[[_Worst], bool | None]:
    return lambda worst: worst.ratio <= limit and (True if worst.measured == worst.shapes else None)


def _mfu(encoding: str) -> Callable[[Record], float]:
    return lambda record: float(record["encodings"][encoding]["mfu"])


GOALS = (
    Goal("kernels", "every fused kernel compiles and is exact", _checks_that_failed, **_all_right()),
    Goal("training", "20 steps of TAPE and RoPE agree with the CPU's", _checks_that_failed, **_all_right()),
    Goal("step-155m-1k", "TAPE's step takes at most 1.10 times RoPE's", _ratio, **_at_most(1.1)),
    Goal("step-7b-8k", "TAPE's step takes at most 1.15 times RoPE's", _ratio, **_at_most(1.15)),
    Goal("step-1.3b-4k", "MFU of RoPE is at least 45 %", _mfu("rope"), **_share(0.45)),
    Goal("step-1.3b-4k", "MFU of TAPE is at least 40 %", _mfu("tape"), **_share(0.40)),
    Goal(
        "attention",
        "forward and backward take at most 1.5 times the fastest RoPE, in every shape",
        _worst_shape,
        _in_every_shape(1.5),
        str,
    ),
)


def table(results: dict[str, Record], machine: Machine) -> list[str]:
    """Return the goals met and missed, and the figures behind them, in Markdown."""
    parts = _heading(results, machine), _goals(results, machine), _slices(results, machine), _steps(results)
    return "\n\n".join("\n".join(lines) for lines in parts).strip().splitlines()


def _heading(results: dict[str, Record], machine: Machine) -> Iterator[str]:
    name = f"{len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus and not machine.toy else "No GPU"
    yield f"# {name}"
    yield ""
    found = [record["environment"] for record in results.values() if "environment" in record]
    commits = sorted({str(environment.get("commit")) for environment in found})
    dates = sorted(str(environment.get("date")) for environment in found)
    versions = f"Python {machine.python}, torch {machine.torch}, triton {machine.triton}, CUDA {machine.cuda}"
    yield f"{versions}; {f'{dates[0]} to {dates[-1]}; ' if dates else ''}commit {', '.join(commits) or 'unknown'}"
    if machine.toy:
        yield ""
        yield "**Toy size on a CPU: this shows that the code runs. No figure here says anything about a GPU.**"


def _goals(results: dict[str, Record], machine: Machine) -> Iterator[str]:
    yield "| goal | of the slice | measured | met |"
    yield "|---|---|---|---|"
    for goal in GOALS:
        measured, met = "not measured", ""
        try:
            value = goal.read(results[goal.slice])
            judged = goal.met(value)
            if judged and results[goal.slice].get("outcome", {}).get("status") != DONE:
                judged = None  # the slice has not come to its end
            measured, met = goal.shown(value), WORDS[judged]
        except (KeyError, TypeError, ValueError):
            pass
        if goal.of_speed and machine.toy:
            met = "at toy size" if met else met
        elif goal.of_speed and met and not any(target in gpu for target in TARGETS for gpu in machine.gpus):
            met += f" (a goal for {' and '.join(TARGETS)})"
        yield f"| {goal.aim} | {goal.slice} | {measured} | {met} |"


def _slices(results: dict[str, Record], machine: Machine) -> Iterator[str]:
    yield "| slice | outcome | seconds |"
    yield "|---|---|---|"
    for part in SLICES:
        outcome = results.get(part.name, {}).get("outcome")
        if outcome is None:
            state = "has not ended" if part.name in results else part.why_not(machine) or "not run"
            yield f"| {part.name} | {state} | |"
            continue
        gpus = [] if machine.toy else list(machine.gpus)
        elsewhere = "" if outcome["gpus"] == gpus else ", elsewhere"
        because = f": {outcome['reason']}" if outcome["status"] != DONE else ""
        yield f"| {part.name} | {outcome['status']}{elsewhere}{because} | {outcome['seconds']:.0f} |"


def _steps(results: dict[str, Record]) -> Iterator[str]:
    """Yield the speed of training steps."""
    rows = []
    for name, record in results.items():
        for encoding, found in record.get("encodings", {}).items():
            mfu, strict = (_percent(found.get(key)) for key in ("mfu", "mfu_of_rope_flops"))
            phases = ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in found["phases"].items())
            memory = f"{found['memory']['peak'] / 2**30:.1f}" if found.get("memory") else ""
            speed = f"{found['tokens_per_second']:,.0f}"
            rows.append(f"| {name} | {encoding} | {speed} | {mfu} | {strict} | {memory} | {phases} |")
    if rows:
        yield "| training step | | tokens/s | MFU | MFU counting RoPE's FLOPs alone | GiB | milliseconds by phase |"
        yield "|---|---|---|---|---|---|---|"
        yield from rows


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
