"""Read a run's settings from a program's arguments: the keys of `config`, and those of every positional encoding."""

import functools

from megatron_tape.checks.combinations import validate
from megatron_tape.config import parse
from megatron_tape.config.schema import RunConfig, to_yaml
from megatron_tape.extension.base_model import Base, with_base_settings
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count


def parse_run_config(
    argv: list[str] | None = None, purpose: str = "Train one model.", base: Base | None = None
) -> RunConfig:
    """Return the configuration that `config.parse.read_run_config` reads from `argv` (`sys.argv` if None).

    It is checked here, with file and line, except for what depends on the number of processes and on files (see
    `checks.check`). Settings of a model that a run extends are added, those of `base` if it is given.

    Raises ConfigError if it is refused, and ends the process with status 0 after `--help` or `--print_config`.
    """

    def check(config: RunConfig) -> None:
        validate(config, world_size=config.parallel.ranks_per_sequence)

    complete = functools.partial(with_base_settings, base=base)
    config, print_only = parse.read_run_config(argv, check, complete, purpose)
    if print_only:
        sizes = parameter_count(config.model, config.extension), flops_per_token(config.model, config.extension)
        print("# {:,} parameters, {:,} FLOPs per token".format(*sizes))
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config
