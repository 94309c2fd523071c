"""The learning rate schedule, as a function of the step, so that there is no state to save."""

import math

from megatron_tape.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(
    step: int,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    total_steps: int,
) -> float:
    """Return the learning rate of `step`, which counts from 1.

    The rate rises linearly from 0 to `optimizer.lr` at step `schedule.warmup_steps`. It then decays
    to `optimizer.min_lr` at `total_steps`, after which it does not change. `schedule.kind` is the
    form of the decay:

    - cosine: half a period of a cosine.
    - polynomial: a power of the remaining fraction of the steps.
    - wsd: linear in the last `schedule.decay_steps` steps, by default a tenth of all steps.
    - constant: no decay.
    """
    assert step >= 1, "steps count from 1"
    if step <= schedule.warmup_steps:
        return optimizer.lr * step / schedule.warmup_steps

    if schedule.kind == "wsd":
        length = schedule.decay_steps or max(1, total_steps // 10)
        start = max(schedule.warmup_steps, total_steps - length)
    else:
        start = schedule.warmup_steps
    # The fraction of the decay that is over. Without steps left to decay, avoid a division by 0.
    decayed = (step - start) / max(1, total_steps - start)
    decayed = min(1.0, max(0.0, decayed))

    if schedule.kind == "constant":
        factor = 1.0
    elif schedule.kind == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * decayed))
    elif schedule.kind == "polynomial":
        factor = (1.0 - decayed) ** schedule.power
    else:
        assert schedule.kind == "wsd"
        factor = 1.0 - decayed
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * factor
