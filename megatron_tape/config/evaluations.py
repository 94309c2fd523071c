"""The evaluations that `train.evaluations` may name. Does not import torch, so that wrong names are rejected early."""

EVALUATIONS: dict[str, str] = {
    "validation_loss": "megatron_tape.training.hooks:ValidationLoss",
    "sample": "megatron_tape.training.hooks:Sample",
    "position_norms": "megatron_tape.training.position_norms:PositionNorms",
}
"""The class of each as `module:class`, a subclass of `training.hooks.Hook`; imported only if it is used."""
ON_VALIDATION_DATA = frozenset({"validation_loss"})
"""Those that read the validation split; without any of them it is not indexed."""
