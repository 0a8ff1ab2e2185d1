"""What a callback evaluates: which benchmark, on which cells.

Shapes: N cells that are scored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scforge._checks import check_count
from scforge._registry import check_options
from scforge.data.cells import Cells, choose_chunks, choose_rows
from scforge.data.remote import is_url
from scforge.data.sources import open_cells
from scforge.data.vocab import GeneVocab
from scforge.datasets.cards import get_card, list_cards
from scforge.datasets.loading import DATA_FOLDER, find_file
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, listing
from scforge.eval.base import BENCHMARKS, KEYS, Benchmark, get_benchmark, options_of

__all__ = ["HELD_OUT", "Entry", "Evaluation", "ScoredCells", "resolve", "to_evaluation"]

HELD_OUT = "held_out"
"""Name of the cells that a data module keeps for validation."""


@dataclass(frozen=True)
class Evaluation:
    """One benchmark on one set of cells.

    Parameters
    ----------
    benchmark
        A registered name, or a benchmark that was made.
    name
        What its figures are called by, ``<name>_<metric>``; None takes the name of the benchmark, with that of the data
        set behind it if another evaluation has the same.
    dataset
        ``"held_out"`` for the cells that the data module keeps for validation; the path or URL of an h5ad file, an
        AnnData-zarr folder or a store; an AnnData; or a name that `datasets` of the callback knows, that has a card
        (:func:`scforge.datasets.list_cards`), or that the folder in the environment variable ``SCFORGE_DATA`` holds as
        ``NAME.h5ad``.
    options
        Options of the benchmark, where it is given by name. ``labels_key`` and ``batch_key``, if left out, are those of
        the card for a data set that is found by its card, and those of the data module otherwise.
    max_cells
        Score at most so many cells, drawn once; None scores all.
    card_columns
        Columns that a card names, taken where neither `options` nor the data module name one.

    Examples
    --------
    >>> import scforge
    >>> probe = Evaluation("cell_type_annotation", "annotation", options={"labels_key": "cell_type"}, max_cells=2000)
    >>> callback = scforge.eval.BenchmarkCallback([probe], every_n_epochs=5)
    >>> probe.name, probe.dataset
    ('annotation', 'held_out')
    """

    benchmark: Benchmark | str
    name: str | None = None
    dataset: Any = HELD_OUT
    options: Mapping[str, Any] = field(default_factory=dict)
    max_cells: int | None = 10_000
    card_columns: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.max_cells is not None:
            check_count("max_cells", self.max_cells, "cells")
        if isinstance(self.benchmark, Benchmark):
            if self.options:
                raise OptionError(f"options={dict(self.options)} are for a benchmark given by name; leave them out.")
            return
        if not isinstance(self.benchmark, str):
            raise OptionError(f"benchmark={self.benchmark!r} is neither a registered name nor a Benchmark.")
        known = options_of(self.benchmark)
        check_options("benchmark option", self.benchmark, self.options, list(known))
        for option, needed in known.items():
            if needed and option not in self.options and option not in KEYS:
                raise OptionError(f"the benchmark {self.benchmark!r} needs the option {option}; give it.")

    @property
    def held_out(self) -> bool:
        """Whether it scores the cells that the data module keeps for validation."""
        return isinstance(self.dataset, str) and self.dataset == HELD_OUT

    @property
    def place(self) -> str:
        """What tells its data set from others."""
        if isinstance(self.dataset, str | os.PathLike):
            return repr(os.fspath(self.dataset))
        return f"the {type(self.dataset).__name__} at {id(self.dataset):#x}"

    @property
    def title(self) -> str:
        """What its figures are called by, before two of one name are told apart."""
        if self.name is not None:
            return self.name
        if isinstance(self.benchmark, str):
            return self.benchmark
        return BENCHMARKS.name_of(type(self.benchmark)) or type(self.benchmark).__name__

    @property
    def subject(self) -> str:
        """What the benchmark scores, see :class:`Benchmark`."""
        made = self.benchmark
        return made.subject if isinstance(made, Benchmark) else BENCHMARKS.get(made).subject

    def missing(self, keys: Mapping[str, str | None]) -> list[str]:
        """Return the options that the benchmark needs and nobody gives; `keys` as in :meth:`made`."""
        if isinstance(self.benchmark, Benchmark):
            return []
        known = options_of(self.benchmark)
        keys = {**self.card_columns, **{name: key for name, key in keys.items() if key is not None}}
        return [key for key, needed in known.items() if needed and self.options.get(key, keys.get(key)) is None]

    def made(self, keys: Mapping[str, str | None]) -> Benchmark:
        """Return the benchmark; `keys` are ``labels_key`` and ``batch_key`` of the data.

        Raises
        ------
        OptionError
            If it needs a key that nobody names.
        """
        if isinstance(self.benchmark, Benchmark):
            return self.benchmark
        options = dict(self.options)
        keys = {name: self.card_columns.get(name) if key is None else key for name, key in keys.items()}
        for key, needed in options_of(self.benchmark).items():
            if key not in keys or key in options:
                continue
            if keys[key] is not None:
                options[key] = keys[key]
            elif needed:
                raise OptionError(
                    f"the benchmark {self.benchmark!r} needs {key}, a column of obs, but neither its options nor the "
                    f"data name one; give it {key}."
                )
        return get_benchmark(self.benchmark, **options)


type Entry = str | Benchmark | Evaluation | Mapping[str, Mapping[str, Any] | None]
"""What a list of benchmarks may hold."""


def to_evaluation(entry: Entry) -> Evaluation:
    """Make an evaluation of an entry of a list: a name, a benchmark, or ``{name: {option: value, "dataset": ...}}``.

    Beside the options of the benchmark a mapping takes ``dataset``, ``name`` and ``max_cells`` of :class:`Evaluation`;
    an option of that name that the benchmark has goes to the benchmark.

    Raises
    ------
    OptionError
        If the entry cannot be read, or names an unknown benchmark or option.
    """
    if isinstance(entry, Evaluation):
        return entry
    if not isinstance(entry, Mapping):
        return Evaluation(entry)
    if len(entry) != 1:
        raise OptionError(
            f"an entry of benchmarks has the keys {listing(entry)}; write one benchmark an entry, "
            "e.g. cell_type_annotation: {dataset: held_out}."
        )
    ((benchmark, given),) = entry.items()
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(
            f"the benchmark {benchmark!r} is given {given!r}; give it options, e.g. {{dataset: held_out}}."
        )
    options = dict(given or {})
    theirs = options_of(benchmark) if benchmark in BENCHMARKS.names() else {}
    own = {
        name: options.pop(name) for name in ("dataset", "name", "max_cells") if name in options and name not in theirs
    }
    return Evaluation(benchmark, options=options, **own)


def resolve(evaluations: Sequence[Evaluation], datasets: Mapping[str, Any]) -> list[Evaluation]:
    """Find the data set of each, and give each a name of its own.

    Raises
    ------
    OptionError
        If a data set is unknown, or two evaluations cannot be told apart.
    MissingFileError
        If a path does not exist.
    """
    titles = [one.title for one in evaluations]
    resolved: list[Evaluation] = []
    for one in evaluations:
        title = one.title
        if titles.count(title) > 1 and one.name is None and isinstance(one.dataset, str | os.PathLike):
            title = f"{title}_{Path(one.dataset).stem}"
        if any(other.name == title for other in resolved):
            raise OptionError(f"two evaluations are called {title!r}; give one of them a name.")
        resolved.append(replace(one, name=title, dataset=_find(one, datasets), **_columns(one, datasets)))
    return resolved


def _columns(evaluation: Evaluation, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the card of a data set: options where the card finds it, else what nobody else names."""
    name, benchmark = evaluation.dataset, evaluation.benchmark
    if not isinstance(name, str) or not isinstance(benchmark, str) or name not in list_cards():
        return {}
    columns = {key: column for key, column in get_card(name).columns.items() if key in options_of(benchmark)}
    if name in datasets or Path(name).exists():
        return {"card_columns": columns}
    return {"options": {**columns, **evaluation.options}}


