"""Find models by name, and push and pull model folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge._io import check_folder, check_writable, is_own_card
from scforge.data.paths import is_url
from scforge.errors import DataError, MissingFileError, OptionError, first_line
from scforge.hub.finding import (
    FoundModel,
    copy_model,
    find_model,
    hub_hint,
    is_hub_name,
    is_registry_name,
    kind_of_folder,
    repository,
    shared_files,
)
from scforge.hub.uploading import tell_left_behind, upload
from scforge.training.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scforge.estimators.encoder import Encoder


def is_shared_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a name refers to the hub or the registry, not to a local folder."""
    return is_registry_name(path) or is_hub_name(path)


def check_model_folder(path: str | os.PathLike[str], prefix: str) -> Path:
    """Return the folder of a model, fetching it first if it is on the hub.

    Parameters
    ----------
    path
        Name given by the user: a folder, ``"hf://org/name@revision"`` or ``"scforge://name@version"``.
    prefix
        Prefix of error messages, which shows how the name was given, e.g. ``"model='ckpt' (--model)"``.

    Raises
    ------
    MissingFileError
        If the model does not exist; the message may suggest another name.
    ModelFileError, OptionError, HubError
        If the model cannot be fetched.
    """
    return _found(path, prefix).folder


def load_named(path: str | os.PathLike[str], prefix: str, adata: AnnData | None = None) -> Encoder:
    """Load a model, or adapters with their base model, by name, see :func:`check_model_folder`."""
    from scforge.estimators import Encoder
    from scforge.estimators.hub import load_found

    return load_found(Encoder, _found(path, prefix, adapters=True), prefix, False if adata is None else adata)


def _found(path: str | os.PathLike[str], prefix: str, *, adapters: bool = False) -> FoundModel:
    if is_shared_name(path):
        found = find_model(path, prefix=prefix)
        if not adapters and kind_of_folder(found.folder) == "adapter":
            raise MissingFileError(f"{prefix} contains only adapters; pass their base model.")
        return found
    check_local_model(path, prefix, adapters=adapters)
    return FoundModel(Path(path))


def check_local_model(path: str | os.PathLike[str], prefix: str, *, adapters: bool = False) -> None:
    """Raise a MissingFileError if a local folder contains no model, nor, with `adapters`, adapters of one.

    Models on the hub and in the registry pass.
    """
    if is_shared_name(path):
        return
    fix = f"pass the folder of a model, e.g. ckpt/final, {hub_hint(Path(path))} or scforge://name"
    folder = _folder(path, prefix, fix)
    if not (adapters and kind_of_folder(folder) == "adapter"):
        _check_holds_model(folder, prefix)


