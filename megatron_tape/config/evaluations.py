"""The evaluations that `train.evaluations` may name. Imports no torch, so that a wrong name is refused early."""

EVALUATIONS: dict[str, str] = {
    "validation_loss": "megatron_tape.training.hooks:ValidationLoss",
    "sample": "megatron_tape.training.hooks:Sample",
    "position_norms": "megatron_tape.training.position_norms:PositionNorms",
}
"""The class of each, as `module:class`, imported only where it is named: a subclass of `training.hooks.Hook`."""
