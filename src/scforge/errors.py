"""The exception classes of scforge.

Each message is one sentence that names the argument, its value and the fix. The command line prints it as one line on
stderr and exits with code 2. In Python, each exception is also the built-in exception that a caller would expect.
"""

from __future__ import annotations

import difflib
import os
import re
import site
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Self

__all__ = [
    "ConfigError",
    "DataError",
    "GeneMismatchError",
    "HubError",
    "MissingFileError",
    "ModelFileError",
    "NotTrainedWarning",
    "OptionError",
    "ScforgeError",
    "ScforgeWarning",
    "TrainingError",
]

_NOT_GIVEN = object()

_CALLERS = {
    ("stdlib",): ("concurrent", "contextlib.", "copy.", "functools.", "threading."),
    ("purelib", "platlib", "user"): ("lightning", "lightning_fabric", "pytorch_lightning", "torch"),
}
"""Code that calls scforge through callbacks, whose lines are therefore not user code either."""

SECRET = "***"
"""Text that replaces a credential."""

# A path of a URL has one of its slashes left; a chained URL has several protocols.
_SCHEME = r"\b(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+:/{1,2}"

_URL = re.compile(
    rf"(?<=')(?P<single>{_SCHEME})(?:\\.|[^'\\\n])*"
    rf'|(?<=")(?P<double>{_SCHEME})(?:\\.|[^"\\\n])*'
    # A password may contain spaces, and is not a port.
    rf"|(?P<bare>{_SCHEME})(?:[^\s/?#@:'\"]*:(?!\d{{1,5}}(?:[/?#\s]|$))(?=\S)[^\n'\"]*?@)?[^\s'\"<>]*"
)
"""Pattern of a URL, up to the closing quote of a quoted one."""

_USER = re.compile(r"[^/?#@:]*:.*@|[^/?#@]*@", re.DOTALL)

_TAIL = re.compile(r"([?#])[^/?#]*=.*", re.DOTALL)
"""Patterns of the user and of query and fragment; outside HTTP, ``@``, ``?`` and ``#`` may be parts of a path."""

_HTTP_USER, _HTTP_TAIL = re.compile(r".*@", re.DOTALL), re.compile(r"([?#]).+", re.DOTALL)

_TOKEN = re.compile(
    r"\bhf_(?:(?:oauth|jwt)_[\w.-]+|[A-Za-z0-9]{30,})|(?<=\bBearer )(?:[\w.~+/=-]{20,}|[^\s'\"]+(?=['\"]))"
)
"""Pattern of hub tokens and tokens in HTTP headers, which does not match e.g. a column ``hf_score``."""

ON_COMMAND_LINE: ContextVar[bool] = ContextVar("scforge_on_command_line", default=False)
"""Whether a command runs, whose user knows flags, but not arguments of functions."""


def _not_the_user() -> tuple[str, ...]:
    """Return path prefixes of code to which warnings must not point."""
    places = {**sysconfig.get_paths(), "user": site.getusersitepackages()}
    prefixes = {Path(places[kind], name) for kinds, names in _CALLERS.items() for kind in kinds for name in names}
    # Python compares without the last letter of a file's name, so a prefix must be shorter.
    prefixes.add(Path(__file__).parent)
    return tuple(str(path) if path.name.endswith(".") else f"{path}{os.sep}" for path in prefixes)


_NOT_THE_USER = _not_the_user()


