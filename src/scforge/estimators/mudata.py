"""MuData in place of AnnData: a model works on one modality of it as on an AnnData."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mudata import MuData

from scforge.data.readers import check_modality, shared_columns
from scforge.errors import DataError, GeneMismatchError, OptionError, did_you_mean, listing

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["MuDataModel"]

_LAST = "_scvi_scforge_modality"
"""Key in ``mdata.uns`` with the modality that was set up last."""


class MuDataModel:
    """What a front class adds to :class:`~scforge.estimators.base.CellModel` for MuData."""

    @classmethod
    def setup_mudata(
        cls,
        mdata: MuData,
        modality: str = "rna",
        layer: str | None = None,
        gene_key: str | None = None,
        batch_key: str | None = None,
        labels_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Tell the model where things are in one modality of `mdata`, and check them.

        The model then takes `mdata` wherever it takes an AnnData, and works on ``mdata.mod[modality]``: that is its
        ``adata``, and that is where the embedding is written, ``mdata.mod[modality].obsm["X_scforge"]``.

        Parameters
        ----------
        mdata
            Multimodal data; one modality has raw counts of genes.
        modality
            Name of that modality.
        layer
            Key in its ``layers`` with raw counts; None reads its ``X``.
        gene_key
            Column of its ``var`` with the gene names; None reads its ``var_names``.
        batch_key, labels_key
            Columns of its ``obs``, as in :meth:`setup_anndata`. A column that only ``mdata.obs`` has is copied into
            the ``obs`` of the modality; ``"rna:donor"`` and ``"donor"`` mean the same.
        **kwargs
            As in :meth:`setup_anndata`.

        Raises
        ------
        OptionError
            If `mdata` is no MuData, or has no such modality.
        DataError
            If counts, gene names or columns of the modality cannot be used.

        Notes
        -----
        Models of scvi-tools register fields of several modalities on the MuData. This one needs one modality, so it is
        registered on that, and a model that was trained on a MuData embeds an AnnData, too.

        Examples
        --------
        >>> import mudata, scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> mdata = mudata.MuData({"rna": adata})
        >>> scforge.models.Encoder.setup_mudata(mdata, modality="rna", labels_key="cell_type")
        >>> model = scforge.models.Encoder(mdata)
        >>> model.adata is adata
        True
        """
        if not isinstance(mdata, MuData):
            raise OptionError(f"mdata is of type {type(mdata).__name__!r}; call setup_anndata for an AnnData.")
        check_modality(modality, list(mdata.mod), "mdata")
        if mdata.is_view:
            raise DataError("mdata is a view of another MuData; copy it first with mdata = mdata.copy().")
        adata = mdata.mod[modality]
        keys = {
            name: _adopted(mdata, modality, name, key)
            for name, key in {"batch_key": batch_key, "labels_key": labels_key}.items()
        }
        try:
            cls.setup_anndata(adata, layer=layer, gene_key=gene_key, **keys, **kwargs)  # type: ignore[attr-defined]
        except GeneMismatchError:
            raise
        except DataError as error:
            raise DataError(f"modality={modality!r}: {error}") from error
        manager = cls._get_most_recent_anndata_manager(adata)  # type: ignore[attr-defined]
        manager.update_setup_method_args({"modality": modality})
        mdata.uns[_LAST] = modality

    @classmethod
    def _adata_of(cls, data: Any, modality: str | None = None) -> Any:
        """Return the modality of a MuData that the model works on; anything else as it is.

        `modality` is that of the training data, which counts unless another one is set up and it is not.
        """
        if not isinstance(data, MuData):
            return data
        ready = [name for name, adata in data.mod.items() if cls._setup_of(adata)]  # type: ignore[attr-defined]
        last = data.uns.get(_LAST)
        for name in (modality, last, ready[0] if len(ready) == 1 else None):
            if name in ready:
                return data.mod[name]
        if modality is None:
            call = f"{cls.__name__}.setup_mudata(mdata, modality={(last or 'rna')!r})"
            raise OptionError(f"mdata is not set up, or is a copy of one that was; call {call} first.")
        check_modality(modality, list(data.mod), "mdata")
        return data.mod[modality]

    @classmethod
    def _set_up_as(cls, data: Any, setup: dict[str, Any]) -> Any:
        """Set a MuData up as the training data were, unless it is; return its modality, or anything else as it is."""
        if not isinstance(data, MuData):
            return data
        adata: AnnData = cls._adata_of(data, setup.get("modality"))
        if cls._setup_of(adata) is None:  # type: ignore[attr-defined]
            keys = {key: setup[key] for key in ("batch_key", "labels_key")}
            known = {*adata.obs, *_shared(data, setup["modality"])}
            present = {key: column if column in known else None for key, column in keys.items()}
            cls.setup_mudata(data, **(setup | present))
        return adata


def _shared(mdata: MuData, modality: str) -> Any:
    adata = mdata.mod[modality]
    return shared_columns(mdata.obs, modality, adata.obs_names, list(adata.obs.columns))


def _adopted(mdata: MuData, modality: str, argument: str, key: str | None) -> str | None:
    """Return the name of a column in the obs of the modality, after copying it there if only ``mdata.obs`` has it."""
    if key is None:
        return None
    adata = mdata.mod[modality]
    if key in adata.obs:
        return key
    name = key.removeprefix(f"{modality}:")
    if name not in adata.obs:
        shared = _shared(mdata, modality)
        if name not in shared:
            known = [str(column) for column in (*adata.obs, *shared) if not str(column).startswith("_scvi_")]
            raise DataError(
                f"{argument}={key!r} is a column neither of mdata.mod[{modality!r}].obs nor of mdata.obs"
                f"{did_you_mean(name, known)} (there is: {listing(known)})"
            )
        adata.obs[name] = shared[name]
    return name
