"""Train TAPE and RoPE for 20 real steps on the GPU and compare with the CPU: losses, gradient norms, every gradient.

    python -m benchmarks.check_training --output training.json

A small model learns real text through `pretrain.train` itself: Megatron's layers and datasets, DeepSpeed's ZeRO, and on
the GPU the fused kernels, which TAPE's runs ask for by name. In fp32 the GPU must give the CPU's figures, and several
GPUs as well. In bf16, under every ZeRO stage, with packed documents and with recomputation, it must stay near them. A
run that is continued in another process must end with the same bits, and an export to Hugging Face must give the same
logits. TAPE's matrices do not begin at zero here, where it would be RoPE.

Without a GPU, the same code runs at toy size, with interpreted kernels in place of the GPU. The record says what each
side ran on. The exit status is 1 only if nothing could be compared.
"""

import argparse
import importlib.util
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.environment import RESULTS, Record
from benchmarks.programs import Check, environment_of_cpu, environment_of_gpu, run_checks
from benchmarks.training_cases import DETERMINISTIC, EXPORT, GRADIENTS, RESUMED
from benchmarks.training_inputs import ON_GPU, TOY, prepare

Results = dict[str, Check]

REFERENCE = (*GRADIENTS, "tape fp32", "rope fp32", "tape packed fp32")
"""What the CPU computes."""
DEVICE = (
    "tape fp32",
    "gradients of tape",
    "tape bf16 ZeRO 2",
    "rope fp32",
    "gradients of tape packed",
    "gradients of rope",
    "tape packed fp32",
    "tape bf16 ZeRO 1",
    "tape bf16 ZeRO 3",
    "rope bf16 ZeRO 2",
    "tape recomputed fp32",
    "tape packed bf16 recomputed",
    "tape bf16 ZeRO 2 overlapping",
    DETERMINISTIC,
)
"""What the device computes, the most important first; then, in another process, what begins with a saved run."""
LATER = (RESUMED, EXPORT)
TOGETHER = ("tape fp32 data parallel", "tape fp32 tensor parallel")
"""What all GPUs compute together."""
TOY_DEVICE = (*DEVICE[:5], "tape packed fp32", DETERMINISTIC)

SAME = {"loss": 1e-5, "grad_norm": 2e-4, "validation_loss": 1e-5}
"""Relative difference, at any step, between two fp32 runs that round sums in another order. Between plain torch, the
tiled backend and recomputation under ZeRO 3, on a CPU, it was 3e-7, 4e-6 and 5e-7."""
NEAR = {"loss": 0.005, "grad_norm": 0.05, "validation_loss": 0.005}
"""Relative difference between bf16 and fp32; on a CPU it was 7e-4, 9e-3 and 6e-4."""
COMPARED = {
    "tape fp32": ("tape fp32", SAME),
    "rope fp32": ("rope fp32", SAME),
    "tape packed fp32": ("tape packed fp32", SAME),
    "tape recomputed fp32": ("tape fp32", SAME),
    **dict.fromkeys(TOGETHER, ("tape fp32", SAME)),
    "rope bf16 ZeRO 2": ("rope fp32", NEAR),
    "tape packed bf16 recomputed": ("tape packed fp32", NEAR),
    **dict.fromkeys([name for name in DEVICE if name.startswith("tape bf16")], ("tape fp32", NEAR)),
    DETERMINISTIC: ("tape fp32", NEAR),
}
"""With which run on the CPU a run is compared, and how closely."""


def verdict(name: str, why: str | None, **figures) -> Check:
    """Return a check that has failed if there is a reason `why`."""
    return {"name": name, "passed": why is None, **({} if why is None else {"why": why}), **figures}


def compared(name: str, rows: list[dict], others: list[dict], tolerance: dict[str, float]) -> Check:
    """Compare every figure of every step; the check also tells the largest relative differences."""
    steps, expected = ([row["step"] for row in side] for side in (rows, others))
    if steps != expected:
        return verdict(name, f"steps {steps} instead of {expected}")
    largest, why = {}, []
    for key, limit in tolerance.items():
        both = [(row["step"], row[key], other[key]) for row, other in zip(rows, others) if key in row and key in other]
        for step, here, there in both:
            if not difference(here, there) <= limit:
                why.append(f"{key} at step {step} is {here} instead of {there}")
        largest[key] = max((difference(here, there) for _, here, there in both), default=0.0)
    largest = {key: value if math.isfinite(value) else None for key, value in largest.items()}
    return verdict(name, "; ".join(why[:3]) or None, largest_differences=largest)


def difference(a: float | None, b: float | None) -> float:
    """Return the relative difference of two figures; infinite if one of them is missing or is not finite."""
    if a is None or b is None or not math.isfinite(a) or not math.isfinite(b):
        return math.inf
    return abs(a - b) / max(abs(b), 1e-12)


