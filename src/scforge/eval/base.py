"""The benchmark base class and registry, and evaluations that pair a benchmark with a data set."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count
from scforge._columns import check_column, labels_of, texts_of
from scforge._registry import Registry, check_defines, check_options
from scforge.data.cells import Cells, choose_chunks, choose_rows
from scforge.data.paths import is_url, stem_of
from scforge.data.sources import open_cells
from scforge.data.vocab import GeneVocab
from scforge.datasets.cards import get_card, list_cards
from scforge.datasets.loading import DATA_FOLDER, find_file
from scforge.errors import DataError, MissingFileError, OptionError, listing, suggest, warn

KEYS = ("labels_key", "batch_key", "groups_key")
"""Options that name a column of obs. If they are left out, the caller of a benchmark fills them in from the data."""

MIN_GROUPS = 4
"""Minimum number of groups for intervals, because fewer groups do not show how groups differ."""

BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    group="scforge.benchmarks",
    base="scforge.eval.Benchmark",
    members=("metrics",),
    builtin={
        "batch_integration": "scforge.eval.scib",
        "cell_type_annotation": "scforge.eval.label_prediction",
        "cell_type_probe": "scforge.eval.label_prediction",
        "cz_batch_integration": "scforge.eval.cz_benchmarks",
        "cz_clustering": "scforge.eval.cz_benchmarks",
        "cz_embedding": "scforge.eval.cz_benchmarks",
        "cz_label_prediction": "scforge.eval.cz_benchmarks",
        "cz_sequential_organization": "scforge.eval.cz_benchmarks",
        "gene_network": "scforge.eval.networks",
        "generation": "scforge.eval.generation",
        "geometry": "scforge.eval.label_prediction",
        "label_prediction": "scforge.eval.label_prediction",
        "rank_reconstruction": "scforge.eval.rank_reconstruction",
        "perturbation_prediction": "scforge.eval.perturbation",
        "scib": "scforge.eval.scib",
    },
)

HELD_OUT = "held_out"
"""Name of the cells that a data module keeps for validation."""


def has_enough_groups(groups_key: str, n_groups: int) -> bool:
    """Return whether there are enough groups for intervals, and warn if not."""
    if n_groups < MIN_GROUPS:
        warn(
            f"groups_key={groups_key!r} has only {n_groups} scored groups; confidence intervals and tests need at "
            f"least {MIN_GROUPS}."
        )
    return n_groups >= MIN_GROUPS


class Benchmark(ABC):
    """Score the result of any method against a known reference.

    Attributes
    ----------
    subject
        Types of the arguments ``made`` (the scored result) and ``reference``:

        ``"embedding"``
            Cell coordinates, shape (N, D), and the ``obs`` of these cells, N rows.
        ``"perturbation"``
            Predicted cells and measured cells, each an :class:`~anndata.AnnData`.
        ``"network"``
            Edges with the columns ``source``, ``target`` and ``weight``, and the true edges.
        ``"expression"``
            Generated cells and measured cells, each an :class:`~anndata.AnnData` with counts.
        ``"ranking"``
            Reconstructed and true gene orders, int, shape (N, S), padded with -1.
    metrics
        Names of the metrics that :meth:`run` returns.
    lower_is_better
        Metrics for which lower is better.
    main
        Metric used in the verdict; the first metric by default.
    n_draws
        Default number of draws in :meth:`resampled`.
    ranks
        Whether the scores rank methods. If false, methods are not compared, because the scores only warn of problems.

    Examples
    --------
    >>> class Spread(Benchmark):
    ...     metrics = ("total_variance",)
    ...
    ...     def run(self, made, reference):
    ...         return {"total_variance": float(np.var(made, axis=0).sum())}
    >>> Spread().run(np.array([[0.0, 0.0], [2.0, 0.0]]), pd.DataFrame(index=range(2)))
    {'total_variance': 1.0}
    """

    subject: ClassVar[str] = "embedding"
    metrics: tuple[str, ...]
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    main: str = ""
    n_draws: ClassVar[int] = 10
    ranks: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "main" not in vars(cls) and "metrics" in vars(cls):
            cls.main = cls.metrics[0]

    @abstractmethod
    def run(self, made: Any, reference: Any) -> dict[str, float]:
        """Return one score for each metric, or NaN if the metric is undefined.

        Parameters
        ----------
        made
            Result of a method, of the type that :attr:`subject` describes.
        reference
            Reference to score against.
        """

    def check(self, reference: Any) -> None:
        """Raise an error if the reference is unsuitable; called before expensive steps such as training.

        The default, for embeddings, checks that ``labels_key``, ``batch_key`` and ``groups_key`` are columns, if the
        benchmark has these options. Benchmarks with additional requirements override it.

        Parameters
        ----------
        reference
            The reference for :meth:`run`; for embeddings, the cell annotation, N rows.

        Raises
        ------
        DataError
            If a column is missing.
        """
        if self.subject == "embedding":
            for argument in KEYS:
                key = getattr(self, argument, None)
                if key is not None:
                    check_column(argument, key, reference)

    def describe(self, reference: Any) -> dict[str, str]:
        """Return facts for the report, e.g. the number of scored cells; empty by default.

        Parameters
        ----------
        reference
            The reference for :meth:`run`.

        Returns
        -------
        A mapping from the name of each fact to its text.
        """
        return {}

    def resampled(self, made: Any, reference: Any, *, n: int, seed: int) -> pd.DataFrame | None:
        """Return the scores on resampled data, for intervals and paired tests, or None if there are no draws.

        The sampled rows depend only on `reference` and `seed`, so that methods can be compared draw by draw. The
        default, for embeddings, samples random halves of the cells without replacement. Scores of halves vary around
        the score of all cells as much as the latter varies around the true value (delete-half jackknife, Shao and Wu
        1989). Halves preserve the proportion of each label in ``labels_key``. With ``groups_key``, the groups are
        halved instead; with fewer than four groups there are no draws. Draws of b of n groups are rescaled to the
        standard deviation of a bootstrap of the groups, as :meth:`n_units` requires: by sqrt(b / (n - b)), the delete-d
        jackknife, and by sqrt((n - 1) / n), which intervals reverse.

        Parameters
        ----------
        made, reference
            As in :meth:`run`.
        n
            Number of draws.
        seed
            Seed for the draws.

        Returns
        -------
        `n` rows, one column per metric.
        """
        if self.subject != "embedding":
            return None
        embedding = as_array(made)
        n_groups = self.n_units(reference)
        if n_groups is not None and n_groups < MIN_GROUPS:
            return None
        halves = half_samples(
            reference,
            n,
            seed=seed,
            labels_key=getattr(self, "labels_key", None),
            groups_key=getattr(self, "groups_key", None),
        )
        table = self._on_parts(embedding, reference, halves)
        if n_groups is None:
            return table
        n_drawn = n_groups // 2
        scale = np.sqrt(n_drawn / (n_groups - n_drawn) * (n_groups - 1) / n_groups)
        return table.mean() + (table - table.mean()) * scale

    def _on_parts(self, made: np.ndarray, obs: pd.DataFrame, parts: Iterable[np.ndarray]) -> pd.DataFrame:
        """Return the scores on parts of an embedding, one row for each part."""
        figures = []
        for rows in parts:
            try:
                figures.append(self.run(made[rows], obs.iloc[rows]))
            except DataError:
                # A part may have too few cells of a label or batch, and then cannot be scored.
                figures.append(dict.fromkeys(self.metrics, float("nan")))
        return pd.DataFrame(figures, columns=list(self.metrics))

    def n_units(self, reference: Any) -> int | None:
        """Return the number of independent units that :meth:`resampled` samples from, or None if these are cells.

        Few units, e.g. eight donors, are less informative than the number of draws suggests, so intervals are wider and
        tests have fewer degrees of freedom. If a number is returned, draws must vary as in a bootstrap of the units.
        Their standard deviation is too small by a factor of sqrt((n - 1) / n), which is corrected later.
        """
        key = getattr(self, "groups_key", None)
        if key is None or self.subject != "embedding":
            return None
        return len(texts_of(reference[key], key=key, argument="groups_key").categories)


def half_samples(
    obs: pd.DataFrame, n: int, *, seed: int, labels_key: str | None = None, groups_key: str | None = None
) -> Iterator[np.ndarray]:
    """Yield the rows of `n` random halves of the cells (of whole groups with `groups_key`), ascending, int64.

    Halves of cells preserve the proportion of each label in `labels_key`; missing labels count as one label. If the
    number of groups is odd, the smaller half is sampled. With fewer than four groups nothing is sampled, because halves
    do not show how groups differ.
    """
    rng = np.random.default_rng(seed)
    for _ in range(n):
        if groups_key is not None:
            groups = pd.factorize(texts_of(obs[groups_key], key=groups_key, argument="groups_key"))[0]
            n_groups = groups.max() + 1
            if n_groups < MIN_GROUPS:
                return
            taken = rng.permutation(n_groups)[: n_groups // 2]
            yield np.flatnonzero(np.isin(groups, taken))
        else:
            labels = np.zeros(len(obs), dtype=np.int64)
            if labels_key is not None:
                labels = pd.factorize(labels_of(obs[labels_key], key=labels_key))[0]
            # Every second cell of a random order within its label; a label of one cell is taken half of the time.
            order = np.lexsort([rng.random(len(labels)), labels])
            yield np.sort(order[rng.integers(2) :: 2]).astype(np.int64)


def as_array(made: Any, name: str = "the embedding") -> np.ndarray:
    """Return an embedding as a dense array. Sparse matrices and tables are converted.

    Raises
    ------
    DataError
        If it does not contain numbers.
    """
    if sparse.issparse(made):
        made = made.toarray()
    elif isinstance(made, pd.DataFrame):
        if odd := [column for column, dtype in made.dtypes.items() if not pd.api.types.is_numeric_dtype(dtype)]:
            raise DataError(f"{name} has non-numeric columns ({listing(odd)}); remove these columns.")
        kept = {np.dtype(np.float32)} == set(made.dtypes)
        made = made.to_numpy(dtype=np.float32 if kept else np.float64, na_value=np.nan)
    array = np.asarray(made)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{name} has dtype {array.dtype}, which is not numeric; pass an array of numbers.")
    return array


register_benchmark, list_benchmarks = BENCHMARKS.register, BENCHMARKS.names


def get_benchmark(name: str, **options: Any) -> Benchmark:
    """Create the benchmark registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"label_prediction"``.
    **options
        Options for its constructor.

    Returns
    -------
    The benchmark, with these options.

    Raises
    ------
    OptionError
        If the name or an option is unknown, or a required option is missing.

    Examples
    --------
    >>> get_benchmark("label_prediction", labels_key="cell_type").metrics
    ('knn_macro_f1', 'logreg_macro_f1')
    """
    _check_given(name, options)
    return BENCHMARKS.get(name)(**options)


def _check_given(name: str, options: Mapping[str, Any], besides: Sequence[str] = ()) -> None:
    """Raise an error if a benchmark option is unknown, or if a required option is not given by the user or the data."""
    accepted = options_of(name)
    check_options("benchmark option", name, options, list(accepted))
    for option, needed in accepted.items():
        if needed and option not in options and option not in besides:
            what = f"{option}, a column of obs" if option in KEYS else f"the option {option}"
            raise OptionError(f"the benchmark {name!r} requires {what}; pass this argument.")


def options_of(name: str) -> dict[str, bool]:
    """Return a mapping from each option of a benchmark to whether it is required."""
    parameters = inspect.signature(BENCHMARKS.get(name)).parameters
    return {option: parameter.default is parameter.empty for option, parameter in parameters.items()}


def check_scores_embeddings(title: str, subject: str) -> None:
    """Raise :class:`~scforge.errors.OptionError` if a benchmark does not score embeddings."""
    if subject != "embedding":
        raise OptionError(
            f"the benchmark {title!r} scores results of type {subject!r}, not embeddings; use eval.compare."
        )


def title_of(benchmark: Benchmark) -> str:
    """Return the registered name of a benchmark, or the name of its class."""
    return BENCHMARKS.name_of(type(benchmark)) or type(benchmark).__name__


@dataclass(frozen=True)
class Evaluation:
    """One benchmark on one set of cells.

    Parameters
    ----------
    benchmark
        A registered name, or a benchmark.
    name
        Prefix of the scores, ``<name>_<metric>``. If None, uses the name of the benchmark, followed by the name of the
        data set if another evaluation has the same name.
    dataset
        ``"held_out"`` for the cells that the data module keeps for validation; the path or URL of an h5ad file, an
        AnnData-zarr folder or a store; an AnnData; or a name. Names are looked up in `datasets` of the callback, in the
        cards (:func:`scforge.datasets.list_cards`), and as ``NAME.h5ad`` in the folder of the environment variable
        ``SCFORGE_DATA``.
    options
        Options of the benchmark, if it is passed by name. If ``labels_key`` and ``batch_key`` are left out, they come
        from the card of the data set, if it has one, and otherwise from the data module.
    max_cells
        Maximum number of cells to score, sampled once. If None, scores all cells.
    card_columns
        Columns specified by a card, used if neither `options` nor the data module specifies one.

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
        if not isinstance(self.benchmark, Benchmark):
            _check_given(self.benchmark, self.options, besides=KEYS)
        elif self.options:
            raise OptionError("has no effect on a benchmark object; omit options.", options=dict(self.options))
        else:
            check_defines(f"the benchmark {title_of(self.benchmark)!r}", self.benchmark, ("metrics",))

    @property
    def held_out(self) -> bool:
        """Whether the scored cells are those that the data module keeps for validation."""
        return isinstance(self.dataset, str) and self.dataset == HELD_OUT

    @property
    def place(self) -> str:
        """Identifier of the data set."""
        if isinstance(self.dataset, str | os.PathLike):
            return repr(os.fspath(self.dataset))
        return f"the {type(self.dataset).__name__} at {id(self.dataset):#x}"

    @property
    def title(self) -> str:
        """Prefix of the scores, before repeated names are made unique."""
        if self.name is not None:
            return self.name
        return self.benchmark if isinstance(self.benchmark, str) else title_of(self.benchmark)

    @property
    def subject(self) -> str:
        """The subject of the benchmark, see :class:`Benchmark`."""
        benchmark = self.benchmark
        return benchmark.subject if isinstance(benchmark, Benchmark) else BENCHMARKS.get(benchmark).subject

    def missing(self, keys: Mapping[str, str | None]) -> list[str]:
        """Return the missing options of the benchmark; for `keys`, see :meth:`made`."""
        if isinstance(self.benchmark, Benchmark):
            return []
        given = {**self._from_data(keys), **self.options}
        return [key for key, needed in options_of(self.benchmark).items() if needed and given.get(key) is None]

    def made(self, keys: Mapping[str, str | None]) -> Benchmark:
        """Return the benchmark; `keys` contains ``labels_key`` and ``batch_key`` of the data.

        Raises
        ------
        OptionError
            If the benchmark needs a key that is not specified anywhere.
        """
        if isinstance(self.benchmark, Benchmark):
            return self.benchmark
        return get_benchmark(self.benchmark, **{**self._from_data(keys), **self.options})

    def _from_data(self, keys: Mapping[str, str | None]) -> dict[str, str]:
        """Return the columns that the card or data module specifies and the benchmark uses."""
        accepted = options_of(cast("str", self.benchmark))
        columns = {**self.card_columns, **{name: key for name, key in keys.items() if key is not None}}
        return {name: key for name, key in columns.items() if name in accepted}


