"""A store beside sources that are too large for memory: written once, and anew when they have changed."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from scforge._io import put_back
from scforge.data.harmonise import union_vocab
from scforge.data.remote import is_url
from scforge.data.stream_memory import lack_of_memory
from scforge.data.streams import identity_of
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError, listing

if TYPE_CHECKING:
    from scforge.data.store_files import StoreInfo
    from scforge.data.streams import CellStream

__all__ = ["AUTO", "convert_once", "store_of_large"]

logger = logging.getLogger("scforge")

AUTO = "auto"
"""Convert what does not fit into memory, into the cache of the user."""

_OF_STORE = {"name", "overlap", "counts_kept"}
"""What a store says of a source beside its fingerprint."""


def store_of_large(
    streams: Sequence[CellStream], memory: int | str | None = None, **options: str | None
) -> Path | None:
    """Return where the cache has, or gets, the store of files that do not fit into memory; None if they fit.

    What was converted once is read from its store, however much memory there is then, so that cells keep their order.
    """
    places = [identity_of(stream) for stream in streams]
    if not all(isinstance(place, str) for place in places):  # what is in memory already
        return None
    digest = hashlib.sha256(repr((places, sorted(options.items()))).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    store = root / "scforge" / "stores" / f"{digest}.zarr"
    if store.exists():
        return store
    lack = lack_of_memory(streams, memory)
    if lack is not None:
        logger.warning("%s, so they are converted once into %s; cache names another place.", lack, store)
    return None if lack is None else store


def convert_once(
    source: Any,
    streams: Sequence[CellStream],
    cache: str | os.PathLike[str],
    vocab: GeneVocab | None,
    *,
    obs: Sequence[str] | None,
    layer: str | None,
    gene_key: str | None,
    modality: str | None,
    storage_options: Mapping[str, Any] | None,
) -> Path:
    """Return the path of a store of these sources, after writing it if there is none, or they have changed.

    Parameters
    ----------
    source, streams
        What :func:`scforge.data.streams.open_streams` opens, and what it made of it.
    cache
        Folder of the store.
    vocab
        Vocabulary that the store has to serve; None stands for all genes.
    obs
        Columns that it has to have.
    layer, gene_key, modality, storage_options
        As for :func:`scforge.data.open_cells`.

    Raises
    ------
    OptionError
        If `cache` is something else, or a store of other sources.
    DataError
        If a source lacks a column.
    """
    from scforge.data.conversion import convert
    from scforge.data.store_files import StoreInfo, is_store

    if is_url(os.fspath(cache)):
        raise OptionError(f"cache={os.fspath(cache)!r} is a URL; name a folder on a local disk.")
    path = Path(cache)
    for stream in streams if obs else ():
        stream.obs(obs)
    options: dict[str, Any] = {"layer": layer, "gene_key": gene_key, "modality": modality}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of several processes the first converts, and the others wait for it. Nobody converts into a read-only folder.
    may_write = os.access(path.parent, os.W_OK)
    with FileLock(path.with_name(f".{path.name}.lock")) if may_write else contextlib.nullcontext():
        put_back(path)
        if path.exists():
            if not is_store(path):
                raise OptionError(f"cache={str(path)!r} is no store; name a folder that is not there yet.")
            info = StoreInfo.read(path)
            _check_same(path, info, streams, options)
            if _is_fresh(info, streams):
                _check_genes(path, streams, gene_key, vocab)
                return path
            logger.info("The sources of %s have changed; converting them anew.", path)
        convert(source, path, overwrite=True, storage_options=storage_options, **options)
    logger.info("Converted %s to %s.", listing(stream.name for stream in streams), path)
    return path


def _check_same(path: Path, info: StoreInfo, streams: Sequence[CellStream], options: Mapping[str, Any]) -> None:
    """Raise if a store is of other sources, or was made of other parts of them: it is not ours to replace."""
    stored, given = [_base(one["name"]) for one in info.sources], [_base(stream.name) for stream in streams]
    if stored != given:
        raise OptionError(
            f"cache={str(path)!r} is a store of {listing(stored)}, not of {listing(given)}; name another folder."
        )
    for name, value in options.items():
        if info.options.get(name) != value:
            raise OptionError(
                f"cache={str(path)!r} was converted with {name}={info.options.get(name)!r}, not {value!r}; "
                "name another folder."
            )


def _base(name: str) -> str:
    # The same folder may be named from elsewhere; what is in a file is compared by its fingerprint.
    return name.rstrip("/").rpartition("/")[2]


def _is_fresh(info: StoreInfo, streams: Sequence[CellStream]) -> bool:
    stored = [{key: value for key, value in one.items() if key not in _OF_STORE} for one in info.sources]
    return stored == [stream.fingerprint() for stream in streams]


def _check_genes(path: Path, streams: Sequence[CellStream], gene_key: str | None, vocab: GeneVocab | None) -> None:
    """Raise if a store lacks genes that the sources have and the vocabulary wants: it may have been made by hand."""
    from scforge.data.store_files import open_store_group, read_vocab

    stored = read_vocab(open_store_group(path)[0]).genes
    union = union_vocab(streams, gene_key)
    lost = set(union.genes).difference(stored) if vocab is None else _found(vocab, union.genes) - _found(vocab, stored)
    if lost:
        raise OptionError(
            f"cache={str(path)!r} was converted over other genes and lacks {len(lost)} that are needed here; "
            "name another folder."
        )


def _found(vocab: GeneVocab, names: Sequence[str]) -> set[str]:
    indices = np.unique(vocab.gene_indices(names))
    return {vocab.genes[index] for index in indices[indices >= 0]}