class ScforgeError(Exception):
    """Base class for all errors that scforge raises for problems that the user can fix.

    Cause
    -----
    Derived classes name the kind of problem. The base class itself is raised if a plugin or an optional package cannot
    be imported.

    Fix
    ---
    Read the message, which names the argument, its value and the fix. Catch this class to catch all of these errors.
    Any other exception raised by scforge is a bug; please report it.

    Parameters
    ----------
    problem
        What is wrong, and the fix.
    argument, value
        Name of the argument that caused the error, and its value. The message begins with what is given of them:
        ``argument=value problem``.
    subject
        Text with which the message begins instead.
    **named
        Argument and value in short form, e.g. ``batch_size=0`` for ``argument="batch_size", value=0``.

    Attributes
    ----------
    argument : str or None
        Name of the argument, option or part of the data (``"adata.X"``) that caused the error.
    value : object
        Its value, if the message shows it.

    Examples
    --------
    >>> from scforge.data import open_cells
    >>> try:
    ...     open_cells("cells.h5ad")
    ... except ScforgeError as error:
    ...     print(f"{type(error).__name__}: {error}")
    MissingFileError: the file 'cells.h5ad' does not exist.
    """

    def __init__(
        self,
        problem: str,
        /,
        argument: str | None = None,
        value: object = _NOT_GIVEN,
        *,
        subject: str | None = None,
        **named: object,
    ) -> None:
        if named:
            ((argument, value),) = named.items()
        if subject is None:
            subject = argument or ""
            if value is not _NOT_GIVEN:
                subject += f"={value!r}" if argument else repr(value)
        gap = " " if subject and problem[:1] not in ",:;[" else ""
        super().__init__(redacted(f"{subject}{gap}{problem}"))
        self.problem, self.argument = redacted(problem), argument
        self.value = None if value is _NOT_GIVEN else redacted(value) if isinstance(value, str) else value
        self._is_located = False

    def located(self, place: str) -> Self:
        """Return the error with a location, e.g. a line of a file, before its message, unless it has one already."""
        if place and not self._is_located:
            self.args, self._is_located = (f"{place}{self}",), True
        return self


class ConfigError(ScforgeError, ValueError):
    """A configuration file or override is invalid.

    Cause
    -----
    The file is missing, or is not YAML; a key is unknown; a value has the wrong type or is out of range; two options
    contradict each other; or a required option is missing.

    Fix
    ---
    Go to the line or override named in the message. ``scforge config check FILE`` finds such errors before any cell is
    read, and ``scforge config show FILE`` prints all options with their defaults.

    Examples
    --------
    >>> from scforge.config import load_config, recipe_path
    >>> try:
    ...     load_config(recipe_path("light"), ["training.max_epohcs=3"])
    ... except ConfigError as error:
    ...     print(str(error).partition(" (")[0])
    override 'training.max_epohcs=3': training.max_epohcs=3 is not a known option; did you mean 'training.max_epochs'?
    """


class DataError(ScforgeError, ValueError):
    """Cells, counts, genes or columns are missing or invalid.

    Cause
    -----
    Counts are negative, not finite or already normalized; a column or a layer is missing; names are duplicated; there
    are too few cells or labels; or a file or a store is corrupted.

    Fix
    ---
    Correct the data as the message describes. ``scforge inspect FILE`` shows the content of a file. Raw counts are
    often in a layer or in ``adata.raw``: name the layer with ``layer=``, or use ``adata.raw.to_adata()``.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from scforge.data import open_cells
    >>> try:
    ...     open_cells(ad.AnnData(np.array([[0.0, 1.5], [2.0, 0.5]])))
    ... except DataError as error:
    ...     print(str(error).partition(", ")[0])
    adata.X contains values that are not whole numbers (first: 1.5)
    """


class GeneMismatchError(DataError):
    """The genes of the data do not match the vocabulary of the model.

    Cause
    -----
    Too few genes are in both the data and the vocabulary: genes of the data have other identifiers (symbols, Ensembl
    ids, numbers), are from another species, or are a small panel.

    Fix
    ---
    Specify the column of ``var`` with matching names (``gene_key=``), or convert names with
    :func:`scforge.data.convert_gene_ids`. ``scforge inspect FILE --vocab VOCABULARY`` shows how many genes match and
    which genes are missing.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from scforge.data import GeneVocab, open_cells
    >>> try:
    ...     open_cells(ad.AnnData(np.ones((3, 2))), vocab=GeneVocab.from_genes(["CD3D", "NKG7"]))
    ... except GeneMismatchError as error:
    ...     print(str(error).partition(". ")[0])
    adata.var_names has only 0 of the 2 genes of the vocabulary
    """


class HubError(ScforgeError, OSError):
    """A model hub cannot be reached or returns an error.

    Cause
    -----
    There is no connection, the hub is down, or the repository was changed at the same time.

    Fix
    ---
    Check the connection and ``HF_ENDPOINT``, and try again. Models that were downloaded before are in the cache:
    ``scforge pull --offline``, or ``HF_HUB_OFFLINE=1``, uses only the cache.

    Examples
    --------
    >>> issubclass(HubError, OSError)  # what waits and tries again after a failed connection catches it, too
    True
    """


