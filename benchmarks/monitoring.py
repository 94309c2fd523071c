"""How much longer a training step of the demo's model takes because it is watched.

    python -m benchmarks.monitoring

Steps of one micro-batch with what docs/monitoring.md describes alternate with steps without, in one process. A watched
step counts its phases, logs them and takes gradient norms, as a run does only at logged steps (of the demo's, one in
ten). The figures are CPU time, not time passed, so that other programs on the machine change them little.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.environment import positive, quieten_libraries

RECIPE = Path(__file__).parents[1] / "pretrain" / "recipes" / "tape_demo.yaml"
WARM_UP = 4


def measure(pairs: int, recipe: Path) -> tuple[float, float, float]:
    """Return medians of CPU seconds: a step that is not watched, what a watched one takes longer, and its hooks."""
    from megatron_tape.checks.arguments import parse_run_config
    from megatron_tape.run.watch import Watch
    from megatron_tape.training.step_clock import StepClock
    from megatron_tape.training.trainer import Trainer

    own = 0.0

    def timed(call: Callable, *arguments: Any) -> None:
        nonlocal own
        began = time.process_time()
        call(*arguments)
        own += time.process_time() - began

    with tempfile.TemporaryDirectory(prefix="monitoring-") as home:
        given = [f"--config={recipe}", f"--logging.directory={home}", "--data.prefix=null", "--data.tokenizer=null"]
        given += ["--data.generator={task: addition}", "--logging.interval=1", "--train.eval_interval=null"]
        given += ["--train.micro_batch_size=1", "--train.global_batch_size=1", "--schedule.warmup_steps=0"]
        watch, without, longer, hooks_alone = Watch(None), [], [], []
        try:
            trainer = Trainer(parse_run_config([*given, f"--train.steps={2 * (pairs + WARM_UP)}"]), watch)
            trainer._build()
            hooks = [trainer.hooks[name] for name in ("step_times", "profile", "gradient_norms")]
            for step in range(1, trainer.config.train.steps + 1):
                watched, own = step % 2 == 0, 0.0
                with nullcontext() if watched else mock.patch.object(StepClock, "phase", lambda *_: nullcontext()):
                    began = time.process_time()
                    for hook in hooks if watched else ():
                        timed(hook.before_step, trainer, step)
                    if watched:
                        trainer.engine.before_update = partial(timed, trainer.engine.before_update)
                    result = trainer.engine.train_step(trainer.micro_batches, 1e-4, step)
                    for hook in hooks if watched else ():
                        timed(hook.after_step, trainer, step, result)
                    seconds = time.process_time() - began
                if watched:
                    longer.append(seconds - without[-1])
                    hooks_alone.append(own)
                else:
                    without.append(seconds)
            trainer.writer.close()
        finally:
            watch.close()
    return tuple(statistics.median(found[WARM_UP:]) for found in (without, longer, hooks_alone))


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitoring", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=positive, default=200, metavar="N", help="default: %(default)s")
    quieten_libraries(0)
    without, longer, hooks = measure(parser.parse_args(argv).pairs, RECIPE)
    print(f"a step of {1e3 * without:.1f} ms takes {1e3 * longer:.2f} ms longer when it is watched", end="; ")
    print(f"the hooks alone take {1e3 * hooks:.2f} ms, {hooks / without:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
