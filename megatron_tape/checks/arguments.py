"""Read a run's settings from the command line, and check them without reading data or starting processes."""

import dataclasses
from pathlib import Path

from megatron_tape.checks.combinations import validate
from megatron_tape.config.datasets import resolve_datasets
from megatron_tape.config.parse import read_settings, settings_parser
from megatron_tape.config.schema import RunConfig, to_yaml
from megatron_tape.config.sections import build
from megatron_tape.extension.base_model import Base, with_base_settings
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count


def parse_run_config(
    argv: list[str] | None = None, purpose: str = "Train one model.", base: Base | None = None
) -> RunConfig:
    """Read `--config` files and overrides from `argv`; later values override earlier ones.

    If the run extends a model, settings of that model are added. `checks.check` performs the checks that depend on the
    number of processes and on files. Exits with status 0 after `--help` or `--print_config`.

    Args:
        argv: the arguments; None for those of the process.
        purpose: the beginning of the text of `--help`.
        base: the model to extend; None to read the one that `extension.from` names.

    Returns:
        The settings. Directories that are not set get defaults from the recipe's name.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid or incompatible with others; with file and line.
    """
    parser = settings_parser(
        RunConfig,
        usage="%(prog)s --config RECIPE [--section.key value ...]",
        description=f"{purpose} Settings come from --config and --section.key; later ones override earlier ones.",
    )
    given = read_settings(parser, RunConfig, argv)
    fix = f"add to {' or '.join(given.files)}, or give --section.key value"
    if not given.files:
        fix = "give --config RECIPE, such as --config tape_demo"
    with given.add_places_to_errors():
        name = Path(given.files[-1]).stem if given.files else "unnamed"
        config = build(RunConfig, with_base_settings(given.values, base, f"runs/{name}"), fix=fix)
        _ = config.data.source
        config = with_directories(resolve_datasets(config), name)
        validate(config, world_size=config.parallel.ranks_per_sequence)
    if given.options.print_config:
        sizes = parameter_count(config.model, config.extension), flops_per_token(config.model, config.extension)
        print("# {:,} parameters, {:,} FLOPs per token".format(*sizes))
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def with_directories(config: RunConfig, name: str) -> RunConfig:
    """Return `config` with defaults for all directories that are not set, under `runs/<name>` or next to the data."""
    logging = dataclasses.replace(config.logging, directory=config.logging.directory or f"runs/{name}")
    config = dataclasses.replace(config, logging=logging)
    directory = config.checkpoint.directory or config.default_checkpoint_directory
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, directory=directory),
        data=dataclasses.replace(config.data, cache_directory=config.data.resolved_cache_directory),
    )
