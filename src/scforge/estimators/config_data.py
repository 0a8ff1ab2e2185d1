"""The cells that the section ``data`` of a configuration names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from anndata import AnnData

from scforge.config.schema import Config, DataConfig
from scforge.data.cells import Cells
from scforge.data.checks import check_obs_column
from scforge.data.readers import open_streams
from scforge.data.sources import AUTO, open_cells, read_h5ad, store_of_large
from scforge.data.store import StoreCells
from scforge.data.vocab import GeneVocab
from scforge.training.datamodule import CellDataModule

if TYPE_CHECKING:
    import numpy as np


logger = logging.getLogger("scforge")

_LARGE = 2**28
"""Bytes of files that may not fit into memory, however well they are packed."""


def open_source(data: DataConfig, vocab: GeneVocab | None = None, *, columns: Sequence[str] = ()) -> AnnData | Cells:
    """Open the cells: an AnnData of plain h5ad files, which an embedding can be written into, or cells elsewhere.

    Parameters
    ----------
    data
        The section.
    vocab
        Genes of a model that is there already; None takes those that the section names.
    columns
        Columns of obs to have at hand, besides those that the section names.
    """
    if data.source != "local":
        from scforge.data.census import CensusQuery

        given = {
            "organism": data.organism,
            "filters": data.filters,
            "census_version": data.census_version,
            "uri": data.uri,
            "layer": data.layer,
            "gene_key": data.gene_key,
            "tiledb_config": data.storage_options,
        }
        query = CensusQuery(
            obs=_columns(data, columns) or [], **{name: value for name, value in given.items() if value is not None}
        )
        return query.open(_vocab(data) if vocab is None else vocab)
    paths = data.paths or []
    elsewhere = (data.cache, data.memory, data.modality, data.storage_options)
    store: Path | None = None
    plain = all(path.endswith(".h5ad") and Path(path).is_file() for path in paths) and elsewhere == (None,) * 4
    if plain and sum(Path(path).stat().st_size for path in paths) > _LARGE:
        streams = open_streams(paths, layer=data.layer)
        store = store_of_large(streams, layer=data.layer, gene_key=data.gene_key, modality=None)
    if plain and store is None:
        logger.info("Reading %s into memory.", ", ".join(paths))
        adata = read_h5ad(paths)
        for column in data.obs_columns or []:
            check_obs_column(adata, column, argument="data.obs_columns")
        return adata
    return open_cells(
        paths,
        _vocab(data) if vocab is None else vocab,
        layer=data.layer,
        gene_key=data.gene_key,
        modality=data.modality,
        obs=_columns(data, columns),
        memory=data.memory,
        cache=data.cache or store or AUTO,
        storage_options=data.storage_options,
    )


def make_datamodule(cells: Cells, config: Config) -> CellDataModule:
    """Make the data module that the configuration describes."""
    data, training = config.data, config.training
    given = {
        # How many fit into memory is tried out when training begins.
        "batch_size": None if training.batch_size == "auto" else training.batch_size,
        "max_tokens_per_batch": data.max_tokens_per_batch,
        "balance_by": data.sampling.balance_key,
        "balance_epochs": data.sampling.warmup_epochs,
        "balance_start": data.sampling.start,
        "balance_end": data.sampling.end,
        "batch_key": data.batch_key,
        "labels_key": data.labels_key,
        "split_by": None if data.split.by == "cell" else data.split.by,
        "num_threads": data.num_threads,
        "pin_memory": data.pin_memory,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return CellDataModule(cells, validation_size=training.validation_size, seed=config.seed, **options)


def embedded_adata(cells: Cells, embedding: np.ndarray, key: str) -> AnnData:
    """Return an AnnData with what is known of each cell and its embedding, but without counts."""
    obs = getattr(cells, "obs", None)
    obs = pd.DataFrame(index=pd.RangeIndex(len(cells))) if obs is None else obs.copy()
    obs.index = pd.Index(cells.names() if isinstance(cells, StoreCells) else obs.index.astype(str))
    return AnnData(obs=obs, obsm={key: embedding})


def _vocab(data: DataConfig) -> str | None:
    return None if data.gene_vocab == "from_data" else data.gene_vocab


def _columns(data: DataConfig, more: Sequence[str]) -> list[str] | None:
    """Return the columns of obs that are needed; None for all."""
    if data.obs_columns is None and data.source == "local":
        return None
    split = None if data.split.by == "cell" else data.split.by
    named = [data.batch_key, data.labels_key, data.sampling.balance_key, split]
    return list(dict.fromkeys([*(data.obs_columns or []), *more, *[column for column in named if column is not None]]))
