"""Measures training steps on two processes, for test_train_step.py."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import measured_model, train_step

LAYOUTS = {"data_parallel": ["--precision=bf16"], "tensor_parallel": ["--tensor-parallel=2", "--zero-stage=1"]}


def main(folder):
    found = {}
    for name, options in LAYOUTS.items():
        path = Path(folder, f"{name}-{os.environ['RANK']}.json")
        status = train_step.main(["--shape=toy", "--order=alternate", f"--output={path}", *options])
        found[name] = {"status": status, "written": path.exists()}
        if path.exists():
            found[name]["record"] = json.loads(path.read_text())
    others = [None, None]
    dist.all_gather_object(others, {name: case["written"] for name, case in found.items()})

    def step(self):
        raise torch.OutOfMemoryError("no room")

    measured_model.MeasuredModel.step = step
    found["out_of_memory"] = train_step.main(["--shape=toy"])
    return {**found, "written_by": others}
