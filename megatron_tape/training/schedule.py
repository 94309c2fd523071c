"""The learning rate schedule, as a pure function of the step; it has no state to save or restore."""

import math

from megatron_tape.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, total_steps: int) -> float:
    """Return the learning rate of `step`, which counts from 1 to `total_steps`.

    The rate rises linearly to `optimizer.lr` at step `schedule.warmup_steps`. It then decays to `optimizer.min_lr` at
    `total_steps`, by `schedule.kind`: along half a cosine, along a power of the remaining fraction (polynomial), or
    linearly in the last `schedule.decay_steps` (wsd); or it remains constant. After `total_steps` it does not change.
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
