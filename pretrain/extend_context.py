"""Extend a model to longer contexts: `python -m pretrain.extend_context --config RECIPE
--extension.from MODEL`.

MODEL is the directory of a run, one of its checkpoints, or a directory in the format of
transformers, which is imported to the directory `base` of the new run. Settings of the model
default to those of MODEL. Everything else, including torchrun, works as in pretrain.train. To
continue a run after MODEL was removed, give `config.yaml` of the run as --config.
"""

import sys

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.command_line import exit_on_user_error
from pretrain.train import run_attempt


def main(argv: list[str] | None = None) -> int:
    """Extend a model and return the exit status, as `pretrain.train.main` does."""
    with exit_on_user_error():
        config = parse_run_config(argv, __doc__.strip())
    return run_attempt(config, extends=True)


if __name__ == "__main__":
    sys.exit(main())
