"""What a benchmark is, and the registry of benchmarks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._registry import Registry, check_options
from scforge.errors import DataError, OptionError, did_you_mean, listing

__all__ = [
    "BENCHMARKS",
    "SUBJECTS",
    "Benchmark",
    "as_array",
    "check_column",
    "get_benchmark",
    "half_samples",
    "list_benchmarks",
    "options_of",
    "register_benchmark",
]

KEYS = ("labels_key", "batch_key", "groups_key")
"""Options that name a column of obs; who runs a benchmark fills them in from the data where they are left out."""

_FEWEST_GROUPS = 4
"""Groups whose halves are several groups, and differ."""
SUBJECTS = ("embedding", "perturbation", "network", "expression", "ranking")


class Benchmark(ABC):
    """Scores what a method made against what is known, whatever the method is.

    Attributes
    ----------
    subject
        What is scored, ``made``, and against what, ``reference``:

        ``"embedding"``
            Coordinates of cells, shape (N, D); their ``obs``, N rows.
        ``"perturbation"``
            Predicted cells and measured cells, each an :class:`~anndata.AnnData`.
        ``"network"``
            Edges with the columns ``source``, ``target`` and ``weight``; true edges.
        ``"expression"``
            Generated cells and measured cells, each an :class:`~anndata.AnnData` with counts.
        ``"ranking"``
            Orders of genes that were reconstructed, and the true ones, int, shape (N, S) with -1 behind the last.
    metrics
        Names of the figures that :meth:`run` returns.
    lower_is_better
        Those of them in which less is better.
    main
        The one that a sentence about the outcome speaks of; the first, if a class names none.
    n_draws
        Draws of :meth:`resampled` that are worth their time.
    ranks
        Whether a better figure is a better method. Without, methods are not compared: the figures warn of something.

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
        if cls.subject not in SUBJECTS:
            raise OptionError(f"subject={cls.subject!r} of {cls.__name__} is none of {listing(SUBJECTS)}.")
        if "main" not in vars(cls) and "metrics" in vars(cls):
            cls.main = cls.metrics[0]

    @abstractmethod
    def run(self, made: Any, reference: Any) -> dict[str, float]:
        """Return one figure for each metric; NaN where one is not defined.

        Parameters
        ----------
        made
            What a method made, as :attr:`subject` says.
        reference
            What it is scored against.
        """

    def check(self, reference: Any) -> None:
        """Raise where nothing can be scored against this; called before time is spent, e.g. on training.

        Here, for embeddings: where ``labels_key``, ``batch_key`` or ``groups_key``, if the benchmark has them, is not a
        column. A benchmark that needs more than that overrides it.

        Parameters
        ----------
        reference
            What :meth:`run` is going to see; for embeddings the annotation of the cells, N rows.

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
        """Return what a report says of this benchmark on these data, e.g. how many cells are scored; here, nothing.

        Parameters
        ----------
        reference
            What :meth:`run` sees.

        Returns
        -------
        Name of a fact to the fact.
        """
        return {}

    def resampled(self, made: Any, reference: Any, *, n: int, seed: int) -> pd.DataFrame | None:
        """Return the figures on resampled data, for intervals and paired tests; None where there are none.

        The rows that are drawn depend on `reference` and `seed` alone, so that methods can be compared draw by draw.
        Here, for embeddings: on random halves of the cells, drawn without replacement, which spread as much around the
        figure of all cells as that does around the truth (Shao and Wu 1989, the delete-half jackknife). Halves keep the
        share of each label of ``labels_key``; with ``groups_key`` they are halves of the groups, and there are none
        with fewer than four groups. Draws of b of n groups are brought from the spread of halves to that of a
        bootstrap of the groups, as :meth:`n_units` asks for: times sqrt(b / (n - b)) for their number, the delete-d
        jackknife, and sqrt((n - 1) / n), which intervals take back.

        Parameters
        ----------
        made, reference
            As in :meth:`run`.
        n
            Number of draws.
        seed
            Seed of the draws.

        Returns
        -------
        `n` rows, one column a metric.
        """
        if self.subject != "embedding":
            return None
        made = as_array(made)
        n_groups = self.n_units(reference)
        if n_groups is not None and n_groups < _FEWEST_GROUPS:
            return None
        halves = half_samples(
            reference,
            n,
            seed=seed,
            labels_key=getattr(self, "labels_key", None),
            groups_key=getattr(self, "groups_key", None),
        )
        table = self._on_parts(made, reference, halves)
        if n_groups is None:
            return table
        n_drawn = n_groups // 2
        scale = np.sqrt(n_drawn / (n_groups - n_drawn) * (n_groups - 1) / n_groups)
        return table.mean() + (table - table.mean()) * scale

    def _on_parts(self, made: np.ndarray, obs: pd.DataFrame, parts: Iterable[np.ndarray]) -> pd.DataFrame:
        """Return the figures on these rows of an embedding, a row for each part."""
        figures = []
        for rows in parts:
            try:
                figures.append(self.run(made[rows], obs.iloc[rows]))
            except DataError:
                # A part may have too few cells of a label or batch; the draw tells nothing then.
                figures.append(dict.fromkeys(self.metrics, float("nan")))
        return pd.DataFrame(figures, columns=list(self.metrics))

    def n_units(self, reference: Any) -> int | None:
        """Return how many independent units :meth:`resampled` draws among; None for cells, which are many.

        Few of them, e.g. eight donors, tell less than the number of draws suggests: intervals are wider by that, and
        tests have fewer degrees of freedom. Where a number is returned, the draws have to spread as a bootstrap of the
        units does, which is by sqrt((n - 1) / n) too little; this is made up for.
        """
        key = getattr(self, "groups_key", None)
        return None if key is None or self.subject != "embedding" else int(reference[key].nunique())


def half_samples(
    obs: pd.DataFrame, n: int, *, seed: int, labels_key: str | None = None, groups_key: str | None = None
) -> Iterator[np.ndarray]:
    """Yield rows of random halves, ascending, int64.

    Parameters
    ----------
    obs
        Annotation of the cells, N rows.
    n
        Number of halves.
    seed
        Seed.
    labels_key
        Keep the share of each of these labels; missing ones count as one label.
    groups_key
        Draw whole groups in place of cells, the smaller half of an odd number; then labels do not matter. With fewer
        than four groups nothing is yielded, since no half tells how groups differ.
    """
    rng = np.random.default_rng(seed)
    for _ in range(n):
        if groups_key is not None:
            groups = pd.factorize(obs[groups_key])[0]
            n_groups = groups.max() + 1
            if n_groups < _FEWEST_GROUPS:
                return
            taken = rng.permutation(n_groups)[: n_groups // 2]
            yield np.flatnonzero(np.isin(groups, taken))
        else:
            labels = np.zeros(len(obs), dtype=np.int64) if labels_key is None else pd.factorize(obs[labels_key])[0]
            # Every second cell of a random order within its label; a label of one cell is taken half of the time.
            order = np.lexsort([rng.random(len(labels)), labels])
            yield np.sort(order[rng.integers(2) :: 2]).astype(np.int64)


def as_array(made: Any) -> np.ndarray:
    """Return an embedding as an array: a dense one of a sparse matrix, and the numbers of a table.

    Raises
    ------
    DataError
        If it does not hold numbers.
    """
    if sparse.issparse(made):
        made = made.toarray()
    elif isinstance(made, pd.DataFrame):
        if odd := [name for name, dtype in made.dtypes.items() if not pd.api.types.is_numeric_dtype(dtype)]:
            raise DataError(f"the embedding has columns that are not numbers ({listing(odd)}); leave them out.")
        made = made.to_numpy(dtype=np.result_type(np.float32, *(_numpy_type(dtype) for dtype in made.dtypes)))
    array = np.asarray(made)
    if array.dtype.kind not in "fiub":
        raise DataError(f"the embedding holds {array.dtype} in place of numbers; give an array of numbers.")
    return array


def _numpy_type(dtype: Any) -> np.dtype:
    # Nullable columns, e.g. Float64, may lack values, which are NaN.
    return dtype if isinstance(dtype, np.dtype) else np.dtype(np.float64)


def check_column(argument: str, key: str, obs: pd.DataFrame) -> None:
    """Raise :class:`~scforge.errors.DataError` unless obs has the column `key`."""
    if key not in obs:
        columns = [column for column in obs.columns if not str(column).startswith("_scvi_")]
        raise DataError(
            f"{argument}={key!r} is not a column of obs{did_you_mean(key, columns)} (obs has: {listing(columns)})"
        )


BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    group="scforge.benchmarks",
    base="scforge.eval.Benchmark",
    builtin={
        "batch_integration": "scforge.eval.batch_integration",
        "cell_type_annotation": "scforge.eval.cell_type_annotation",
        "cell_type_probe": "scforge.eval.cell_type_probe",
        **dict.fromkeys(
            (
                "cz_batch_integration",
                "cz_clustering",
                "cz_embedding",
                "cz_label_prediction",
                "cz_sequential_organization",
            ),
            "scforge.eval.cz_benchmarks",
        ),
        "gene_network": "scforge.eval.gene_network",
        "generation": "scforge.eval.generation",
        "geometry": "scforge.eval.geometry",
        "label_prediction": "scforge.eval.label_prediction",
        "rank_reconstruction": "scforge.eval.rank_reconstruction",
        "perturbation_prediction": "scforge.eval.perturbation_prediction",
        "scib": "scforge.eval.scib",
    },
)


def register_benchmark(name: str) -> Callable[[Any], Any]:
    """Register a :class:`Benchmark` class as `name` (class decorator).

    Parameters
    ----------
    name
        Registry key, e.g. ``"my_benchmark"``.

    Returns
    -------
    The decorator.

    Raises
    ------
    OptionError
        If `name` belongs to another class.

    Examples
    --------
    >>> @register_benchmark("spread")
    ... class Spread(Benchmark):
    ...     metrics = ("total_variance",)
    ...
    ...     def run(self, made, reference):
    ...         return {"total_variance": float(np.var(made, axis=0).sum())}
    >>> get_benchmark("spread").run(np.array([[0.0], [2.0]]), None)
    {'total_variance': 1.0}
    """
    return BENCHMARKS.register(name)


def list_benchmarks() -> list[str]:
    """Return the names of all benchmarks.

    Returns
    -------
    Names that :func:`get_benchmark` takes, sorted.

    Examples
    --------
    >>> [name for name in list_benchmarks() if name.startswith("cell_type")]
    ['cell_type_annotation', 'cell_type_probe']
    """
    return BENCHMARKS.names()


def get_benchmark(name: str, **options: Any) -> Benchmark:
    """Make the benchmark registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"label_prediction"``.
    **options
        Options of its constructor.

    Returns
    -------
    The benchmark.

    Raises
    ------
    OptionError
        If the name, or an option, is unknown, or an option is missing.

    Examples
    --------
    >>> get_benchmark("label_prediction", labels_key="cell_type").metrics
    ('knn_macro_f1', 'logreg_macro_f1')
    """
    known = options_of(name)
    check_options("benchmark option", name, options, list(known))
    for option, needed in known.items():
        if needed and option not in options:
            raise OptionError(f"the benchmark {name!r} needs the option {option}; give it.")
    return BENCHMARKS.get(name)(**options)


def options_of(name: str) -> dict[str, bool]:
    """Return the options of a benchmark, and of each whether it has to be given."""
    parameters = inspect.signature(BENCHMARKS.get(name)).parameters
    return {option: parameter.default is parameter.empty for option, parameter in parameters.items()}