def _find(evaluation: Evaluation, datasets: Mapping[str, Any]) -> Any:
    """Return what to open, or ``"held_out"``."""
    given = evaluation.dataset
    if not isinstance(given, str | os.PathLike) or evaluation.held_out:
        return given
    name = os.fspath(given)
    place = datasets.get(name, name)
    if not isinstance(place, str | os.PathLike):
        return place
    place = os.fspath(place)
    if is_url(place) or Path(place).exists():
        return place
    if name in datasets or Path(name).suffix or len(Path(name).parts) > 1:
        raise MissingFileError(
            f"the data set {place!r} of the benchmark {evaluation.title!r} does not exist; check the path."
        )
    if name in list_cards():
        return str(find_file(name))
    folder = os.environ.get(DATA_FOLDER)
    if folder is not None and (file := Path(folder) / f"{name}.h5ad").exists():
        return str(file)
    where = f"${DATA_FOLDER}" if folder is None else folder
    known = f" (datasets has: {listing(datasets)})" if datasets else ""
    near = did_you_mean(name, [*datasets, *list_cards()])
    hint = f"{near} Otherwise" if near else ";"
    raise OptionError(
        f"dataset={name!r} of the benchmark {evaluation.title!r} is not known{hint} put the file at "
        f"{where}/{name}.h5ad{f' and set {DATA_FOLDER}' if folder is None else ''}, or say where it is in "
        f"eval.datasets, {name}: PATH{known}."
    )


@dataclass(frozen=True)
class ScoredCells:
    """Cells to embed, and their annotation.

    Attributes
    ----------
    cells
        Where they come from.
    rows
        Which of them, int64, shape (N,).
    obs
        Annotation of those, N rows.
    """

    cells: Cells
    rows: np.ndarray
    obs: pd.DataFrame

    @classmethod
    def choose(cls, cells: Cells, rows: np.ndarray | None, max_cells: int | None) -> ScoredCells:
        """Take at most `max_cells` of `rows` of `cells` (of all if None), always the same."""
        obs: pd.DataFrame | None = getattr(cells, "obs", None)
        if obs is None:
            raise DataError("the cells have no obs, so there is nothing to score an embedding against.")
        rows = np.arange(len(cells)) if rows is None else rows
        if max_cells is not None and len(rows) > max_cells:
            # Whole chunks are quick to read, and as good as single cells where the order is random.
            if getattr(cells, "shuffled", False):
                rows = choose_chunks(len(cells), max_cells, cells.chunk_size, rows=rows)
            else:
                rows = choose_rows(len(cells), max_cells, rows=rows)
        return cls(cells, rows, obs.iloc[rows])

    @classmethod
    def open(cls, source: Any, vocab: GeneVocab | None, max_cells: int | None) -> ScoredCells:
        """Open a source over the genes of a model."""
        if vocab is None:
            raise OptionError("the training cells have no vocabulary; open them with scforge.data.open_cells.")
        return cls.choose(open_cells(source, vocab), None, max_cells)
