"""Data sets by their names: what is embedded, and what lies in a folder of the user."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from scforge._checks import check_known
from scforge._io import sha256_of
from scforge.data.checks import check_obs_column
from scforge.datasets.bundled import read_bundled
from scforge.datasets.cards import get_card
from scforge.errors import DataError, MissingFileError

if TYPE_CHECKING:
    from anndata import AnnData


DATA_FOLDER = "SCFORGE_DATA"
"""Environment variable with the folder of data sets that are known by their names."""


def find_file(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the h5ad file of a data set: that of the package, in `folder`, or where ``SCFORGE_DATA`` says."""
    card = get_card(name)
    if card.embedded:
        # The package is a folder: its data are read in place everywhere.
        return Path(str(resources.files("scforge.datasets").joinpath("data", f"{name}.h5ad")))
    place = os.environ.get(DATA_FOLDER) if folder is None else os.fspath(folder)
    if place is not None and (file := Path(place) / f"{name}.h5ad").is_file():
        return file
    where = f"in {str(place)!r}" if place else f"here, and {DATA_FOLDER}, the folder to look in, is not set"
    raise MissingFileError(f"the data set {name!r} is not {where}; to get {name}.h5ad, {card.how_to_get.rstrip('.')}.")


def load(name: str, folder: str | os.PathLike[str] | None = None, *, verify: bool = True) -> AnnData:
    """Return a data set by its name.

    Parameters
    ----------
    name
        One of :func:`~scforge.datasets.list_cards`.
    folder
        Folder that holds ``<name>.h5ad``; None takes the one in the environment variable ``SCFORGE_DATA``. What is
        embedded is always taken from the package.
    verify
        Compare the SHA-256 of the file with that of the card, where it has one. Pass False to read a file that you made
        yourself from the source.

    Returns
    -------
    Annotated data with the columns that the card names.

    Raises
    ------
    OptionError
        If there is no card of that name.
    MissingFileError
        If the file is missing; the message explains how to obtain it.
    DataError
        If it is another file than that of the card, lacks a column, or has no control cells.

    Examples
    --------
    >>> load("pbmc3k").shape
    (2700, 16634)
    """
    from scforge.data.sources import read_h5ad

    card = get_card(name)
    if card.embedded:
        return read_bundled(name)
    path = find_file(name, folder)
    if verify and card.sha256 is not None and (found := sha256_of(path)) != card.sha256:
        raise DataError(
            f"{str(path)!r} is not the file of the card {name!r} (SHA-256 {found}); pass verify=False for your own."
        )
    adata = read_h5ad(path)
    for argument, key in card.columns.items():
        check_obs_column(adata, key, argument=argument)
    if card.perturbation_key is not None:
        labels = adata.obs[card.perturbation_key].unique()
        check_known(
            "control", card.control, labels, f"{card.perturbation_key!r} of obs", fix="rename the control cells"
        )
    return adata