type Entry = str | Benchmark | Evaluation | Mapping[str, Mapping[str, Any] | None]
"""Allowed entries in a list of benchmarks."""


def to_evaluation(entry: Entry) -> Evaluation:
    """Create an evaluation from a list entry: a name, a benchmark, or ``{name: {option: value, "dataset": ...}}``.

    In addition to the options of the benchmark, a mapping may contain ``dataset``, ``name`` and ``max_cells`` for
    :class:`Evaluation`. If the benchmark has an option with one of these names, the benchmark receives the value.

    Raises
    ------
    OptionError
        If the entry cannot be read, or names an unknown benchmark or option.
    """
    if isinstance(entry, Evaluation):
        return entry
    if not isinstance(entry, Mapping):
        return Evaluation(entry)
    if len(entry) != 1 or not isinstance(next(iter(entry.values())), Mapping | None):
        raise OptionError(f"{dict(entry)} is not a valid benchmark entry; pass one name with a dict of its options.")
    ((benchmark, given),) = entry.items()
    options = dict(given or {})
    theirs = options_of(benchmark) if benchmark in BENCHMARKS.names() else {}
    own = {
        name: options.pop(name) for name in ("dataset", "name", "max_cells") if name in options and name not in theirs
    }
    return Evaluation(benchmark, options=options, **own)


