"""Find recipes (YAML files of settings) by path or, for those in `pretrain/recipes`, by name."""

import difflib
import os
from pathlib import Path

from megatron_tape.config.values import expand_path
from megatron_tape.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "pretrain/recipes"
"""The packages pretrain and megatron_tape are in the same directory, both in a clone and when
installed.
"""


def find_recipe(path_or_name: str) -> str:
    """Return the path of a recipe, given as a path or as a name in `pretrain/recipes`, such as
    `extend/yarn`.

    An existing file has precedence over a recipe of the same name. Raises ConfigError if neither
    exists; the message lists recipes with similar names, or all recipes if there are none.
    """
    path = expand_path(path_or_name)
    name = path.removesuffix(".yaml")
    recipes = _recipes()

    if name in recipes and not os.path.isfile(path):
        return recipes[name]
    if os.path.lexists(path):
        return path  # if it is not a file, reading it raises a clear error
    # The default cutoff of 0.6 would also list recipes with unrelated names.
    names = difflib.get_close_matches(name.lower(), recipes, n=3, cutoff=0.7) or recipes
    raise ConfigError(
        f"recipe {path}",
        "does not exist",
        f"give the path of a YAML file, or the name of a recipe, such as {', '.join(names)}",
    )


def _recipes() -> dict[str, str]:
    """Return the paths of all recipes in `pretrain/recipes` by name, such as `extend/yarn`. Recipes
    in subdirectories come last.
    """
    paths = sorted(RECIPES.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): str(path) for path in paths}
