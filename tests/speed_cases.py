"""What ranks measure of themselves; see run/test_speed.py."""

import os

import torch.distributed as dist

from megatron_tape.run.speed import measure


def main(folder):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    found = [None] * size
    dist.all_gather_object(found, measure(rank, size))
    dist.destroy_process_group()
    return found