def resolve(evaluations: Sequence[Evaluation], datasets: Mapping[str, Any]) -> list[Evaluation]:
    """Look up the data set of each evaluation, and assign unique names.

    Raises
    ------
    OptionError
        If a data set is unknown, or two evaluations are identical.
    MissingFileError
        If a path does not exist.
    """
    titles = [evaluation.title for evaluation in evaluations]
    resolved: list[Evaluation] = []
    for evaluation in evaluations:
        title = evaluation.title
        if titles.count(title) > 1 and evaluation.name is None and isinstance(evaluation.dataset, str | os.PathLike):
            title = f"{title}_{stem_of(os.fspath(evaluation.dataset))}"
        if any(other.name == title for other in resolved):
            raise OptionError(f"two evaluations have the name {title!r}; set a different name for one of them.")
        resolved.append(
            replace(evaluation, name=title, dataset=_find(evaluation, datasets), **_columns(evaluation, datasets))
        )
    return resolved


def _columns(evaluation: Evaluation, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card's columns for a data set: as options if it was looked up by its card, otherwise as defaults."""
    name, benchmark = evaluation.dataset, evaluation.benchmark
    if not isinstance(name, str) or not isinstance(benchmark, str) or name not in list_cards():
        return {}
    columns = {key: column for key, column in get_card(name).columns.items() if key in options_of(benchmark)}
    if name in datasets or Path(name).exists():
        return {"card_columns": columns}
    return {"options": {**columns, **evaluation.options}}


def _find(evaluation: Evaluation, datasets: Mapping[str, Any]) -> Any:
    """Return the path or name of the data to open, or ``"held_out"``."""
    given = evaluation.dataset
    if not isinstance(given, str | os.PathLike) or evaluation.held_out:
        return given
    name = os.fspath(given)
    location = datasets.get(name, name)
    if not isinstance(location, str | os.PathLike):
        return location
    location = os.fspath(location)
    if is_url(location) or Path(location).exists():
        return location
    if name in datasets or Path(name).suffix or len(Path(name).parts) > 1:
        raise MissingFileError(f"the data set {location!r} of {evaluation.title!r} does not exist; check the path.")
    if name in list_cards():
        return str(find_file(name))
    file = Path(os.environ.get(DATA_FOLDER, f"${DATA_FOLDER}"), f"{name}.h5ad")
    if file.exists():
        return str(file)
    near = suggest(name, [*datasets, *list_cards()])
    raise OptionError(f"is not known{near}; put the file at {file}, or add it to eval.datasets.", dataset=name)


@dataclass(frozen=True)
class ScoredCells:
    """Cells to embed, with their annotation.

    Attributes
    ----------
    cells
        Source of the cells.
    rows
        Rows of the chosen cells, int64, shape (N,).
    obs
        Annotation of the chosen cells, N rows.
    """

    cells: Cells
    rows: np.ndarray
    obs: pd.DataFrame

    @classmethod
    def choose(cls, cells: Cells, rows: np.ndarray | None, max_cells: int | None) -> ScoredCells:
        """Sample at most `max_cells` of the rows of `cells` (of `rows` if not None), with a fixed seed."""
        rows = np.arange(len(cells)) if rows is None else rows
        if max_cells is not None and len(rows) > max_cells:
            # Whole chunks are quick to read, and as good as single cells where the order is random.
            if getattr(cells, "shuffled", False):
                rows = choose_chunks(len(cells), max_cells, cells.chunk_size, rows=rows)
            else:
                rows = choose_rows(len(cells), max_cells, rows=rows)
        return cls(cells, rows, cast("Any", cells).obs.iloc[rows])

    @classmethod
    def open(cls, source: Any, vocab: GeneVocab | None, max_cells: int | None) -> ScoredCells:
        """Open a source and restrict it to the genes in the model vocabulary."""
        return cls.choose(open_cells(source, vocab), None, max_cells)
