"""Append cells to a store: what the store determines for new cells, and the description of the grown store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd

from scforge.data.genes import GeneMap
from scforge.data.joining import StoredObs
from scforge.data.paths import is_url
from scforge.data.readers import ChunkReader, identity_of, resolved
from scforge.data.remote import open_group, reading
from scforge.data.store import DATASET, SOURCE, TOTAL, StoreInfo, content_hash, has_checksums, read_measured, read_vocab
from scforge.data.vocab import GeneVocab, open_vocab
from scforge.errors import DataError, OptionError, listing, spelled, warn

_SAMPLED = 4096
"""Number of cells of the store that are read to estimate the counts of each gene."""

_OF_STORE = {"name", "overlap", "counts_kept"}
"""Keys that describe a source in a store, in addition to its fingerprint."""


@dataclass(frozen=True)
class StoreEnd:
    """What a store determines for the cells that are appended to it.

    Attributes
    ----------
    info
        Description of the store.
    vocab
        Its vocabulary, which does not change, including the medians.
    measured
        Genes of each source, bool, shape (n_sources, n_genes).
    obs
        Its cell table, without values.
    total, kept
        Sum of all counts, and of those in vocabulary genes.
    of_genes
        Estimated fraction of the counts in each gene, shape (n_genes,).
    """

    info: StoreInfo
    vocab: GeneVocab
    measured: np.ndarray
    obs: StoredObs
    total: float
    kept: float
    of_genes: np.ndarray

    @classmethod
    def read(cls, store: Path) -> StoreEnd:
        """Read the end of a local store."""
        info = StoreInfo.read(store)
        group: Any = open_group(store)
        if not has_checksums(group):
            raise DataError(f"{str(store)!r} was written by scforge 0.1.0, without checksums; convert the data again.")
        numbers = range(len(info.datasets))
        with reading(f"the store {str(store)!r}", fix="copy the store again, or convert the data again"):
            last = group[f"{DATASET.format(numbers[-1])}/obs"]  # with all categories
            columns = {name: anndata.io.read_elem(last[name])[:0] for name in info.obs_columns}
            sources = anndata.io.read_elem(last[SOURCE]).categories
            totals = (anndata.io.read_elem(group[f"{DATASET.format(number)}/obs/{TOTAL}"]) for number in numbers)
            total = float(sum(values.sum() for values in totals))
            of_genes = np.zeros(info.n_genes)
            for number, dataset in enumerate(info.datasets):
                n_sampled = -(-_SAMPLED * dataset["n_cells"] // info.n_cells)
                sample = anndata.io.sparse_dataset(group[f"{DATASET.format(number)}/X"])[:n_sampled]
                of_genes += np.bincount(sample.indices, sample.data, minlength=info.n_genes)

        def has(names: pd.Index) -> np.ndarray:
            new, taken = set(names), set()
            for number in numbers:
                table = group[f"{DATASET.format(number)}/obs"]
                stored = table[table.attrs["_index"]]
                # Not by anndata and pandas, which take ten times as long. A group has the text and its mask.
                taken |= new.intersection((stored["values"] if hasattr(stored, "arrays") else stored)[:].tolist())
            return np.array([name in taken for name in names], dtype=bool)

        obs = StoredObs(columns, [str(name) for name in sources], has)
        vocab, measured = read_vocab(group), read_measured(group)
        return cls(info, vocab, measured, obs, total, info.counts_kept * total, of_genes / max(of_genes.sum(), 1.0))

    def check_options(
        self, vocab: GeneVocab | str | Any | None, columns: Sequence[str] | None, *, shuffle: bool
    ) -> None:
        """Raise an OptionError if options contradict the store."""
        if vocab is not None and open_vocab(vocab).genes != self.vocab.genes:
            raise OptionError("has other genes than the store, whose vocabulary is kept; omit it.", argument="vocab")
        if columns is not None and set(columns) != set(self.info.obs_columns):
            have = listing(self.info.obs_columns) or "no columns"
            raise OptionError(f"differs from the columns of the store, which are kept ({have}); omit it.", obs=columns)
        if shuffle != self.info.shuffled:
            order = "random order" if self.info.shuffled else "the order of the sources"
            how = f"pass {spelled('shuffle=False', '--no-shuffle')}" if shuffle else "omit it"
            raise OptionError(f"differs from the store, whose cells are in {order}; {how}.", shuffle=shuffle)

    def check_new(self, streams: Sequence[ChunkReader], described: Sequence[Mapping[str, Any]]) -> None:
        """Raise an OptionError if the store contains a source already."""
        stored = [_fingerprint(source) for source in self.info.sources]
        again = [source["name"] for source in described if _fingerprint(source) in stored]
        if again:
            rest = "nothing to append" if len(again) == len(described) else "omit what is there"
            raise OptionError(f"contains {listing(again)}, which is in the store already; {rest}.", argument="sources")
        # A relative name may have been that of a file in another folder.
        names = [source["name"] for source in self.info.sources]
        absolute = {resolved(name) for name in names if is_url(name) or Path(name).is_absolute()}
        for stream in streams:
            if hasattr(stream, "address") and identity_of(stream) in absolute:  # a file, not cells in memory or a query
                raise OptionError(
                    f"contains {stream.name!r}, of which the store has an earlier version; convert all data again, or "
                    "write the new cells to a file of another name.",
                    argument="sources",
                )

    def warn_outside(self, streams: Sequence[ChunkReader], maps: Sequence[GeneMap], kept: Sequence[float]) -> None:
        """Warn about genes outside the vocabulary, given the fraction of the counts of each source that is in it."""
        for stream, gene_map, share in zip(streams, maps, kept, strict=True):
            outside = int((gene_map.columns < 0).sum())
            if outside:
                warn(
                    f"{stream.name!r}: {outside:,} of {len(gene_map.columns):,} genes, with {1 - share:.1%} of the "
                    "counts, are not in the vocabulary of the store and are left out; their counts remain in the "
                    "library size."
                )

    def grown(self, new: StoreInfo, total: float) -> StoreInfo:
        """Return the description of the store with new cells, whose sum of all counts is `total`."""
        old = self.info
        datasets, everything = [*old.datasets, *new.datasets], self.total + total
        return replace(
            old,
            n_cells=old.n_cells + new.n_cells,
            n_nonzeros=old.n_nonzeros + new.n_nonzeros,
            content_hash=content_hash(old.vocab_hash, [dataset["hash"] for dataset in datasets]),
            datasets=datasets,
            sources=[*old.sources, *new.sources],
            counts_kept=min(1.0, (self.kept + new.counts_kept * total) / everything),
            options={
                **old.options,
                "appended": [
                    *old.options.get("appended", []),
                    {"n_cells": new.n_cells, "seed": new.seed, **new.options, "created": new.created},
                ],
            },
            created=new.created,
            scforge_version=new.scforge_version,
        )


def _fingerprint(source: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a source and its version; files of one size and time may differ."""
    version = {key: value for key, value in source.items() if key not in _OF_STORE}
    return resolved(source["name"]), json.dumps(version, sort_keys=True)
