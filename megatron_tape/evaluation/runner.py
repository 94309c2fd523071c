"""Run tasks on a model: share their units among the ranks, keep what is done, and write results and pictures.

Every rank appends the value of each unit it has finished to a file of its own in `parts/` of the output directory, so
that an evaluation that was interrupted continues there, on any number of processes. The files of one task lie in a
directory that is named by a digest of all that their values depend on: model, settings, data and number type.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.base import HuggingFaceModel, ModelInfo, Task, Unit
from megatron_tape.evaluation.results import (
    FORMAT,
    NAME,
    Model,
    Results,
    TaskResult,
    locked,
    read_results,
    write_results,
)
from megatron_tape.io.files import remove

_PACKAGES = ("torch", "transformers", "lm_eval", "tokenizers", "megatron-tape")


@dataclass(frozen=True)
class Ranks:
    """The processes that share an evaluation; a single one needs no process group."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Return the ranks that torchrun or a Slurm job has started, after they have found each other."""
        ranks = cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        if ranks.count > 1:
            import torch.distributed as dist

            # Ranks wait for each other at the end of a task, whose units may take hours.
            dist.init_process_group("gloo", timeout=timedelta(days=7))
        return ranks

    def share(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        if self.count == 1:
            return value
        import torch.distributed as dist

        values = [value]
        with _others_alive():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list on the others; all wait for each other."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values = [None] * self.count if self.rank == 0 else None
        with _others_alive():
            dist.gather_object(value, values, dst=0)
            dist.barrier()
        return values or []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around what only this rank does: a ConfigError, which only rank 0 reports, becomes a ValueError elsewhere."""
        try:
            yield
        except ConfigError as error:
            if self.rank == 0:
                raise
            raise ValueError(str(error)) from None

    def leave(self) -> None:
        """End the process group."""
        if self.count > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def shares(self, units: list[Unit]) -> list[list[Unit]]:
        """Return which of the units each rank does: the costly ones first, each to the rank with the least to do."""
        loads, shares = [0.0] * self.count, [[] for _ in range(self.count)]
        for unit in sorted(units, key=lambda unit: -unit.cost):
            rank = loads.index(min(loads))
            loads[rank] += unit.cost
            shares[rank].append(unit)
        order = {unit.key: index for index, unit in enumerate(units)}
        return [sorted(share, key=lambda unit: order[unit.key]) for share in shares]


@contextmanager
def _others_alive() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError("another process of this evaluation has ended; see its message") from error


class Parts:
    """The values of a task's units that are known so far, in a directory that only grows."""

    def __init__(self, directory: Path):
        self.directory = directory

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the values by the units' keys; a line that a killed process left unfinished is ignored."""
        values = {}
        for file in sorted(self.directory.glob("*.jsonl")):
            for line in file.read_bytes().splitlines():
                try:
                    part = json.loads(line)
                    values[part["key"]] = part["value"]
                except (ValueError, TypeError, KeyError):
                    continue
        return values

    def append(self, rank: int, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Add a value to the rank's file; return it as it is read back.

        Raises ValueError if it is not plain JSON of finite numbers.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "value": value}, allow_nan=False)
        # An unfinished line of a killed process must not swallow this one.
        with open(self.directory / f"rank-{rank:05d}.jsonl", "ab") as file:
            file.write(f"\n{line}\n".encode())
        return json.loads(line)["value"]


def sha256(path: Path) -> str:
    """Return a file's digest."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    whole = hashlib.sha256()
    while block := file.read(1 << 22):
        whole.update(block)
    return whole.hexdigest()


def identity_of(task: Task, model_digest: str, dtype: str, data: dict[str, str]) -> str:
    """Return a digest of all that the values of a task's units depend on."""
    # Settings name files; which of them has what contents matters, too.
    facts = [task.name, asdict(task.settings), model_digest, dtype, sorted(data.items())]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that matter, and of this project's code."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        root = Path(__file__).parents[2]
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        found |= {"commit": answer.stdout.strip()} if answer.returncode == 0 else {}
    except (OSError, subprocess.SubprocessError):
        pass
    return found


def hardware(device: Any) -> str:
    """Return the name of the GPU or CPU that computes."""
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return f"CPU {name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def finished_tasks(output: Path, identities: dict[str, str]) -> set[str]:
    """Return the tasks whose results are already in the output directory, with the same identities."""
    try:
        results = read_results(output)
    except FileNotFoundError:
        return set()
    return {name for name, task in results["tasks"].items() if task.get("identity") == identities.get(name)}


