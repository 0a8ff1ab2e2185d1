"""Check which argument an error names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scforge.errors import ScforgeError

__all__ = ["raises"]


@contextmanager
def raises(error: type[ScforgeError], argument: str) -> Iterator[None]:
    """Check that a block raises an error because of an argument, whatever the wording of its message.

    Parameters
    ----------
    error
        Class of the error.
    argument
        Name of the argument that caused it, see :class:`~scforge.ScforgeError`.

    Yields
    ------
    Nothing; use it in a ``with`` statement.

    Raises
    ------
    AssertionError
        If the block raises nothing, or the error is because of another argument, or its message has several lines.

    Examples
    --------
    >>> import scforge
    >>> from scforge.errors import DataError
    >>> from scforge.models import Encoder
    >>> adata = scforge.datasets.pbmc3k()
    >>> with raises(DataError, "labels_key"):
    ...     Encoder.setup_anndata(adata, labels_key="celltype")
    """
    try:
        yield
    except error as raised:
        message = str(raised)
        if raised.argument != argument:
            raise AssertionError(f"the error is about {raised.argument!r}, not {argument!r}: {message}") from raised
        if "\n" in message:
            raise AssertionError(f"the message has several lines: {message}") from raised
    else:
        raise AssertionError(f"no {error.__name__} was raised")
