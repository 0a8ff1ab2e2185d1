"""Configurations that ship with the package, as templates to copy and edit."""

from __future__ import annotations

from pathlib import Path

from scforge.errors import ConfigError, suggest

__all__ = ["list_recipes", "recipe_path"]

_FOLDER = Path(__file__).parent


def list_recipes() -> list[str]:
    """Return the names of the recipes.

    Returns
    -------
    Sorted names for :func:`recipe_path`.

    Examples
    --------
    >>> [name for name in list_recipes() if "auto" in name]
    ['autoregressive', 'masked_autoencoder']
    """
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe.

    Parameters
    ----------
    name
        Name of a recipe, see :func:`list_recipes`.

    Returns
    -------
    The YAML file inside the package.

    Raises
    ------
    ConfigError
        If the recipe does not exist.

    Examples
    --------
    >>> from scforge.config import load_config
    >>> recipe_path("light").name, load_config(recipe_path("light")).data.paths
    ('light.yaml', ['data.h5ad'])
    """
    names = list_recipes()
    if name not in names:
        raise ConfigError(f"is not known{suggest(name, names)}", recipe=name)
    return _FOLDER / f"{name}.yaml"
