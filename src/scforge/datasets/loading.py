"""Loading data sets by name: bundled data sets, and data sets in a user's folder."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from scforge._checks import check_known
from scforge._io import sha256_of
from scforge.data.checks import check_obs_column
from scforge.datasets.bundled import read_bundled
from scforge.datasets.cards import DatasetCard, PertpySource, get_card
from scforge.errors import DataError, MissingFileError

if TYPE_CHECKING:
    from anndata import AnnData


DATA_FOLDER = "SCFORGE_DATA"
"""Environment variable with the folder in which data sets are looked up by name."""


def find_file(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the h5ad file of a data set, from the package, from `folder`, or from ``SCFORGE_DATA``."""
    card, location = get_card(name), _place(folder)
    if card.embedded:
        # The package is a folder: its data are read in place everywhere.
        return Path(str(resources.files("scforge.datasets").joinpath("data", f"{name}.h5ad")))
    if location is not None and (file := Path(location) / f"{name}.h5ad").is_file():
        return file
    where = f"in {str(location)!r}" if location else f"because neither folder nor {DATA_FOLDER} is set"
    raise MissingFileError(
        f"the data set {name!r} was not found {where}; to get {name}.h5ad, {card.how_to_get.rstrip('.')}."
    )


def _place(folder: str | os.PathLike[str] | None) -> str | None:
    return os.environ.get(DATA_FOLDER) if folder is None else os.fspath(folder)


def load(
    name: str, folder: str | os.PathLike[str] | None = None, *, verify: bool = True, download: bool = False
) -> AnnData:
    """Return a data set by its name.

    Parameters
    ----------
    name
        Name of a data set, see :func:`~scforge.datasets.list_cards`.
    folder
        Folder that contains ``<name>.h5ad``. If None, uses the folder in the environment variable ``SCFORGE_DATA``.
        Bundled data are always read from the package.
    verify
        Whether to compare the SHA-256 of the file with the SHA-256 in the card, if the card contains one. Pass False to
        read a file that you created from the source.
    download
        Whether to read the data set with pertpy if the file is not in the folder. Pertpy downloads it once to
        ``scanpy.settings.datasetdir`` (Replogle et al.: gigabytes). Counts are then in ``X``, labels are genes, and
        cells without a known perturbation are removed. To keep the result, write it to ``<name>.h5ad``.

    Returns
    -------
    Annotated data with the columns that the card specifies.

    Raises
    ------
    OptionError
        If there is no card with this name.
    MissingFileError
        If the file is missing; the message explains how to obtain it.
    DataError
        If the file does not match the card, a column is missing, or there are no control cells.

    Examples
    --------
    >>> load("pbmc3k").shape
    (2700, 16634)
    """
    from scforge.data.sources import read_h5ad

    card = get_card(name)
    if card.embedded:
        return read_bundled(name)
    location = _place(folder)
    if download and card.pertpy is not None and not (location and Path(location, f"{name}.h5ad").is_file()):
        return _checked(_from_pertpy(card, card.pertpy), card)
    path = find_file(name, folder)
    if verify and card.sha256 is not None and (checksum := sha256_of(path)) != card.sha256:
        raise DataError(
            f"{str(path)!r} does not match the checksum in the card {name!r} (SHA-256 {checksum}); pass verify=False "
            "to use your own file."
        )
    return _checked(read_h5ad(path), card)


def _checked(adata: AnnData, card: DatasetCard) -> AnnData:
    """Return a data set. Raises an error if columns or control cells of its card are missing."""
    for argument, key in card.columns.items():
        check_obs_column(adata, key, argument=argument)
    if card.perturbation_key is not None:
        labels = adata.obs[card.perturbation_key].unique()
        check_known("control", card.control, labels, f"obs[{card.perturbation_key!r}]", fix="rename the control cells")
    return adata


def _from_pertpy(card: DatasetCard, source: PertpySource) -> AnnData:
    """Return the data that pertpy reads, with counts in X and genes as labels, without unassigned cells."""
    import pandas as pd
    import pertpy

    try:
        adata = getattr(pertpy.data, source.function)()
    except OSError as error:
        raise MissingFileError(
            f"pertpy.data.{source.function}() could not read {card.name!r} ({error}); check the connection and "
            f"scanpy.settings.datasetdir, or put {card.name}.h5ad into the data folder."
        ) from error
    if source.layer is not None:
        check_known("layer", source.layer, adata.layers, "the layers of the file that pertpy reads")
        adata.X = adata.layers.pop(source.layer)
    key = card.perturbation_key
    assert key is not None
    check_obs_column(adata, key, argument="perturbation_key")
    labels = adata.obs[key].astype(object).map(str, na_action="ignore")
    if source.suffix is not None:
        labels = labels.str.replace(source.suffix, "", regex=True)
    labels = labels.where(~labels.isin(source.unassigned)).replace(dict.fromkeys(source.controls, card.control))
    adata.obs[key] = pd.Categorical(labels)
    assigned = labels.notna().to_numpy()
    return adata if assigned.all() else adata[assigned].copy()
