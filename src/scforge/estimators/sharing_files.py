"""Folders that are sent and fetched as they are: ``scforge push`` and ``scforge pull``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge.errors import DataError, MissingFileError, OptionError, first_line
from scforge.estimators.saving import read_folder
from scforge.hub.copying import copy_model
from scforge.hub.finding import resolve
from scforge.hub.shared_files import kind_of_folder
from scforge.hub.uploading import upload

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["pull_folder", "push_folder"]


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    licence: str | None = None,
    data: Sequence[str] | None = None,
    citation: str | None = None,
    metrics: str | os.PathLike[str] | None = None,
    base: str | None = None,
    **options: Any,
) -> str:
    """Send the folder of a model as it is, after a check that it loads; with a new card where one is asked for.

    Parameters
    ----------
    folder, repo_id
        As for :func:`scforge.hub.upload`.
    licence, data, citation
        For the card; see :meth:`scforge.models.Encoder.push_to_hub`.
    metrics
        Table of ``scforge evaluate``, a CSV file, for the card.
    base
        Of adapters, the name of the model that they sit on.
    **options
        Further options of :func:`scforge.hub.upload`.

    Returns
    -------
    URL of the repository, or of the pull request.

    Raises
    ------
    MissingFileError, ModelFileError
        If the folder, or what is in it, cannot be used.
    OptionError, HubError
        If it cannot be sent.
    """
    from scforge.estimators.encoder import Encoder

    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise MissingFileError(f"DIR={str(folder)!r} {what}; give the folder that model.save() wrote.")
    is_adapter = kind_of_folder(path) == "adapter"
    if base is not None and not is_adapter:
        raise OptionError(
            f"base={base!r} (--base) has no use where DIR={str(folder)!r} is a whole model; leave it out."
        )
    told: dict[str, Any] = {"licence": licence, "data": data, "citation": citation}
    if not is_adapter and metrics is None and not any(told.values()):
        read_folder(path)
        return upload(path, repo_id, **options)
    model = Encoder.from_pretrained(path, base=base)
    table = None if metrics is None else _table(metrics)
    return model.push_to_hub(repo_id, metrics=table, adapter_only=is_adapter, base=base, **told, **options)


def pull_folder(
    name: str, output: str | os.PathLike[str] | None = None, *, overwrite: bool = False, **options: Any
) -> Path:
    """Fetch a model, and copy it out of the cache where `output` says where to.

    Parameters
    ----------
    name
        As for :func:`scforge.hub.resolve`.
    output
        Folder to make.
    overwrite
        Replace a folder that exists.
    **options
        Further options of :func:`scforge.hub.resolve`.

    Returns
    -------
    The folder of the model.

    Raises
    ------
    MissingFileError, ModelFileError, OptionError, HubError
        As :func:`scforge.hub.resolve` does.
    """
    folder = resolve(name, **options)
    return folder if output is None else copy_model(folder, output, overwrite=overwrite)


def _table(path: str | os.PathLike[str]) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_csv(path, index_col=0)
    except FileNotFoundError as error:
        raise MissingFileError(f"metrics={str(path)!r} (--metrics) does not exist; name a CSV file.") from error
    except (ValueError, OSError) as error:
        raise DataError(f"metrics={str(path)!r} (--metrics) is no CSV table: {first_line(error)}.") from error
