"""Conversion of sources of any size into a store, in two passes with bounded memory.

The first pass reads every source once and scatters its cells to one temporary file for each dataset-to-be; the place
of each cell in the store is drawn before. The second pass brings the cells of one temporary file after the other into
order and writes them as a dataset. So the order is a uniformly random one of all cells, whatever `memory` is.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from scforge._checks import check_bool, check_seed, check_share
from scforge._io import check_folder
from scforge._version import __version__
from scforge.data.convert_errors import check_space, full_disk
from scforge.data.convert_genes import map_sources, warn_outside
from scforge.data.convert_obs import CellNames, CellTable, join_tables
from scforge.data.convert_plan import Layout, parse_bytes
from scforge.data.convert_write import add_medians, add_stored_medians, load_cells, write_dataset
from scforge.data.journal import Journal, Staging, locked
from scforge.data.mapping import MIN_OVERLAP
from scforge.data.medians import StreamingMedians
from scforge.data.scatter import MOST, Buffer, TooLarge, append_segment
from scforge.data.store_files import CHUNK_SIZE, DATASET, StoreInfo, is_store, is_url, partial_path, write_root
from scforge.data.store_hash import content_hash
from scforge.data.streams import CellStream, open_streams
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError

__all__ = ["convert"]

logger = logging.getLogger("scforge")


def convert(
    sources: Any,
    path: str | os.PathLike[str],
    *,
    vocab: str | os.PathLike[str] | GeneVocab | None = None,
    obs: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    memory: int | str = "4GB",
    layer: str | None = None,
    gene_key: str | None = None,
    modality: str | None = None,
    min_overlap: float = MIN_OVERLAP,
    overwrite: bool = False,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreInfo:
    """Convert cells into a store, from which models train however many cells there are.

    The cells of all sources come into one random order, over the genes of one vocabulary. A conversion that was
    interrupted goes on where it was when it is called again with the same arguments. Nothing stands under `path`
    before all of it is written.

    Parameters
    ----------
    sources
        What :func:`scforge.data.open_streams` opens: an AnnData, a path, pattern or URL of h5ad or zarr, or a list.
    path
        Folder of the store, e.g. ``"store.zarr"``, on a local disk.
    vocab
        A vocabulary, the file of one, or the name of a shipped one (see :func:`scforge.data.list_vocabs`). None takes
        all genes of all sources, in order of their first appearance.
    obs
        Columns of ``obs`` to keep; None keeps all that every source has. Columns of text become categories.
    shuffle
        Whether to bring the cells into random order. Without it they stay in the order of the sources.
    seed
        Seed of that order.
    memory
        Most memory that the process may take, e.g. ``"4GB"``, or a number of bytes. More makes larger datasets.
    layer
        Layer with raw counts; None reads X.
    gene_key
        Column of ``var`` with the gene names; None reads ``var_names``.
    modality
        Modality of a MuData.
    min_overlap
        Smallest share of genes of `vocab` that a source must have, see :func:`scforge.data.map_genes`.
    overwrite
        Whether to replace a store that is there, and to drop an unfinished conversion that does not fit this one.
    progress
        Whether to show a bar, where standard error is a terminal.
    storage_options
        Options of a remote file system for the sources, see fsspec.

    Returns
    -------
    The description of the store.

    Raises
    ------
    OptionError
        If `path` exists, another conversion is writing to it, an unfinished one was begun with other options, or
        `memory` is too little.
    MissingFileError
        If a source does not exist.
    DataError
        If a source cannot be used, or has changed since the conversion began, or if the disk is full.
    GeneMismatchError
        If a source has too few genes of the vocabulary.

    Warns
    -----
    ScforgeWarning
        As :func:`scforge.data.open_cells` does, with the name of the source.

    Examples
    --------
    >>> import scforge
    >>> info = convert(scforge.datasets.pbmc3k(), "store.zarr", obs=["cell_type"])
    >>> info.n_cells, info.counts_dtype, info.obs_columns
    (2700, 'uint16', ['cell_type'])
    """
    target = _check_target(path)
    check_bool("shuffle", shuffle)
    check_bool("overwrite", overwrite)
    check_bool("progress", progress)
    check_share("min_overlap", min_overlap)
    options = {
        "layer": layer,
        "gene_key": gene_key,
        "modality": modality,
        "min_overlap": float(min_overlap),
        "obs": None if obs is None else _listed(obs),
        "shuffle": shuffle,
        "seed": check_seed(seed),
        "memory": parse_bytes("memory", memory),
    }
    staging = Staging(partial_path(target))
    _check_free(target, staging, overwrite)
    streams = open_streams(sources, layer=layer, modality=modality, storage_options=storage_options)
    with locked(staging.folder):
        conversion = _Conversion(streams, target, staging, options, vocab, overwrite=overwrite, progress=progress)
        with full_disk(target, conversion.n_bytes):
            return conversion.run()


def _check_target(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OptionError(f"path={path!r} is not the path of a folder; name one such as 'store.zarr'.")
    if is_url(path):
        raise OptionError(f"path={os.fspath(path)!r} is a URL; convert to a local disk, and copy the store there.")
    target = Path(path)
    check_folder("path", target)
    return target


def _listed(obs: Sequence[str]) -> list[str]:
    if isinstance(obs, str) or not all(isinstance(name, str) for name in obs):
        raise OptionError(f"obs={obs!r} is no list of columns; give e.g. obs=['cell_type'].")
    return list(obs)


def _check_free(target: Path, staging: Staging, overwrite: bool) -> None:
    """Raise if a store must not be replaced, after removing what a conversion that was killed at its end has left."""
    if not target.exists() or overwrite:
        return
    if is_store(target) and staging.folder.exists():
        with locked(staging.folder):
            journal = staging.load()
            if journal is not None and journal.finished:
                shutil.rmtree(staging.folder)
    raise OptionError(f"path={str(target)!r} exists; pass overwrite=True (--overwrite) or choose another name.")


class _Conversion:
    """One conversion: its plan, and its steps."""

    def __init__(
        self,
        streams: Sequence[CellStream],
        target: Path,
        staging: Staging,
        options: dict[str, Any],
        vocab: str | os.PathLike[str] | GeneVocab | None,
        *,
        overwrite: bool,
        progress: bool,
    ) -> None:
        self.streams, self.target, self.staging, self.options = streams, target, staging, options
        self.overwrite, self.progress = overwrite, progress
        self.journal: Journal
        self.vocab, self.genes = map_sources(
            streams, vocab, gene_key=options["gene_key"], min_overlap=options["min_overlap"]
        )
        self.table: CellTable = join_tables(streams, options["obs"])
        self.n_cells = sum(stream.n_cells for stream in streams)
        self.layout = Layout.of(
            options["memory"],
            n_cells=self.n_cells,
            n_entries=sum(stream.n_entries for stream in streams),
            n_genes=self.vocab.n_genes,
            row_bytes=self.table.row_dtype.itemsize,
            table_bytes=self.table.n_bytes,
            medians=self.vocab.medians is None,
        )
        self.plan = {
            "sources": [{"name": stream.name, **stream.fingerprint()} for stream in streams],
            **options,
            "vocab": self.vocab.hash,
            "bucket_size": self.layout.bucket_size,
            "n_buckets": self.layout.n_buckets,
            "numpy": np.__version__,  # whose generators may give other numbers in another release
            "scforge": __version__,
        }

    def run(self) -> StoreInfo:
        """Go on from what is done already."""
        self.journal = self._begin()
        if not self.journal.scattered:
            self._scatter()
        vocab = self._write()
        return self._finish(vocab)

    def _begin(self) -> Journal:
        try:
            journal = self.staging.resume(self.plan)
        except (DataError, OptionError):
            if not self.overwrite:
                raise
            self.staging.clear()
            journal = None
        if journal is not None and not journal.finished:
            logger.info("Going on with an unfinished conversion: %d datasets are written.", len(journal.datasets))
            return journal
        self.staging.clear()
        check_space(self.staging.folder, self.n_bytes)
        journal = Journal.begin(self.plan, n_buckets=self.layout.n_buckets, n_sources=len(self.streams))
        self.staging.save(journal)
        return journal

    @property
    def n_bytes(self) -> float:
        """Size of all temporary files, about: each goes when its dataset, which is smaller, is written."""
        entries = sum(genes.share * stream.n_entries for genes, stream in zip(self.genes, self.streams, strict=True))
        return self.layout.entry_bytes * entries + self.table.row_dtype.itemsize * self.n_cells

    def _positions(self) -> np.ndarray | None:
        """Return the place of each cell in the store, shape (n_cells,); None if they keep their order."""
        if not self.options["shuffle"]:
            return None
        positions = np.arange(self.n_cells, dtype=np.uint32 if self.n_cells < 2**32 else np.uint64)
        # Not the seed alone: whoever permutes the cells of the store with the same would bring back the old order.
        np.random.default_rng([self.options["seed"], *b"store"]).shuffle(positions)
        return positions

    def _scatter(self) -> None:
        names = CellNames(self.streams)
        if names.n_changed:
            logger.info(
                "%d cells have a name that another one has; the number of their source is added.", names.n_changed
            )
        positions = self._positions()
        buffer = Buffer(self.layout.buffer_entries, self.vocab.n_genes, self.table.row_dtype)
        if self.journal.wide:
            buffer.widen()
        first = sum(stream.n_cells for stream in self.streams[: self.journal.source]) + self.journal.row
        with self._bar("Reading", first) as bar:
            for number in range(self.journal.source, len(self.streams)):
                before = sum(stream.n_cells for stream in self.streams[:number])
                self._scatter_source(number, before, names, positions, buffer, bar)
        self._flush(buffer, len(self.streams), 0)
        self.journal.scattered = True
        self.staging.save(self.journal)

    def _scatter_source(
        self, number: int, before: int, names: CellNames, positions: np.ndarray | None, buffer: Buffer, bar: Any
    ) -> None:
        stream, genes = self.streams[number], self.genes[number]
        start = self.journal.row if number == self.journal.source else 0
        rows, raw_names = self.table.rows(stream, number)
        cell_names = names(raw_names, number)
        place = np.arange(before, before + stream.n_cells)
        rows["position"] = place if positions is None else positions[place]
        for first, chunk in stream.chunks(start):
            here = slice(first, first + chunk.shape[0])
            if not buffer.takes(chunk.nnz):
                self._flush(buffer, number, first)
            buckets = rows["position"][here] // self.layout.bucket_size
            added, kept = self._add(
                buffer, number, first, (chunk, genes.columns, rows[here], cell_names[here], buckets)
            )
            self.journal.kept[number] += kept
            self.journal.totals[number] += float(added["total"].sum())
            self.journal.n_empty += int((added["length"] == 0).sum())
            bar.update(chunk.shape[0])

    def _add(self, buffer: Buffer, number: int, first: int, cells: tuple[Any, ...]) -> tuple[np.ndarray, float]:
        """Add cells to the buffer, with counts of 32 bits from the first one on that needs them."""
        try:
            return buffer.add(*cells)
        except TooLarge as found:
            stream, gene = self.streams[number], self.vocab.genes[found.gene]
            if found.count > MOST:
                raise DataError(
                    f"{stream.name!r} has the count {found.count:.0f} of {gene!r} in the cell "
                    f"{cells[3][found.row]!r}, but a store holds counts up to {MOST:,}; correct it or remove the cell."
                ) from found
            logger.info("%r has the count %d of %r: the store has counts of 32 bits.", stream.name, found.count, gene)
        self._flush(buffer, number, first)
        buffer.widen()
        self.journal.wide = True
        return self._add(buffer, number, first, cells)

    def _flush(self, buffer: Buffer, number: int, row: int) -> None:
        """Write the cells of the buffer to their files, and then that they are there."""
        for bucket, segment in buffer.segments():
            self.journal.sizes[bucket] = append_segment(self.staging.bucket(bucket), segment)
            self.journal.entries[bucket] += len(segment.genes)
        buffer.clear()
        self.journal.source, self.journal.row = number, row
        self.staging.save(self.journal)

    def _write(self) -> GeneVocab:
        """Write the datasets; return the vocabulary with medians."""
        journal, layout = self.journal, self.layout
        if not sum(journal.entries):
            raise DataError("no cell expresses a gene of the vocabulary; choose another one with vocab.")
        medians = StreamingMedians(self.vocab.n_genes) if self.vocab.medians is None else None
        parts = [
            (bucket, part, n_parts)
            for bucket, n_entries in enumerate(journal.entries)
            for n_parts in [layout.n_parts(bucket, n_entries, wide=journal.wide)]
            for part in range(n_parts)
        ]
        with self._bar("Writing", sum(dataset["n_cells"] for dataset in journal.datasets)) as bar:
            for number, (bucket, part, n_parts) in enumerate(parts):
                folder = self.staging.store / DATASET.format(number)
                if number < len(journal.datasets):
                    if medians is not None:
                        add_stored_medians(medians, folder)
                else:
                    self._write_one(folder, bucket, part, n_parts, medians)
                    bar.update(journal.datasets[-1]["n_cells"])
                if not journal.sizes[bucket]:
                    self.staging.bucket(bucket).unlink(missing_ok=True)
        return self.vocab if medians is None else self.vocab.with_medians(medians.medians())

    def _write_one(self, folder: Path, bucket: int, part: int, n_parts: int, medians: StreamingMedians | None) -> None:
        cells = load_cells(
            self.staging.bucket(bucket),
            self.table,
            self.vocab.n_genes,
            wide=self.journal.wide,
            part=part,
            n_parts=n_parts,
        )
        dataset = write_dataset(folder, cells, self.vocab.genes, self.table)
        if medians is not None:
            add_medians(medians, cells)
        self.journal.datasets.append(dataset)
        if part == n_parts - 1:
            self.journal.sizes[bucket] = 0
        self.staging.save(self.journal)

    def _finish(self, vocab: GeneVocab) -> StoreInfo:
        """Describe the store and give it its name."""
        journal, plan = self.journal, self.plan
        info = StoreInfo(
            n_cells=self.n_cells,
            n_nonzeros=sum(dataset["n_nonzeros"] for dataset in journal.datasets),
            n_genes=vocab.n_genes,
            vocab_hash=vocab.hash,
            counts_dtype="uint32" if journal.wide else "uint16",
            shuffled=plan["shuffle"],
            seed=plan["seed"] if plan["shuffle"] else None,
            chunk_size=CHUNK_SIZE,
            obs_columns=[column.name for column in self.table.columns],
            content_hash=content_hash(vocab.hash, [dataset["hash"] for dataset in journal.datasets]),
            datasets=journal.datasets,
            sources=[
                {**source, "name": name, "overlap": genes.overlap, "counts_kept": kept / total}
                for source, name, genes, kept, total in zip(
                    plan["sources"], self.table.sources, self.genes, journal.kept, journal.totals, strict=True
                )
            ],
            counts_kept=sum(journal.kept) / sum(journal.totals),
            options={key: plan[key] for key in ("layer", "gene_key", "modality", "min_overlap", "obs", "memory")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            scforge_version=__version__,
        )
        write_root(self.staging.store, info, vocab, np.stack([genes.measured for genes in self.genes]))
        warn_outside(self.genes, journal, vocab, [stream.name for stream in self.streams])
        old = self.target.with_name(f".{self.target.name}.old")
        if self.target.exists():
            if not self.overwrite:
                raise OptionError(f"path={str(self.target)!r} exists now; pass overwrite=True (--overwrite).")
            shutil.rmtree(old, ignore_errors=True)
            self.target.rename(old)
        self.staging.store.rename(self.target)
        journal.finished = True
        self.staging.save(journal)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(self.staging.folder)
        return info

    def _bar(self, what: str, first: int) -> Any:
        from tqdm import tqdm

        # None: no bar where standard error is no terminal.
        hidden = None if self.progress else True
        return tqdm(total=self.n_cells, initial=first, desc=what, unit="cell", unit_scale=True, disable=hidden)
