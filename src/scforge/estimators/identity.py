"""What tells a model and a source of cells from others, so that work that was begun with them can go on."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import numpy as np
import torch

from scforge.data.cells import Cells, CellSource
from scforge.data.census import SomaCells
from scforge.data.readers import ZarrPlace, open_streams, table_digest
from scforge.data.store import StoreCells, StoreInfo, is_store
from scforge.errors import OptionError
from scforge.estimators.base import CellModel


def model_identity(model: CellModel) -> str:
    """Return the SHA-256 of what an embedding depends on: weights, vocabulary, names and options of the parts."""
    digest = hashlib.sha256(json.dumps(model.spec.to_json(), sort_keys=True).encode())
    digest.update(model.vocab.hash.encode())
    for name, value in sorted(model.module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\0".encode())
        # NumPy has no bfloat16.
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def source_identity(source: Any, cells: Cells, *, layer: str | None, gene_key: str | None) -> dict[str, Any]:
    """Return what changes when the cells do; JSON can hold it.

    Of a store it is the hash of its content, of files their sizes and times of change (so that nothing is read twice),
    of cells in memory a digest of them.

    Parameters
    ----------
    source
        What the user named.
    cells
        What was opened.
    layer, gene_key
        Where counts and names of genes were read from.

    Raises
    ------
    OptionError
        If the cells are of a kind that cannot be told from others.
    """
    if isinstance(cells, StoreCells):
        if is_store(cells.place):
            return {"content_hash": StoreInfo.read(cells.place).content_hash}
        return {"files": ZarrPlace(cells.place).identity()}
    if isinstance(cells, SomaCells):
        return {"place": cells.place, "joinids": hashlib.sha256(cells.joinids).hexdigest()}
    if isinstance(source, str | os.PathLike | list | tuple):
        fingerprints = [stream.fingerprint() for stream in open_streams(source, layer=layer)]
        return {"files": fingerprints, "layer": layer, "gene_key": gene_key}
    if isinstance(cells, CellSource):
        digest = hashlib.sha256(np.ascontiguousarray(cells.totals, dtype=np.float64))
        for part in (cells.counts.indptr.astype(np.int64), cells.counts.indices.astype(np.int64), cells.counts.data):
            digest.update(np.ascontiguousarray(part))
        return {"counts": digest.hexdigest(), "obs": None if cells.obs is None else table_digest(cells.obs)}
    raise OptionError(
        f"source is of type {type(source).__name__!r}, which cannot be told from other cells; give a path, a store or "
        "an AnnData."
    )
