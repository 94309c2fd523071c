"""Read a run's settings from a program's arguments: the keys of `config`, and those of every positional encoding."""

from megatron_tape.checks.settings import validate
from megatron_tape.config import parse
from megatron_tape.config.parse import Complete
from megatron_tape.config.schema import RunConfig, to_yaml
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import encoding_settings


def parse_run_config(
    argv: list[str] | None = None, complete: Complete = dict, purpose: str = "Train one model."
) -> RunConfig:
    """Return the configuration that `config.parse.read_run_config` reads from `argv` (`sys.argv` if None).

    Raises ConfigError if it is refused, and ends the process with status 0 after `--help` or `--print_config`.
    """

    def check(config: RunConfig) -> None:
        validate(config, world_size=config.parallel.ranks_per_sequence)

    config, print_only = parse.read_run_config(argv, encoding_settings(), check, complete, purpose)
    if print_only:
        sizes = parameter_count(config.model, config.extension), flops_per_token(config.model, config.extension)
        print("# {:,} parameters, {:,} FLOPs per token".format(*sizes))
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config
