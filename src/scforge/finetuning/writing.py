"""Tables of predictions in an AnnData."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scforge._constants import UNS_KEY

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["write_probabilities"]


def write_probabilities(adata: AnnData, key: str, table: pd.DataFrame) -> None:
    """Write a table of one column a class into ``obsm["<key>_probabilities"]``, and the names of its columns into uns.

    An h5ad file takes no table with a name such as ``"NK/T"``.
    """
    adata.obsm[f"{key}_probabilities"] = np.asarray(table)
    names = np.array([str(name) for name in table.columns], dtype=object)
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), f"{key}_classes": names}
