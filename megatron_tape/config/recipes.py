"""The recipes of `pretrain/recipes`, which are installed with the package, by name."""

import difflib
import os
from pathlib import Path

from megatron_tape.config.values import expand_path
from megatron_tape.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "pretrain/recipes"
"""Both packages are in one directory, in a checkout as after an installation."""


def find_recipe(given: str) -> str:
    """Return the path of an existing file or, if there is none, of the recipe with this name, such as extend/yarn.

    Raises ConfigError, with the most similar names or else those of all recipes, if there is neither.
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
        similar = difflib.get_close_matches(path.removesuffix(".yaml").lower(), recipes, n=3, cutoff=0.7)
        names = f"such as {', '.join(similar)}" if similar else f"one of {', '.join(recipes)}"
        raise ConfigError(f"recipe {path}", "does not exist", f"give the path of a YAML file, or a recipe: {names}")
    return packaged


def _recipes() -> dict[str, str]:
    """Return the path of each recipe by name, those outside subdirectories first."""
    found = {path.relative_to(RECIPES).with_suffix("").as_posix(): str(path) for path in RECIPES.rglob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: (item[0].count("/"), item[0])))
