"""A training run with a problem planted in it, to see what a run says about such problems (docs/monitoring.md).

    torchrun --nproc-per-node 2 -m benchmarks.planted slow_rank --config pretrain/recipes/tape_demo.yaml ...

What follows the problem is what pretrain.train takes. Problems:

    slow_rank   the last rank needs half a second longer for each forward pass
    stall       each micro-batch comes half a second late
    spike       the batch of step 20 consists of one token, repeated; only the first time that the step is trained
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_tape.training.hooks import Hook, Training, register
from megatron_tape.training.spikes import FOUND
from pretrain.train import main as train

SECONDS = 0.5
STEP = 20


class SlowRank(Hook):
    """Delays forward passes of the last rank."""

    def before_step(self, trainer: Training, step: int) -> None:
        if step == 1 and trainer.layout.rank == trainer.layout.world_size - 1:
            trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SECONDS))


class Stall(Hook):
    """Delays every micro-batch."""

    def before_step(self, trainer: Training, step: int) -> None:
        if step == 1:
            trainer.micro_batches = self._late(trainer.micro_batches)

    def _late(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            time.sleep(SECONDS)
            yield batch


class Spike(Hook):
    """Makes one step learn from a batch of nothing but one token."""

    def before_step(self, trainer: Training, step: int) -> None:
        # After a rewind, the hooks are new; what the trainer has counted is not.
        if step == 1 and FOUND not in trainer.progress:
            trainer.micro_batches = self._with_a_bad_one(trainer, trainer.micro_batches)

    def _with_a_bad_one(self, trainer: Training, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            bad = trainer.step == STEP - 1
            yield batch | {key: batch[key] * 0 + 7 for key in ("tokens", "labels")} if bad else batch


PROBLEMS = {"slow_rank": SlowRank, "stall": Stall, "spike": Spike}


def main(argv: list[str]) -> int:
    """Train with the problem that comes first among the arguments."""
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not argv or argv[0] not in PROBLEMS:
        print(f"error: choose a problem first: {', '.join(PROBLEMS)}; see --help", file=sys.stderr)
        return 2
    register("planted", PROBLEMS[argv[0]])
    return train([*argv[1:], "--train.evaluations=[planted, validation_loss, position_norms, gradient_norms]"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