class OptionError(ScforgeError, ValueError):
    """The name or value of an argument is unknown or invalid.

    Cause
    -----
    A name is misspelled, a value has the wrong type or is out of range, or arguments are incompatible.

    Fix
    ---
    Use one of the names listed in the message, or a value in the given range.

    Examples
    --------
    >>> from scforge.config import ModelConfig
    >>> from scforge.models import get_model
    >>> try:
    ...     get_model("mpl", ModelConfig(vocab_size=10))
    ... except OptionError as error:
    ...     print(str(error).partition(" (")[0])
    architecture='mpl' is not known; did you mean 'mlp'?
    """


class MissingFileError(ScforgeError, FileNotFoundError):
    """A file or folder does not exist.

    Cause
    -----
    A path is misspelled, or relative to another working directory; a pattern matches no file; or a repository does not
    exist on the hub, or is private.

    Fix
    ---
    Check the path. Relative paths refer to the working directory, even in a configuration file. For a private
    repository, pass a token (``HF_TOKEN``).

    Examples
    --------
    >>> from scforge.data import open_cells
    >>> try:
    ...     open_cells("cells.h5ad")
    ... except MissingFileError as error:
    ...     print(error)
    the file 'cells.h5ad' does not exist.
    """


class ModelFileError(ScforgeError, ValueError):
    """A file in a model folder is missing, invalid or corrupted.

    Cause
    -----
    A copy or a download is incomplete; the folder is from another program or a later version; weights do not match
    their description; or a file is a pickle, which is never opened.

    Fix
    ---
    Copy, pull or save the model again. To convert checkpoints of other packages to a model, use ``scforge
    convert-checkpoint``.

    Examples
    --------
    >>> from pathlib import Path
    >>> from scforge.data import GeneVocab
    >>> _ = Path("vocab.json").write_text("{}")
    >>> try:
    ...     GeneVocab.from_file("vocab.json")
    ... except ModelFileError as error:
    ...     print(error)
    'vocab.json' is not an scforge vocabulary file (format: Field required); copy it again.
    """


class TrainingError(ScforgeError, RuntimeError):
    """A training run cannot continue, e.g. because the loss is NaN.

    Cause
    -----
    The loss or the weights are no longer finite; memory is insufficient; or a checkpoint cannot be written, or is from
    another run.

    Fix
    ---
    Follow the message: lower the learning rate, clip gradients or choose another precision; lower ``batch_size``, or
    set ``batch_size="auto"``; free disk space. ``scforge train --resume auto`` resumes from the latest checkpoint.

    Examples
    --------
    >>> issubclass(TrainingError, RuntimeError)
    True
    """


