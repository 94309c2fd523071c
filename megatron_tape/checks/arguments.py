"""Read a run's settings from the command line, and check them without reading data or starting
processes.
"""

import sys
from pathlib import Path

from megatron_tape.checks.combinations import validate
from megatron_tape.config.datasets import resolve_datasets
from megatron_tape.config.parse import read_settings, settings_parser
from megatron_tape.config.schema import RunConfig, replace_settings, to_yaml
from megatron_tape.config.sections import build
from megatron_tape.extension.base_model import Base, with_base_settings
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count


def parse_run_config(
    argv: list[str] | None = None, purpose: str = "Train one model.", base: Base | None = None
) -> RunConfig:
    """Return the settings from the recipes (`--config`) and overrides (`--section.key value`) in
    `argv`.

    A first argument that is not an option is a recipe, as if it followed `--config`. If the run
    extends a model, settings that are not given are taken from that model. `checks.check` performs
    the checks that depend on the number of processes and on files. Exits with status 0 after
    `--help` or `--print_config`.

    Args:
        argv: the arguments. None reads those of the process.
        purpose: the first sentence of `--help`.
        base: the model to extend. None reads the model that `extension.from` names, if any.

    Returns:
        The settings. The defaults of directories contain the name of the last recipe.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid or incompatible with others.
            The message contains the file and line of settings from a recipe.
    """
    parser = settings_parser(
        RunConfig,
        usage="%(prog)s [--config] RECIPE [--section.key value ...]",
        description=(
            f"{purpose} Settings come from --config and --section.key; later ones override earlier"
            " ones."
        ),
    )
    arguments = sys.argv[1:] if argv is None else argv
    parsed = read_settings(parser, RunConfig, with_config_option(arguments))
    # The advice about missing settings, and the run's name in its default directory.
    fix = "give --config RECIPE, such as --config tape_demo"
    name = "unnamed"
    if parsed.files:
        fix = (
            f"add the missing settings to {' or '.join(parsed.files)}, or give --section.key value"
        )
        name = Path(parsed.files[-1]).stem

    with parsed.add_places_to_errors():
        config = build(RunConfig, with_base_settings(parsed.values, base), fix=fix)
        _ = config.data.source  # for its ConfigError, before other errors about the data
        config = with_directories(resolve_datasets(config), name)
        # The number of processes is not known yet. Assume that of one model replica, the fewest
        # that can train.
        validate(config, world_size=config.parallel.ranks_per_sequence)
    # Only valid settings are printed. The comment makes the output a recipe again.
    if parsed.options.print_config:
        parameters = parameter_count(config.model, config.extension)
        flops = flops_per_token(config.model, config.extension)
        print(f"# {parameters:,} parameters, {flops:,} FLOPs per token")
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def with_config_option(arguments: list[str]) -> list[str]:
    """Return the arguments `RECIPE --section.key value ...` as `--config=RECIPE --section.key value
    ...`. Return other arguments unchanged.
    """
    if not arguments or arguments[0].startswith("-"):
        return arguments
    recipe, *others = arguments
    # An argument such as optimizer.lr=0.1 is a setting without dashes, which the parser refuses
    # with a better message. Only an existing file, such as lr=0.1/config.yaml, is a recipe.
    if "=" in recipe and not Path(recipe).is_file():
        return arguments
    return [f"--config={recipe}", *others]


def with_directories(config: RunConfig, name: str) -> RunConfig:
    """Return `config` with all directories set. The default of `logging.directory` is
    `runs/<name>`.
    """
    # The directory of the run is set first, since that of the checkpoints is inside it by default.
    directory = config.logging.directory or f"runs/{name}"
    config = replace_settings(config, {"logging.directory": directory})
    changes = {
        "checkpoint.directory": config.checkpoint.directory or config.default_checkpoint_directory,
        "data.cache_directory": config.data.resolved_cache_directory,
    }
    return replace_settings(config, changes)
