"""Read a run's settings from a program's arguments: the keys of `config`, and those of every positional encoding."""

import sys

from megatron_tape.checks.settings import validate
from megatron_tape.config import parse
from megatron_tape.config.parse import Complete
from megatron_tape.config.schema import RunConfig, to_yaml
from megatron_tape.errors import EXIT_REFUSED, ConfigError
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import encoding_settings


def parse_run_config(
    argv: list[str] | None = None, complete: Complete = dict, purpose: str = "Train one model."
) -> RunConfig:
    """Return the configuration that `config.parse.read_run_config` reads from `argv` (`sys.argv` if None).

    Ends the process with one line `error: ...` and status 2 if it is refused, and with status 0 after `--help` or
    `--print_config`.
    """
    try:
        config, print_only = parse.read_run_config(argv, encoding_settings(), complete, purpose)
        if print_only:
            validate(config, world_size=config.parallel.ranks_per_sequence)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
    if print_only:
        sizes = parameter_count(config.model, config.extension), flops_per_token(config.model, config.extension)
        print("# {:,} parameters, {:,} FLOPs per token".format(*sizes))
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def read_run_config(argv: list[str], complete: Complete = dict) -> RunConfig:
    """Return what `parse_run_config` returns. Raises ConfigError instead of ending the process."""
    return parse.read_run_config(argv, encoding_settings(), complete)[0]
