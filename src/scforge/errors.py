"""The exception family of scforge.

Each message is one sentence that names the argument, its value and the fix. The command line prints it as one line
on stderr and exits with code 2; from Python it is an exception that also is the builtin one a caller would expect.
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
from pathlib import Path

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

_CALLERS = {
    ("stdlib",): ("concurrent", "contextlib.", "copy.", "functools.", "threading."),
    ("purelib", "platlib", "user"): ("lightning", "lightning_fabric", "pytorch_lightning", "torch"),
}
"""What calls parts of scforge back, so that its lines are not the user's either."""


def _not_the_user() -> tuple[str, ...]:
    """Return the beginnings of the paths of code that no warning is about."""
    places = {**sysconfig.get_paths(), "user": site.getusersitepackages()}
    found = {Path(places[kind], name) for kinds, names in _CALLERS.items() for kind in kinds for name in names}
    # Python compares without the last letter of a file's name, so a prefix must be shorter.
    found.add(Path(__file__).parent)
    return tuple(str(path) if path.name.endswith(".") else f"{path}{os.sep}" for path in found)


_NOT_THE_USER = _not_the_user()

SECRET = "***"
"""Replacement of a credential."""

# A path of a URL has one of its slashes left.
_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]+:/{1,2})[^\s/?#]*@")
_QUERY = re.compile(r"(\bhttps?:/{1,2}[^\s?'\"]*\?)[^\s'\"]+")
_TOKEN = re.compile(
    r"\bhf_(?:(?:oauth|jwt)_[\w.-]+|[A-Za-z0-9]{30,})|(?<=\bBearer )(?:[\w.~+/=-]{20,}|[^\s'\"]+(?=['\"]))"
)
"""Tokens of the hub, and what a header of HTTP holds; a column may well be called ``hf_score``."""


class ScforgeError(Exception):
    """Base of every error that scforge raises for a problem that the user can fix.

    Cause
    -----
    Derived classes name the kind of problem. The base itself is raised where a plugin, or an optional package, cannot
    be imported.

    Fix
    ---
    Read the sentence: it names the argument, its value and what to do. Catch this class to catch all of them. Another
    exception out of scforge is a bug, and worth a report.

    Examples
    --------
    >>> from scforge.data import open_cells
    >>> try:
    ...     open_cells("cells.h5ad")
    ... except ScforgeError as error:
    ...     print(f"{type(error).__name__}: {error}")
    MissingFileError: the file 'cells.h5ad' does not exist.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(one) if isinstance(one, str) else one for one in args))


class ConfigError(ScforgeError, ValueError):
    """A configuration file or override that cannot be used.

    Cause
    -----
    The file is not there, or is not YAML; a key is unknown; a value has the wrong type or lies out of its range; two
    options contradict each other; or one that is needed is missing.

    Fix
    ---
    Go to the line, or the override, that the message names. ``scforge config check FILE`` finds such mistakes before
    any cell is read, and ``scforge config show FILE`` prints all options with their defaults.

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
    """Cells, counts, genes or columns that cannot be used.

    Cause
    -----
    Counts are negative, not finite or already normalized; a column or a layer is missing; names stand twice; there are
    too few cells or labels for the request; or a file of cells, or a store, is damaged.

    Fix
    ---
    Correct the data as the message describes. ``scforge inspect FILE`` shows what a file holds. Raw counts often stand
    in a layer, or in ``adata.raw``: name the layer with ``layer=``, or take ``adata.raw.to_adata()``.

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
    """The genes of the data do not fit the vocabulary of the model.

    Cause
    -----
    The vocabulary knows too few genes of the data: they are named in another way (symbols, Ensembl ids, numbers), are
    of another species, or are a small panel.

    Fix
    ---
    Name the column of ``var`` with fitting names (``gene_key=``), or translate them with
    :func:`scforge.data.convert_gene_ids`. ``scforge inspect FILE --vocab VOCABULARY`` shows how many genes match and
    which are missing.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from scforge.data import GeneVocab, open_cells
    >>> try:
    ...     open_cells(ad.AnnData(np.ones((3, 2))), vocab=GeneVocab.from_genes(["CD3D", "NKG7"]))
    ... except GeneMismatchError as error:
    ...     print(str(error).partition(": ")[0])
    adata.var_names has only 0 of the 2 genes of the vocabulary
    """


class HubError(ScforgeError, OSError):
    """A hub of models that cannot be reached, or fails.

    Cause
    -----
    There is no connection, the hub is down, or somebody else wrote to the repository at the same time.

    Fix
    ---
    Check the connection and ``HF_ENDPOINT``, and try again. What was fetched before is in the cache: ``scforge pull
    --offline``, or ``HF_HUB_OFFLINE=1``, looks there only.

    Examples
    --------
    >>> issubclass(HubError, OSError)  # what waits and tries again after a failed connection catches it, too
    True
    """


class OptionError(ScforgeError, ValueError):
    """An unknown name or an unusable value of an argument.

    Cause
    -----
    A name is misspelt, a value is of another type or out of range, or arguments do not go together.

    Fix
    ---
    Take one of the names, or a value in the range, that the message gives.

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
    """A file or folder that is not there.

    Cause
    -----
    A path is misspelt, or is relative to another working directory; a pattern fits no file; or the hub has no such
    repository, or it is private.

    Fix
    ---
    Check the path. Relative ones start at the working directory, also in a configuration file. For a private
    repository pass a token, ``HF_TOKEN``.

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
    """A model folder with a missing, foreign or corrupted file.

    Cause
    -----
    A copy or a download is not complete; the folder is of another program, or of a later version; weights do not fit
    their description; or a file is a pickle, which is never opened.

    Fix
    ---
    Copy, pull or save the model again. Checkpoints of other packages become a model with
    ``scforge convert-checkpoint``.

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
    """A training run that cannot continue, e.g. because the loss is not a number.

    Cause
    -----
    The loss or the weights are no longer finite; memory is too small; or a state cannot be written, or belongs to
    another run.

    Fix
    ---
    Do as the message says: lower the learning rate, clip gradients or take another precision; lower ``batch_size``, or
    let ``batch_size="auto"`` find one; free the disk. ``scforge train --resume auto`` continues from the latest state.

    Examples
    --------
    >>> issubclass(TrainingError, RuntimeError)
    True
    """


class ScforgeWarning(UserWarning):
    """Something worth knowing that does not stop the work.

    Cause
    -----
    Cells, genes or labels are left out; a baseline or a comparison is missing; or a score means less than it seems.

    Fix
    ---
    Decide whether the sentence concerns you. On the command line it stands on stderr, once. In Python it can be
    silenced, or made an error, as any warning.

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
        super().__init__(*(redacted(one) if isinstance(one, str) else one for one in args))


class NotTrainedWarning(ScforgeWarning):
    """A result of a model that was never trained.

    Cause
    -----
    An embedding, a prediction or generated cells were asked for before ``train``, or the loaded model was saved before
    it.

    Fix
    ---
    Call ``train`` first, or load a trained model. A model of random weights is a fair control: silence the warning
    where one is meant.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", NotTrainedWarning)
    ...     warnings.warn("The model is not trained; its embedding is random.", NotTrainedWarning)
    """


def listing(names: Iterable[object], *, most: int = 12) -> str:
    """Return names as ``'a', 'b', 'c', ...``, for a message.

    Parameters
    ----------
    names
        What to list.
    most
        How many are shown before the rest is counted.

    Returns
    -------
    The text; ``"nothing"`` for no names.

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
    """Return ``"; did you mean 'x'?"`` for the known name nearest to `name`, or an empty string.

    Parameters
    ----------
    name
        What was written.
    known
        What may be written.

    Returns
    -------
    A piece of a sentence.

    Examples
    --------
    >>> did_you_mean("celltype", ["cell_type", "donor"]), did_you_mean("x", ["cell_type"])
    ("; did you mean 'cell_type'?", '')
    """
    candidates = {str(k).lower(): str(k) for k in known}
    near = difflib.get_close_matches(str(name).lower(), list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {candidates[near[0]]!r}?" if near else ""


def suggest(name: object, known: Iterable[object], label: str = "known", *, most: int = 12) -> str:
    """Return a suggestion for `name`: the nearest of the known names, and all of them under a label.

    Examples
    --------
    >>> suggest("celltype", ["cell_type", "donor"], "obs has")
    "; did you mean 'cell_type'? (obs has: 'cell_type', 'donor')"
    """
    names = list(known)
    return f"{did_you_mean(name, names)} ({label}: {listing(names, most=most)})"


def warn(message: str, category: type[Warning] | None = None) -> None:
    """Warn of what a user did, with the line of the user's code that led to it.

    Parameters
    ----------
    message
        One sentence.
    category
        :class:`ScforgeWarning` if None.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn("The model is not trained.", NotTrainedWarning)
    >>> str(caught[0].message)
    'The model is not trained.'
    """
    warnings.warn(message, category or ScforgeWarning, skip_file_prefixes=_NOT_THE_USER)


def first_line(error: BaseException) -> str:
    """Return what an error of another library says, for a sentence around it: one line without its full stop.

    Parameters
    ----------
    error
        The exception.

    Returns
    -------
    The first 300 characters of its first line; the name of its class if it is empty.

    Examples
    --------
    >>> first_line(KeyError("no such part.")), first_line(ValueError())
    ('no such part', 'ValueError')
    """
    # The text of a KeyError is the repr of its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text.splitlines()[0][:300].rstrip(".") if text else type(error).__name__


def redacted(text: str) -> str:
    """Return text without credentials: no token of a hub, and in URLs no user, password or query of a signed address.

    Whatever scforge writes or shows of a URL goes through it; its errors and warnings do so by default.

    Parameters
    ----------
    text
        A URL, or text that may hold URLs or tokens.

    Returns
    -------
    The text, with ``***`` for removed parts.

    Examples
    --------
    >>> redacted("https://me:secret@host/cells.h5ad?signature=abc"), redacted("s3://bucket/cells_?.h5ad")
    ('https://***@host/cells.h5ad?***', 's3://bucket/cells_?.h5ad')
    """
    return _TOKEN.sub(SECRET, _QUERY.sub(rf"\1{SECRET}", _USER.sub(rf"\1{SECRET}@", text)))


def safe_cause(error: BaseException | None) -> BaseException | None:
    """Return what to raise an error from: `error`, or None if a traceback of it would show a credential.

    Parameters
    ----------
    error
        An error of another library, or None.

    Returns
    -------
    The error or None.

    Examples
    --------
    >>> safe_cause(OSError("no route to host")), safe_cause(OSError("no route to https://me:secret@host"))
    (OSError('no route to host'), None)
    """
    text = "".join(traceback.format_exception(error)) if error else ""
    return error if redacted(text) == text else None