def run_task(
    task: Task, model: HuggingFaceModel, ranks: Ranks, output: Path, identity: str, data: dict[str, str], dtype: str
) -> TaskResult | None:
    """Do the units of a task that are not done yet, together with the other ranks; return the result on rank 0.

    Of several processes each calls this with the same arguments.
    """
    parts = Parts(output / "parts" / f"{task.name}-{identity[:16]}")
    started = time.monotonic()
    units = task.units(model)
    values = parts.read() if ranks.rank == 0 else {}
    done = set(ranks.share(sorted(values)))
    left = [unit for unit in units if unit.key not in done]
    share = ranks.shares(left)[ranks.rank]
    if ranks.rank == 0:
        again = f", {len(units) - len(left):,} of them done before" if len(left) < len(units) else ""
        unit_word = "part" if len(units) == 1 else "parts"
        command_line.say(f"{task.name}: {len(units):,} {unit_word}{again}")
    progress = command_line.Progress(1_000_000) if ranks.rank == 0 and share else None
    whole, finished, own = sum(unit.cost for unit in share), 0.0, {}
    for number, unit in enumerate(share, 1):
        with ranks.alone():
            own[unit.key] = parts.append(ranks.rank, unit.key, task.evaluate(unit, model))
        finished += unit.cost
        if progress is not None:
            shown = f"{task.name}: {number:,} of {len(share):,} parts"
            progress.update(round(1_000_000 * finished / whole), lambda _: shown)  # noqa: B023
    if progress is not None:
        progress.end()
    # Not read from their files, which a network file system may show to other machines only after a minute.
    gathered = ranks.gather(own)
    if ranks.rank != 0:
        return None
    for part in gathered:
        values |= part
    examples = {unit.key: values[unit.key] for unit in units}
    summary = task.summarize(examples, model.info)
    return {
        "settings": asdict(task.settings),
        "data": data,
        "seconds": time.monotonic() - started,
        "processes": ranks.count,
        "scores": [asdict(score) for score in summary.scores],
        "details": summary.details,
        "notes": summary.notes,
        "examples": examples,
        "identity": identity,
        "parts_before": len(units) - len(left),
        "dtype": dtype,
        "hardware": hardware(model.device),
        "versions": versions(),
    }


def record(output: Path, label: str, model: Model, name: str, result: TaskResult) -> Results:
    """Add the result of a task to the results in the output directory, and remove the parts it was made from."""
    with locked(output):
        try:
            results = read_results(output)
        except FileNotFoundError:
            results = {"format": FORMAT, "tasks": {}}
        results = {
            **results,
            "label": label,
            "created": time.time(),
            "model": model,
            "versions": result["versions"],
            "hardware": result["hardware"],
            "dtype": result["dtype"],
            "tasks": {**results["tasks"], name: result},
        }
        write_results(output, results)
    remove(output / "parts" / f"{name}-{result['identity'][:16]}")
    return results


def refuse_other_model(output: Path, digest: str) -> None:
    """Raise ConfigError if the output directory holds results of another model."""
    try:
        results = read_results(output)
    except FileNotFoundError:
        return
    if results["model"]["digest"] != digest:
        raise ConfigError(
            f"{output / NAME} holds results of another model, {results['model']['path']}; choose another --output"
        )


def draw(output: Path, task: type[Task], results: Results) -> list[Path]:
    """Draw the pictures of one task's results into the output directory; return their files."""
    from megatron_tape.evaluation.figures import save

    files = []
    for picture in task.draw({results["label"]: results["tasks"][task.name]}):
        files.append(output / f"{picture.name}.png")
        save(picture, files[-1])
    return files


def shown_scores(scores: Iterable[dict[str, Any]]) -> list[str]:
    """Return the scores as lines of a table for a terminal."""
    rows = []
    for score in scores:
        interval = f"{score['low']:.4g} to {score['high']:.4g}" if score.get("low") is not None else ""
        length = "" if score.get("length") is None else f"{score['length']:,}"
        count = "" if score.get("count") is None else f"n={score['count']:,}"
        unit = score.get("unit") or ""
        rows.append([score["metric"], score.get("group") or "", length, f"{score['value']:.4g}", unit, interval, count])
    widths = [max(len(row[column]) for row in rows) for column in range(7)] if rows else []
    aligned = ["<", "<", ">", ">", "<", "<", "<"]
    return [
        "  " + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths) if width).rstrip()
        for row in rows
    ]


def facts_of(info: ModelInfo, path: str, digest: str, parameters: int, run: dict[str, Any] | None) -> Model:
    """Return what `results.json` says of the model."""
    return {
        "path": path,
        "digest": digest,
        "parameters": parameters,
        "trained_length": info.trained_length,
        "config": info.config,
        "run": run,
    }
