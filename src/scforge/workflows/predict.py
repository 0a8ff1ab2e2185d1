"""Predict with a fine-tuned model, and write the predictions into a file."""

from __future__ import annotations

import os
from typing import Any

import pandas as pd
from anndata import AnnData

from scforge.data.sources import read_h5ad
from scforge.errors import OptionError
from scforge.workflows.embed import chosen_device
from scforge.workflows.models import load_named
from scforge.workflows.outputs import output_file
from scforge.workflows.train import write

_TABLE, _CELLS = ".csv", ".h5ad"


def predict_to(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    batch_size: int = 256,
    device: str = "auto",
    overwrite: bool = False,
    **options: Any,
) -> str:
    """Predict the cells in a file with a fine-tuned model, and write the predictions into a file.

    Parameters
    ----------
    model
        Folder of a fine-tuned model.
    source
        h5ad file, or any other source for :func:`scforge.data.open_cells`.
    output
        Path that ends with ``.csv``, for a table with one row per cell, or with ``.h5ad``, for the cells with
        predictions in ``obs`` or for an AnnData that the task generates.
    batch_size
        Number of cells per batch.
    device
        Device to compute on; ``"auto"`` uses a GPU if available.
    overwrite
        Whether to replace `output`.
    **options
        Options of the task's ``predict``, e.g. ``threshold``.

    Returns
    -------
    A short description of the predictions.

    Raises
    ------
    OptionError
        If the model was not fine-tuned, an option is unknown, or the output format does not support the predictions.
    MissingFileError, ModelFileError, DataError
        If a file cannot be read or is invalid.

    Examples
    --------
    >>> predict_to("annotator", "cells.h5ad", "labels.csv", threshold=0.5)  # doctest: +SKIP
    """
    path = output_file(output, [_TABLE, _CELLS], overwrite=overwrite, inputs=[source])
    prefix = f"model={str(model)!r} (--model)"
    tuned = load_named(model, prefix)
    if tuned.spec.tuning is None and tuned.own_task is None:
        raise OptionError(
            f"{prefix} was not fine-tuned, so it has no task; run scforge finetune --base-model {model} first, or "
            "run scforge embed to embed the cells."
        )
    tuned.to_device(chosen_device(device))
    task: Any = tuned.own_task or tuned.objective
    adata: Any = in_memory(source)
    if task.makes_cells and path.suffix == _TABLE:
        raise OptionError("is a table, but the task generates cells; choose an h5ad file.", output=str(output))
    if adata is None and path.suffix == _CELLS and not task.makes_cells:
        raise OptionError(
            f"requires cells from an h5ad file, but source={str(source)!r}; choose a table as output, e.g. labels.csv.",
            output=str(output),
        )
    cells = tuned.open_cells(source) if adata is None else adata
    found = tuned.predict(cells, batch_size=batch_size, **options)
    if isinstance(found, AnnData):
        write(path, found, overwrite=overwrite)
        return f"{found.n_obs:,} x {found.n_vars:,} predicted values"
    if path.suffix == _CELLS:
        write(path, adata, overwrite=overwrite)
    else:
        table = pd.DataFrame(found).rename_axis("cell")
        if task.learns_labels and (parts := tuned.fitted.parts_of(tuned.open_cells(cells))) is not None:
            table[f"{options.get('key_added') or 'scforge'}_split"] = parts
        write(path, table, overwrite=overwrite)
    return f"{len(found):,} cells"


def in_memory(source: str | os.PathLike[str]) -> AnnData | None:
    """Read an h5ad file into memory, or return None for sources that are read on demand."""
    path = os.fspath(source)
    return read_h5ad([path]) if path.endswith(_CELLS) and "://" not in path and "*" not in path else None
