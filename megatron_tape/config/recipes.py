"""The recipes of `pretrain/recipes`, which are installed with the package, by name."""

import os
from pathlib import Path

from megatron_tape.config.values import expand_path
from megatron_tape.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "pretrain/recipes"
"""Both packages are in one directory, in a checkout as after an installation."""


def find_recipe(given: str) -> str:
    """Return the path of an existing file or, if there is none, of the recipe with this name, such as extend/yarn.

    Raises ConfigError, with the names of all recipes, if there is neither.
    """
    path = expand_path(given)
    recipes = _recipes()
    packaged = recipes.get(path.removesuffix(".yaml"))
    try:
        if packaged is None or not os.path.isdir(path):
            os.stat(path)
            return path
    except FileNotFoundError:
        pass
    except OSError:
        return path  # whose reader says why
    if packaged is None:
        fix = f"give the path of a YAML file, or the name of a recipe: {', '.join(recipes)}"
        raise ConfigError(f"recipe {path}", "does not exist", fix)
    return packaged


def _recipes() -> dict[str, str]:
    """Return the path of each recipe by name, those outside subdirectories first."""
    found = {path.relative_to(RECIPES).with_suffix("").as_posix(): str(path) for path in RECIPES.rglob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: (item[0].count("/"), item[0])))
