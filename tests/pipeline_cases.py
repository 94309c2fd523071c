"""Trains with pipeline stages, and without for comparison; see test_pipeline.py."""

import os

from training_cases import RECIPE, option, packed, rows
from pretrain import train
import torch.distributed as dist
from pathlib import Path
import json

def run(folder, name, *overrides, expect=0):
    arguments = ["--config", str(RECIPE), "--logging.directory", f"{folder}/{name}", *map(str, overrides)]
    status = train.main(arguments)
    assert status == expect, (name, status)
    dist.barrier()
    return rows(Path(folder, name))

def main(folder, data):
    out = {}
    size = int(os.environ["WORLD_SIZE"])
    base = [option("data.prefix", f"{data}/a"), option("train.steps", 3), option("train.micro_batch_size", 1), option("model.num_layers", 4), option("train.global_batch_size", 4)]
    pp = [option("parallel.pipeline_model_parallel_size", size)]
    for name, more in {"tape": [], "zero0": [option("deepspeed.zero_stage", 0)], "tied": [option("model.tie_embeddings", "true")], "bf16": [option("train.precision", "bf16")], "rope": [option("model.position_encoding", "rope")]}.items():
        out[name] = run(folder, name, *base, *more, *pp)
        if size > 1:
            out[name + "_v2"] = run(folder, name + "_v2", *base, *more, *pp, option("parallel.virtual_pipeline_size", 2))
    return out
