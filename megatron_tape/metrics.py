"""What a run tells: one console line per logged step, a row in `metrics.jsonl`, and TensorBoard.

Only one process writes. A resumed run continues its own file: rows past the step it resumes from are dropped first, so
that the file reads as one uninterrupted run.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

ROW_KEYS = ("loss", "grad_norm", "lr", "tokens_per_second")
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/gradient_norm",
    "lr": "train/learning_rate",
    "tokens_per_second": "speed/tokens_per_second",
    "tflops_per_second": "speed/tflops_per_second",
    "validation_loss": "validation/loss",
    "validation_perplexity": "validation/perplexity",
}
RECENT = 20


class MetricsWriter:
    """Writes metrics into `directory`; TensorBoard files go into its folder `tensorboard`."""

    def __init__(
        self,
        directory: str | Path,
        total_steps: int,
        resume_step: int = 0,
        tensorboard: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Open the files, dropping what an earlier attempt wrote past `resume_step` (0: everything).

        `clock` gives seconds; the time left is the remaining steps times the mean of the recent ones.
        """
        self.total_steps = total_steps
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._last_step = resume_step
        self._clock = clock
        self._recent = deque([(resume_step, clock())], maxlen=RECENT + 1)
        path = self._directory / "metrics.jsonl"
        _drop_rows_after(path, resume_step)
        self._rows = path.open("a", encoding="utf-8")
        self._tensorboard = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._directory / "tensorboard"), purge_step=resume_step + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of `step`.

        The usual names are `loss, grad_norm, lr, tokens_per_second, tflops_per_second` and, where evaluated,
        `validation_loss`, to which its perplexity is added. A name with a slash is a TensorBoard tag as it stands
        (`position/state_norm/layer_00`). Numbers that are not finite become null in `metrics.jsonl`.

        Raises:
            ValueError: if `step` does not come after the last one, which would make the file repeat itself.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}; log every step once, in order")
        self._last_step = step
        self._recent.append((step, self._clock()))
        values = {name: float(value) for name, value in scalars.items()}
        if "validation_loss" in values:
            values.setdefault("validation_perplexity", _exp(values["validation_loss"]))
        row = {
            "step": step,
            **dict.fromkeys(ROW_KEYS),
            **{k: v if math.isfinite(v) else None for k, v in values.items()},
        }
        self._rows.write(json.dumps(row, allow_nan=False) + "\n")
        self._rows.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(_tag(name), value, step)
            self._tensorboard.flush()
        print(self._line(step, values), flush=True)

    def text(self, tag: str, text: str, step: int) -> None:
        """Show `text`, as it stands, in TensorBoard under `tag`: a sample, or the configuration."""
        if self._tensorboard is not None:
            verbatim = "\n".join("    " + line for line in text.splitlines())
            self._tensorboard.add_text(tag, verbatim, step)
            self._tensorboard.flush()

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        formats = {
            "loss": "loss {:.4f}",
            "grad_norm": "grad norm {:.3f}",
            "lr": "lr {:.3e}",
            "tokens_per_second": "{:,.0f} tokens/s",
            "tflops_per_second": "{:.2f} TFLOP/s",
        }
        parts = [f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"]
        parts += [form.format(values[name]) for name, form in formats.items() if name in values]
        parts.append(f"ETA {_duration(self._seconds_left(step))}")
        if "validation_loss" in values:
            loss, perplexity = values["validation_loss"], values["validation_perplexity"]
            parts.append(f"validation loss {loss:.4f}, perplexity {perplexity:.2f}")
        return " | ".join(parts)

    def _seconds_left(self, step: int) -> float:
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        return (last_time - first_time) / (last_step - first_step) * max(0, self.total_steps - step)


def _drop_rows_after(path: Path, step: int) -> None:
    """Rewrite the file, atomically, without rows past `step` and without the torn line of a killed process."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
    if kept != lines:
        temporary = path.with_name(path.name + ".partial")
        with temporary.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _tag(name: str) -> str:
    return TAGS.get(name, name if "/" in name else f"train/{name}")


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{seconds:02d}"
