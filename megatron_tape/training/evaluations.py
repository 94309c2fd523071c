"""What `train.evaluations` and the section `evaluation` stand for, as names of modules, which may import torch."""

EVALUATIONS: dict[str, str] = {
    "validation_loss": "megatron_tape.training.hooks:ValidationLoss",
    "sample": "megatron_tape.training.hooks:Sample",
    "position_norms": "megatron_tape.training.position_norms:PositionNorms",
}
"""The class of each as `module:class`, a subclass of `training.hooks.Hook`; imported only if it is used."""
TASK_HOOKS = "megatron_tape.evaluation.training_model"
"""The module that makes hooks of these tasks."""
