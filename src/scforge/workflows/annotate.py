"""Label the cells of a file by the labels of a reference, and write them into a file."""

from __future__ import annotations

import os
from typing import Any

from scforge._io import atomic_path
from scforge.data.sources import read_h5ad
from scforge.estimators.annotation import AnnotationReport, annotate
from scforge.workflows.models import load_named
from scforge.workflows.outputs import output_file
from scforge.workflows.train import write

_CELLS, _TABLE, _PICTURE = ".h5ad", ".csv", ".png"


def annotate_to(
    source: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    plot: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> AnnotationReport:
    """Label the cells in an h5ad file, see :func:`scforge.annotate`, and write them into a file.

    Parameters
    ----------
    source
        h5ad file with the cells to label.
    reference
        h5ad file with labeled cells, or a model: a folder or a name.
    output
        Path that ends with ``.h5ad``, for the cells with their labels, or with ``.csv``, for a table.
    plot
        Path that ends with ``.png``, for a picture of :func:`scforge.pl.annotation`.
    overwrite
        Whether to replace `output` and `plot`.
    **options
        Options of :func:`scforge.annotate`.

    Returns
    -------
    The report.

    Raises
    ------
    OptionError
        If an option is invalid, or a file exists.
    MissingFileError, ModelFileError, DataError
        If a file cannot be read or is invalid.

    Examples
    --------
    >>> annotate_to("cells.h5ad", "scforge://human-blood", "annotated.h5ad")  # doctest: +SKIP
    """
    inputs = [source, reference]
    path = output_file(output, [_CELLS, _TABLE], overwrite=overwrite, inputs=inputs)
    picture = None if plot is None else output_file(plot, [_PICTURE], overwrite=overwrite, inputs=inputs)
    query = read_h5ad([os.fspath(source)])
    is_file = os.fspath(reference).endswith(_CELLS)
    known = read_h5ad([os.fspath(reference)]) if is_file else load_named(reference, f"reference={str(reference)!r}")
    report = annotate(query, known, **options)
    write(path, query if path.suffix == _CELLS else report.labels.rename_axis("cell"), overwrite=overwrite)
    if picture is not None:
        import matplotlib.pyplot as plt

        from scforge.pl import annotation

        figure = annotation(query, report.key)[0].figure
        with atomic_path(picture, overwrite=overwrite, argument="plot") as temporary:
            figure.savefig(temporary, dpi=110, format="png")
        plt.close(figure)
    return report