class ScforgeWarning(UserWarning):
    """A problem that does not stop the computation.

    Cause
    -----
    Cells, genes or labels are left out; a baseline or a comparison is missing; or a score is less reliable than usual.

    Fix
    ---
    Decide whether the warning matters for your analysis. The command line prints it once on stderr. In Python, it can
    be silenced or turned into an error like any other warning.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", ScforgeWarning)
    ...     try:
    ...         warnings.warn("3 of 100 cells express no gene of the vocabulary.", ScforgeWarning)
    ...     except ScforgeWarning as warning:
    ...         print(warning)
    3 of 100 cells express no gene of the vocabulary.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class NotTrainedWarning(ScforgeWarning):
    """A result comes from a model that was never trained.

    Cause
    -----
    An embedding, a prediction or generated cells were requested before ``train``, or the loaded model was saved before
    training.

    Fix
    ---
    Call ``train`` first, or load a trained model. If you use random weights as a control, silence the warning.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", NotTrainedWarning)
    ...     warnings.warn("The model is not trained; its embedding is random.", NotTrainedWarning)
    """


def listing(names: Iterable[object], *, most: int = 12) -> str:
    """Return names as ``'a', 'b', 'c', ...`` for a message.

    Parameters
    ----------
    names
        Names to list.
    most
        Number of names to show; other names are only counted.

    Returns
    -------
    The text, or ``"nothing"`` if there are no names.

    Examples
    --------
    >>> listing(["a", "b", "c"], most=2)
    "'a', 'b', ... (1 more)"
    """
    quoted = [repr(str(name)) for name in names]
    if not quoted:
        return "nothing"
    tail = f", ... ({len(quoted) - most} more)" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + tail


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name most similar to `name`, or an empty string.

    Parameters
    ----------
    name
        The given name.
    known
        Known names.

    Returns
    -------
    Text to append to an error message.

    Examples
    --------
    >>> did_you_mean("celltype", ["cell_type", "donor"]), did_you_mean("x", ["cell_type"])
    ("; did you mean 'cell_type'?", '')
    """
    candidates = {str(k).lower(): str(k) for k in known}
    near = difflib.get_close_matches(str(name).lower(), list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {candidates[near[0]]!r}?" if near else ""


def suggest(name: object, known: Iterable[object], label: str = "known", *, most: int = 12) -> str:
    """Return a suggestion for `name`: the most similar known name, and a labeled list of all known names.

    Examples
    --------
    >>> suggest("celltype", ["cell_type", "donor"], "available")
    "; did you mean 'cell_type'? (available: 'cell_type', 'donor')"
    """
    names = list(known)
    return f"{did_you_mean(name, names)} ({label}: {listing(names, most=most)})"


def warn(message: str, category: type[Warning] | None = None) -> None:
    """Issue a warning that points to the line of the user's code.

    Parameters
    ----------
    message
        One sentence.
    category
        Category of the warning. If None, uses :class:`ScforgeWarning`.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn("The model is not trained.", NotTrainedWarning)
    >>> str(caught[0].message)
    'The model is not trained.'
    """
    warnings.warn(message, category or ScforgeWarning, skip_file_prefixes=_NOT_THE_USER)


def spelled(argument: str, flag: str) -> str:
    """Return how the reader of a message spells an option: as an argument in Python, as a flag on the command line.

    Examples
    --------
    >>> spelled("overwrite=True", "--overwrite")
    'overwrite=True'
    """
    return flag if ON_COMMAND_LINE.get() else argument


def first_line(error: BaseException) -> str:
    """Return the message of another library's error as one line without final period, for use in a sentence.

    Parameters
    ----------
    error
        The exception.

    Returns
    -------
    The first 300 characters of the first line, or the class name if the message is empty.

    Examples
    --------
    >>> first_line(KeyError("no such part.")), first_line(ValueError())
    ('no such part', 'ValueError')
    """
    # The text of a KeyError is the repr of its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text.splitlines()[0][:300].rstrip(".") if text else type(error).__name__


def redacted(text: str) -> str:
    """Return text without credentials, i.e. tokens, and in URLs user, password, query and fragment.

    scforge applies this function to every URL that it writes or shows, and to its errors and warnings.

    Parameters
    ----------
    text
        A URL, or text that may contain URLs or tokens.

    Returns
    -------
    The text, with ``***`` instead of removed parts.

    Examples
    --------
    >>> redacted("https://me:secret@host/cells.h5ad?signature=abc"), redacted("s3://bucket/cells_?.h5ad")
    ('https://***@host/cells.h5ad?***', 's3://bucket/cells_?.h5ad')
    """
    return _TOKEN.sub(SECRET, _URL.sub(_without_credentials, text))


def _without_credentials(url: re.Match[str]) -> str:
    scheme = url["single"] or url["double"] or url["bare"]
    user, tail = (_HTTP_USER, _HTTP_TAIL) if scheme.lower().rpartition("::")[2].startswith("http") else (_USER, _TAIL)
    rest = url[0].removeprefix(scheme)
    if match := user.match(rest):
        rest = f"{SECRET}@{rest.removeprefix(match[0])}"
    return scheme + tail.sub(rf"\1{SECRET}", rest)


def safe_cause(error: BaseException | None) -> BaseException | None:
    """Return the cause for a new error: `error`, or None if its traceback would show a credential.

    Parameters
    ----------
    error
        An error of another library, or None.

    Returns
    -------
    The error, or None.

    Examples
    --------
    >>> safe_cause(OSError("no route to host")), safe_cause(OSError("no route to https://me:secret@host"))
    (OSError('no route to host'), None)
    """
    text = "".join(traceback.format_exception(error)) if error else ""
    return error if redacted(text) == text else None
