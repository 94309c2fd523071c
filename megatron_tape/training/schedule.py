"""The learning rate of every step, as a pure function: nothing to save, nothing to restore."""

import math

from megatron_tape.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, total_steps: int) -> float:
    """Learning rate of `step`, counted from 1 to `total_steps`.

    It rises linearly to `optimizer.lr` at step `schedule.warmup_steps` and then, by `schedule.kind`, falls to
    `optimizer.min_lr` at `total_steps` along half a cosine or a power of the remaining share, stays (constant),
    or stays until the last `schedule.decay_steps` and falls linearly (wsd). Past `total_steps` it stays.
    """
    assert step >= 1, "steps count from 1"
    if step <= schedule.warmup_steps:
        return optimizer.lr * step / schedule.warmup_steps

    if schedule.kind == "wsd":
        length = schedule.decay_steps or max(1, total_steps // 10)
        start = max(schedule.warmup_steps, total_steps - length)
    else:
        start = schedule.warmup_steps
    done = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))

    if schedule.kind == "constant":
        height = 1.0
    elif schedule.kind == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * done))
    elif schedule.kind == "polynomial":
        height = (1.0 - done) ** schedule.power
    else:
        assert schedule.kind == "wsd"
        height = 1.0 - done
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * height
