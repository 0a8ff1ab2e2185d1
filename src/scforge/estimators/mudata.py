"""MuData in place of AnnData: a model works on one modality of it as on an AnnData."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mudata import MuData

from scforge.data.readers import shared_columns
from scforge.errors import DataError, did_you_mean, listing

if TYPE_CHECKING:
    pass


LAST = "_scvi_scforge_modality"
"""Key in ``mdata.uns`` with the modality that was set up last."""


def shared(mdata: MuData, modality: str) -> Any:
    adata = mdata.mod[modality]
    return shared_columns(mdata.obs, modality, adata.obs_names, list(adata.obs.columns))


def adopted(mdata: MuData, modality: str, argument: str, key: str | None) -> str | None:
    """Return the name of a column in the obs of the modality, after copying it there if only ``mdata.obs`` has it."""
    if key is None:
        return None
    adata = mdata.mod[modality]
    if key in adata.obs:
        return key
    name = key.removeprefix(f"{modality}:")
    if name not in adata.obs:
        known_to_all = shared(mdata, modality)
        if name not in known_to_all:
            known = [str(column) for column in (*adata.obs, *known_to_all) if not str(column).startswith("_scvi_")]
            raise DataError(
                f"{argument}={key!r} is a column neither of mdata.mod[{modality!r}].obs nor of mdata.obs"
                f"{did_you_mean(name, known)} (there is: {listing(known)})"
            )
        adata.obs[name] = known_to_all[name]
    return name
