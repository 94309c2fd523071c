"""Find recipes (YAML files of settings) by path or, for those in `pretrain/recipes`, by name."""

import difflib
import os
from collections.abc import Iterable
from functools import partial
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
    exists; the message suggests recipes with similar names, if there are any.
    """
    path = expand_path(path_or_name)
    name = path.removesuffix(".yaml")
    recipes = _recipes()

    if name in recipes and not os.path.isfile(path):
        return recipes[name]
    if os.path.lexists(path):
        return path  # if it is not a file, reading it raises a clear error
    fix = f"give the path of a YAML file, or the name of a recipe in {RECIPES}, such as tape_demo"
    similar = _similar(name.lower(), recipes)
    if similar:
        fix = f"did you mean {' or '.join(similar)}? Or give the path of a YAML file"
    raise ConfigError(f"recipe {path}", "does not exist", fix)


def _similar(name: str, recipes: Iterable[str]) -> list[str]:
    """Return up to three names of recipes that are similar to `name`; if there are none, names
    whose last part is, such as `compare/ladder` for `ladder`.
    """
    # The default cutoff of 0.6 would also return unrelated names.
    closest = partial(difflib.get_close_matches, n=3, cutoff=0.7)
    similar = closest(name, recipes)
    if similar:
        return similar
    by_last_part = {}
    for recipe in recipes:
        by_last_part.setdefault(recipe.rpartition("/")[2], recipe)
    return [by_last_part[part] for part in closest(name.rpartition("/")[2], by_last_part)]


def _recipes() -> dict[str, str]:
    """Return the paths of all recipes in `pretrain/recipes` by name, such as `extend/yarn`. Recipes
    in subdirectories come last.
    """
    paths = sorted(RECIPES.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): str(path) for path in paths}
