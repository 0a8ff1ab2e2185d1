"""Names of other people in output: one function for each format, so that none is read as more than text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Also marks that reverse the direction of text, and halves of characters, which no terminal can show.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029]+")
_ENTITY = re.compile(r"&(?=#?\w+;)")
_MARKS = re.compile(r"[\\`*\[\]~$]|(?<!\w)_+|_+(?!\w)")  # an underscore inside a word marks nothing
_START = re.compile(r"^(\s*\d*)((?<!\d)#+(?!\S)|(?<!\d)>|(?<!\d)[-+=](?!\w|\.\d)|(?<=\d)[.)](?!\S))")
_NAME = re.compile(r"[\w.:/@+-]+")
_FORMULA = tuple("=+-@\t\r")


def printable(text: object) -> str:
    r"""Return text for a terminal, in which control characters other than line breaks and tabs are written as escapes.

    Examples
    --------
    >>> printable("T cell\x1b[31m")
    'T cell\\x1b[31m'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], str(text))


def markdown(text: object) -> str:
    r"""Return text for one line or one cell of a table in Markdown, in which nothing but a bare URL is active.

    Examples
    --------
    >>> print(markdown("CD4|CD8 <b>"), markdown("CD14_Mono *[x](http://host)*"))
    CD4&#124;CD8 &lt;b> CD14_Mono \*\[x\](http://host)\*
    """
    line = _ENTITY.sub("&amp;", _LINES.sub(" ", str(text)))
    line = _MARKS.sub(lambda match: "".join(rf"\{mark}" for mark in match[0]), line)
    return _START.sub(r"\1\\\2", line).replace("|", "&#124;").replace("<", "&lt;")


def code(text: object) -> str:
    r"""Return a name as code in Markdown, or as :func:`markdown` does if code could not hold it.

    Examples
    --------
    >>> print(code("org/model"), code("org/`model`"))
    `org/model` org/\`model\`
    """
    return f"`{text}`" if _NAME.fullmatch(str(text)) else markdown(text)


def without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table to write as CSV, in which a spreadsheet reads text that begins like a formula as text.

    Such text gets a ``'`` in front; numbers stay numbers, also as text.
    """
    safe = table.copy(deep=False)
    for column, kind in enumerate(table.dtypes):
        if kind.kind not in "biufcmM":
            safe.isetitem(column, table.iloc[:, column].astype(object).map(_no_formula, na_action="ignore"))
    safe.columns = table.columns.map(_no_formula)
    if table.index.dtype.kind not in "biufcmM":
        safe.index = table.index.map(_no_formula)
    return safe


def _no_formula(value: object) -> object:
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def literal(ax: Axes) -> None:
    """Show names in the axes as they are: matplotlib reads text between dollar signs as a formula, and may fail."""
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    numbers = set()
    for axis in (ax.xaxis, ax.yaxis):
        numbers.add(axis.offsetText)
        if not isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
            numbers.update(axis.get_majorticklabels())
        numbers.update(axis.get_minorticklabels())
    for text in ax.findobj(Text):
        if text not in numbers:
            text.set_parse_math(False)
