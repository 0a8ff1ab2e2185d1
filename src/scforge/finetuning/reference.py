"""Labeled reference cells that are saved with a model, so that it can label cells without its training data.

Shapes: R cells, G genes of the model, Z counts that are not zero.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._columns import labels_of, texts_of
from scforge.data.cells import Cells, CellSource, choose_chunks
from scforge.data.vocab import GeneVocab
from scforge.errors import ModelFileError, first_line
from scforge.finetuning.new_cells import choose_labeled
from scforge.hub.finding import REFERENCE

MOST_CELLS = 20_000
"""Maximum number of reference cells that labels are learned from, and that are saved with a model."""
_CANDIDATES = 10
"""Number of cells of a store that are looked at for each cell that is chosen."""


def choose_reference(
    cells: Cells, labels_key: str, batch_key: str | None, *, most: int = MOST_CELLS, seed: int = 0
) -> CellSource | None:
    """Return at most `most` labeled cells with only their labels and batches, or None for fewer than two labels.

    Half of the cells are shared equally among the labels, as in
    :func:`~scforge.finetuning.new_cells.choose_labeled`. Of a store, only cells in random chunks are considered. Names
    of cells are left out.
    """
    labels = labels_of(cells.column(labels_key), key=labels_key)
    rows = np.flatnonzero(labels.codes >= 0)
    if cells.chunk_size > 1:  # a store, in which random cells are in all chunks
        rows = choose_chunks(len(cells), _CANDIDATES * most, cells.chunk_size, rows=rows, seed=seed)
    codes = np.asarray(labels.codes)[rows]
    if len(np.unique(codes)) < 2:
        return None
    rows = rows[choose_labeled(codes, seed=seed, most=most)]
    obs = {labels_key: labels[rows].remove_unused_categories()}
    if batch_key is not None and batch_key != labels_key:
        obs[batch_key] = texts_of(cells.column(batch_key).iloc[rows], key=batch_key, argument="batch_key")
    chosen = cells.sample(len(rows), rows=rows)
    return replace(chosen, obs=pd.DataFrame(obs))


def write_reference(reference: CellSource, folder: Path) -> None:
    """Write reference cells into a model folder, with the smallest types that hold their numbers."""
    from safetensors.numpy import save_file

    counts = reference.counts
    arrays = {
        "data": _smallest(counts.data),
        "indices": _smallest(counts.indices),
        "indptr": counts.indptr.astype(np.int64),
        "totals": reference.totals,
        "measured": np.ones(counts.shape[1], dtype=bool) if reference.measured is None else reference.measured,
        "fractions": np.array([reference.overlap, reference.counts_kept]),
    }
    assert reference.obs is not None  # it has labels
    names = {}
    for number, (key, values) in enumerate(reference.obs.items()):
        arrays[f"codes{number}"] = values.cat.codes.to_numpy(dtype=np.int32)
        names[str(key)] = list(values.cat.categories)
    save_file(arrays, folder / REFERENCE, metadata={"columns": json.dumps(names)})


def read_reference(path: Path, vocab: GeneVocab) -> CellSource:
    """Read the file that :func:`write_reference` wrote; `vocab` contains the genes of the model.

    Raises
    ------
    ModelFileError
        If the content is invalid.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
            columns: dict[str, list[str]] = json.loads((file.metadata() or {})["columns"])
        totals, measured, indices = arrays["totals"], arrays["measured"], arrays["indices"].astype(np.int32)
        matrix = sparse.csr_matrix(
            (arrays["data"], indices, arrays["indptr"]), shape=(len(totals), vocab.n_genes), copy=False
        )
        matrix.check_format(full_check=True)
        obs = {
            key: pd.Categorical.from_codes(arrays[f"codes{number}"], list(map(str, names)))
            for number, (key, names) in enumerate(columns.items())
        }
        is_valid = (
            matrix.has_canonical_format and bool((matrix.data > 0).all()) and bool(np.isfinite(matrix.data).all())
        )
        is_valid &= totals.dtype == np.float64 and bool(np.isfinite(totals).all()) and bool((totals >= 0).all())
        is_valid &= measured.dtype == bool and len(measured) == vocab.n_genes and bool(obs)
        is_valid &= all(len(codes) == len(totals) for codes in obs.values())
        overlap, counts_kept = map(float, arrays["fractions"])
        reference = CellSource(matrix, totals, overlap, counts_kept, measured, vocab, pd.DataFrame(obs))
    except (SafetensorError, AttributeError, KeyError, OSError, TypeError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{str(path)!r} cannot be read: {first_line(error)}; copy the model again.") from error
    if not is_valid:
        raise ModelFileError(f"{str(path)!r} contains invalid counts; copy the model again.")
    return reference


def _smallest(values: np.ndarray) -> np.ndarray:
    """Return numbers that are not negative in the smallest type that holds them exactly, else as float32."""
    whole = values.dtype.kind in "iu" or bool((values == np.floor(values)).all())
    largest = float(values.max(initial=0))
    for kind in (np.uint8, np.uint16, np.uint32):
        if whole and largest <= np.iinfo(kind).max:
            return values.astype(kind)
    return values.astype(np.float32)