def verdicts(reference: Results, device: Results) -> Iterator[Check]:
    """Compare all that is known; what failed is not compared any further."""
    for side, where in ((device, ""), (reference, " on the CPU")):
        for name, check in side.items():
            if not check["passed"] or (side is device and "rows" not in check):
                yield {**check, "name": f"{name}{where}"}
    ours, theirs = (
        {name: check["rows"] for name, check in side.items() if "rows" in check} for side in (device, reference)
    )
    for name, (other, tolerance) in COMPARED.items():
        if name in ours and other in theirs:
            how = "equals" if tolerance is SAME else "stays near"
            yield compared(f"{name}: {how} {other} on the CPU", ours[name], theirs[other], tolerance)
    if rows := ours.get("tape fp32"):
        norms = [value for key, value in rows[0].items() if "update_norm" in key]
        why = None if norms and min(norms) > 0.01 else "a layer's update does not move the position state"
        yield verdict("tape fp32: TAPE is at work", why, update_norms=norms)
        if len(rows) >= 20:
            first, last = rows[0]["loss"], rows[-1]["loss"]
            yield verdict("tape fp32: the loss falls", None if last < first - 0.1 else f"from {first} to {last}")
        if packed := ours.get("tape packed fp32"):
            apart = difference(packed[0]["loss"], rows[0]["loss"]) > 1e-5
            yield verdict(
                "tape packed fp32: documents do not see each other", None if apart else "the loss is the same"
            )
    if RESUMED in ours and DETERMINISTIC in ours:
        check = compared(f"{RESUMED}: the same bits", ours[RESUMED], ours[DETERMINISTIC], dict.fromkeys(SAME, 0.0))
        if check["passed"] and device[RESUMED]["tensors"] != device[DETERMINISTIC]["tensors"]:
            check |= {"passed": False, "why": "the tensors of the last checkpoints differ"}
        yield check


class Comparison:
    """Collects what both sides report, and writes the record whenever something is new."""

    def __init__(self, record: Record, sides: dict[str, str]):
        self.reference: Results = {}
        self.device: Results = {}
        self._record, self._sides, self._lock = record, sides, threading.Lock()
        self._started, self._said = time.monotonic(), set()

    def add(self, side: Results, check: Check) -> None:
        """Take in what a side has reported."""
        with self._lock:
            side[check["name"]] = check
            where = "CPU" if side is self.reference else "device"
            now = time.monotonic() - self._started
            speed = f", {check['tokens_per_second']} tokens/s" if "tokens_per_second" in check else ""
            state = "done" if check["passed"] else "FAILED"
            print(
                f"[{now:4.0f} s] {where}: {check['name']} {state} ({check.get('seconds', 0):.0f} s{speed})", flush=True
            )
            self.write()

    def write(self) -> list[Check]:
        """Judge and write what is known; return the verdicts. Those that are new are printed."""
        found = list(verdicts(self.reference, self.device))
        for check in found:
            if check["name"] in self._said:
                continue
            self._said.add(check["name"])
            print(f"    {check['name']}: {'passed' if check['passed'] else 'FAILED: ' + check['why']}", flush=True)
            for line in [] if check["passed"] else [*check.get("last_lines", []), *check.get("traceback", [])]:
                print(f"        {line}", flush=True)
        failed = [check for check in found if not check["passed"]]
        self._record.write(
            {
                "sides": self._sides,
                "passed": len(found) - len(failed),
                "failed": len(failed),
                "seconds": round(time.monotonic() - self._started, 1),
                "checks": [*failed, *(check for check in found if check["passed"])],
                "device": self.device,
                "reference": self.reference,
            }
        )
        return found


def main() -> int:
    """Run both sides; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="everything ends in time (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="trained together (default: the number of GPUs)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these on the device")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="a .json file or a directory (default: %(default)s)"
    )
    parser.add_argument("--commit", help="commit of this code, if git cannot determine it")
    arguments = parser.parse_args()
    import torch

    deadline = time.monotonic() + 60 * arguments.minutes
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    size, names = (ON_GPU, DEVICE) if gpus else (TOY, TOY_DEVICE)
    names = [*names, *LATER, *TOGETHER]
    unknown = set(arguments.cases or ()) - set(names)
    if unknown:
        parser.error(f"argument --cases: {sorted(unknown)[0]!r} is none of {', '.join(names)}")
    names = [name for name in names if name in (arguments.cases or names)]
    if importlib.util.find_spec("transformers") is None:
        names = [name for name in names if name != EXPORT]
    processes = arguments.processes or gpus or 1
    processes = 1 << (min(processes, size.batch).bit_length() - 1)
    sides = {"reference": "cpu", "device": torch.cuda.get_device_name() if gpus else "cpu, interpreted kernels"}
    comparison = Comparison(Record("check_training", arguments.output, arguments.commit), sides)
    environment = environment_of_gpu() if gpus else environment_of_cpu()
    with tempfile.TemporaryDirectory(prefix="check-training-") as folder:
        prepare(Path(folder), size)
        print(f"[{time.monotonic() - comparison._started:4.0f} s] text, tokenizer, dataset and weights", flush=True)

        def run(side: Results, cases: list[str], variables: dict[str, str], together: int = 1) -> None:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={together}"]
            program = [sys.executable, *(launcher if together > 1 else []), "-m", "benchmarks.training_cases", folder]
            which = "reference" if side is comparison.reference else "device"
            if cases:
                run_checks(
                    lambda skipped: [*program, which, str(skipped), *cases],
                    variables,
                    deadline,
                    lambda check: comparison.add(side, check),
                )

        cores = os.cpu_count() or 1
        slow = environment_of_cpu() | {"OMP_NUM_THREADS": str(max(1, cores // 2))}
        aside = threading.Thread(target=run, args=(comparison.reference, list(REFERENCE), slow), daemon=True)
        aside.start()
        run(comparison.device, [name for name in names if name not in (*LATER, *TOGETHER)], environment)
        run(comparison.device, [name for name in LATER if name in names], environment)
        if processes > 1:
            run(comparison.device, [name for name in TOGETHER if name in names], environment, processes)
        aside.join()
    found = comparison.write()
    failed = [check for check in found if not check["passed"]]
    print(f"{len(found) - len(failed)} checks passed, {len(failed)} failed", flush=True)
    return 0 if len(failed) < len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