def _folder(path: str | os.PathLike[str], prefix: str, fix: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        what = "is a URL" if is_url(path) else "is a file" if folder.exists() else "does not exist"
        raise MissingFileError(f"{prefix} {what}; {fix}.")
    return folder


def _check_holds_model(folder: Path, prefix: str) -> None:
    """Raise a :class:`~scforge.errors.MissingFileError`, with a suggestion, if a folder contains no model."""
    if not (folder / "config.json").exists():
        if models := RunFolder(folder).models():
            raise MissingFileError(f"{prefix} is the folder of a training run; did you mean {str(models[-1])!r}?")
        raise MissingFileError(f"{prefix} contains no model; pass the folder of a model, e.g. ckpt/final.")


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    license: str | None = None,
    data: Sequence[str] | None = None,
    citation: str | None = None,
    metrics: str | os.PathLike[str] | None = None,
    base: str | None = None,
    **options: Any,
) -> str:
    """Push a model folder, after checking that it loads.

    The card is updated with the repository name, unless a user wrote or edited the card.

    Parameters
    ----------
    folder, repo_id
        See :func:`scforge.hub.upload`.
    license, data, citation
        Facts for the card, see :meth:`scforge.models.Encoder.push_to_hub`.
    metrics
        CSV table from ``scforge evaluate`` for the card.
    base
        Name of the base model of adapters.
    **options
        Other options of :func:`scforge.hub.upload`.

    Returns
    -------
    URL of the repository, or of the pull request.

    Raises
    ------
    MissingFileError, ModelFileError
        If the folder or its content is missing or invalid.
    OptionError, HubError
        If the folder cannot be uploaded.
    """
    from scforge.estimators import Encoder
    from scforge.estimators.hub import place_of, push_model
    from scforge.estimators.serialize import read_folder

    prefix = f"DIR={str(folder)!r}"
    path = _folder(folder, prefix, "pass the folder written by model.save()")
    is_adapter = kind_of_folder(path) == "adapter"
    if not is_adapter:
        _check_holds_model(path, prefix)
        if base is not None:
            raise OptionError(f"(--base) has no effect if {prefix} is a complete model; omit base.", base=base)
    told: dict[str, Any] = {"license": license, "data": data, "citation": citation}
    told["metrics"] = None if metrics is None else _table(metrics)
    given = [name for name, value in told.items() if value is not None]
    shared_files(path)
    card = None
    if (readme := path / "README.md").is_file():
        try:
            card = readme.read_text(encoding="utf-8")
        except ValueError as error:
            problem = f"{str(readme)!r} is not UTF-8 text ({first_line(error)}); convert or remove it."
            raise DataError(problem) from error
        card = None if is_own_card(card) else card  # its own card is generated again
    if card is not None and given:
        raise OptionError(
            f"{prefix} contains a README.md that was written or edited by hand, but {given[0]} (--{given[0]}) requires "
            f"a generated README.md; add the information to README.md and omit {given[0]}, or remove README.md."
        )
    if card is not None and not is_adapter:
        read_folder(path)
        return upload(path, repo_id, **options)
    tell_left_behind(path, reference=options.get("reference", False))  # the upload is written again, to another folder
    # The name is for others, so it is not a folder here.
    model = Encoder.load(path, base=None if base is None else place_of(base) or base)
    return push_model(model, repo_id, told=told, adapter_only=is_adapter, base=base, card=card, **options)


def pull_folder(
    name: str, output: str | os.PathLike[str] | None = None, *, overwrite: bool = False, **options: Any
) -> Path:
    """Fetch a model, and copy it from the cache to `output` if specified.

    Parameters
    ----------
    name
        Name of a repository, ``"org/name"``, or another name, see :func:`scforge.hub.resolve`.
    output
        Folder to create. Its ``origin.json`` stores the repository and the commit.
    overwrite
        Whether to replace the model in an existing folder; other files are kept.
    **options
        Other options of :func:`scforge.hub.resolve`.

    Returns
    -------
    The folder of the model.

    Raises
    ------
    MissingFileError, ModelFileError, OptionError, HubError
        See :func:`scforge.hub.resolve`.
    """
    if output is not None:
        check_folder("output", output)
        check_writable("output", output)
        folder = Path(output)
        if not overwrite and folder.is_dir() and any(folder.iterdir()):
            raise OptionError(
                "(--output) exists and is not empty; pass overwrite=True (--overwrite) to replace it.",
                output=str(output),
            )
    # Unlike loading, pulling always asks the hub for a name that is no folder.
    found = find_model(name if Path(name).is_dir() else repository(name), prefix=f"name={name!r}", **options)
    if output is None:
        return found.folder
    return copy_model(found.folder, output, overwrite=overwrite, origin=(found.repo_id, found.commit))


def _table(path: str | os.PathLike[str]) -> pd.DataFrame:
    import pandas as pd

    from scforge.estimators.card import is_long, scores_of

    prefix = f"metrics={str(path)!r} (--metrics)"
    try:
        table = pd.read_csv(path)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{prefix} cannot be read as a CSV table ({first_line(error)}); pass a table written by scforge evaluate."
        ) from error
    if not is_long(table):
        table = table.set_index(table.columns[0])
    scores_of(table, prefix=prefix)
    return table
