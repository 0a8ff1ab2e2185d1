"""The steps of a conversion, each of which can be interrupted."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from scforge._io import swap_in
from scforge._version import __version__
from scforge.data.convert_errors import check_space
from scforge.data.convert_genes import map_sources, warn_outside
from scforge.data.convert_obs import CellNames, CellTable, join_tables
from scforge.data.convert_plan import Layout
from scforge.data.convert_write import add_medians, add_stored_medians, load_cells, write_dataset
from scforge.data.journal import Journal, Staging
from scforge.data.medians import StreamingMedians
from scforge.data.scatter import MOST, Buffer, TooLarge, append_segment
from scforge.data.store_files import CHUNK_SIZE, DATASET, StoreInfo, may_be_replaced, write_root
from scforge.data.store_hash import content_hash
from scforge.data.streams import CellStream
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError

__all__ = ["Conversion"]

logger = logging.getLogger("scforge")


class Conversion:
    """One conversion: its plan, and its steps.

    Parameters
    ----------
    streams
        The sources.
    target
        Path of the store.
    staging
        The folder of the conversion, whose lock is held.
    options
        Arguments of :func:`scforge.data.convert` that the content depends on, and `memory` in bytes.
    vocab, overwrite, progress
        As there.
    """

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
            most_cells=max(stream.n_cells for stream in streams),
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
            # Commits between releases write the same.
            "scforge": __version__.partition(".dev")[0],
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
        if journal is not None:
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
            self.staging.clear()  # there is nothing to continue
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
        with ThreadPoolExecutor(max_workers=1) as pool:
            measured = None if medians is None else pool.submit(add_medians, medians, cells)
            dataset = write_dataset(folder, cells, self.vocab.genes, self.table)
        if measured is not None:
            measured.result()
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
            datasets=journal.datasets,  # type: ignore[arg-type]
            sources=[
                {**source, "name": name, "overlap": genes.overlap, "counts_kept": kept / total}  # type: ignore[typeddict-item]
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
        new = self.staging.store
        if self.target.exists():
            if not self.overwrite:
                raise OptionError(f"path={str(self.target)!r} exists now; pass overwrite=True (--overwrite).")
            if not may_be_replaced(self.target):
                raise OptionError(f"path={str(self.target)!r} exists now and is no store; move it away.")
            # By another name: a conversion that goes on would take what was replaced for its own.
            new = self.staging.folder / "replaced"
            self.staging.store.rename(new)
        swap_in(new, self.target)
        journal.finished = True
        self.staging.save(journal)
        shutil.rmtree(self.staging.folder)
        return info

    def _bar(self, what: str, first: int) -> Any:
        from tqdm import tqdm

        # None: no bar where standard error is no terminal.
        hidden = None if self.progress else True
        return tqdm(total=self.n_cells, initial=first, desc=what, unit="cell", unit_scale=True, disable=hidden)
