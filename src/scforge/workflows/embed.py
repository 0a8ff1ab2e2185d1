"""Embed files and stores of any size, with several processes and the option to resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch
from anndata import AnnData

from scforge._checks import check_count
from scforge._constants import AUTO_KEY, UNS_KEY
from scforge._io import (
    atomic_path,
    atomic_write_text,
    check_folder,
    check_writable,
    locked,
    new_h5,
    others_in_store,
    put_file,
    read_json,
    sha256_of_json,
    swap_in,
)
from scforge._opening import check_h5
from scforge.data.cells import Cells, CellSource
from scforge.data.paths import is_url
from scforge.data.readers import Location, is_query, open_streams, table_digest
from scforge.data.sources import AUTO, open_cells, read_h5ad
from scforge.data.store import StoreCells, StoreInfo, is_store
from scforge.errors import (
    DataError,
    GeneMismatchError,
    MissingFileError,
    ModelFileError,
    OptionError,
    listing,
)
from scforge.estimators.encoder import Encoder
from scforge.estimators.setup import setup_of, source_of
from scforge.training.predict import embed
from scforge.workflows.models import load_named
from scforge.workflows.outputs import check_ending
from scforge.workflows.train import embedded_adata

if TYPE_CHECKING:
    from scforge.data.census import CensusQuery

_PLAN = "plan.json"

_MARK = "scforge_embedding"
"""Root attribute of an output with the hash of its plan. Only outputs with this attribute may be replaced."""

_ENCODING = {"encoding-type": "array", "encoding-version": "0.2.0"}

_BLOCK = 8192
"""Number of cells per block: few enough to save memory, and enough to batch cells of similar length."""


def chosen_device(device: str | torch.device) -> str | torch.device:
    """Return a device; ``"auto"`` selects a GPU if available, a different one for each process on a machine."""
    if device != "auto":
        return device
    if not torch.cuda.is_available():
        return "cpu"
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return f"cuda:{int(local) % torch.cuda.device_count()}"


def _hash_with(start: bytes, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 hash of bytes, and of names, types, shapes and values of tensors."""
    digest = hashlib.sha256(start)
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\0".encode())
        # NumPy has no bfloat16.
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def source_identity(source: Any, cells: Cells, *, layer: str | None, gene_key: str | None) -> dict[str, Any]:
    """Return a JSON-safe fingerprint of the cells.

    For a store, it is the hash of the content. For files, it contains sizes and modification times, so that files are
    not read twice. For cells in memory, it is a digest.

    Parameters
    ----------
    source
        The source given by the user.
    cells
        The opened cells.
    layer, gene_key
        Locations of the counts and gene names.

    Raises
    ------
    OptionError
        If cells of this type have no fingerprint.
    """
    if isinstance(cells, StoreCells):
        if is_store(cells.place):
            return {"content_hash": StoreInfo.read(cells.place).content_hash}
        return {"files": Location(cells.place).identity()}
    if isinstance(source, str | os.PathLike | list | tuple):
        fingerprints = [stream.fingerprint() for stream in open_streams(source, layer=layer)]
        return {"files": fingerprints, "layer": layer, "gene_key": gene_key}
    if isinstance(cells, CellSource):
        digest = hashlib.sha256(np.ascontiguousarray(cells.totals, dtype=np.float64))
        for part in (cells.counts.indptr.astype(np.int64), cells.counts.indices.astype(np.int64), cells.counts.data):
            digest.update(np.ascontiguousarray(part))
        return {"counts": digest.hexdigest(), "obs": None if cells.obs is None else table_digest(cells.obs)}
    raise OptionError(
        f"is of type {type(source).__name__!r}, which is not supported; pass a path, a store or an AnnData.",
        argument="source",
    )


class EmbeddingFiles:
    """The output file of an embedding run, and a hidden folder next to it with one file per finished block.

    Parameters
    ----------
    output
        Path that ends with ``.zarr`` or ``.h5ad``.
    overwrite
        Whether to replace another embedding at `output`, or a different unfinished embedding.

    Raises
    ------
    OptionError
        If `output` has another suffix, or exists and is not an embedding.
    """

    def __init__(self, output: Path, *, overwrite: bool) -> None:
        check_ending(output, [".zarr", ".h5ad"])
        self.is_zarr, self._given = output.suffix == ".zarr", str(output)
        if output.is_symlink() and not self.is_zarr:
            raise OptionError("is a link; pass the path of the file that it points to.", output=self._given)
        output = output.resolve() if output.is_symlink() else output  # a link to a folder stays
        self.output, self.overwrite = output, overwrite
        check_folder("output", output.parent)
        self.folder = output.with_name(f".{output.name}.embedding")
        self._lock = self.folder.with_name(f"{self.folder.name}.lock")
        check_writable("output", output)
        self.mark()

    def mark(self) -> str | None:
        """Return the plan hash of the existing output, or None if it does not exist or is an empty folder.

        Raises
        ------
        OptionError
            If the output exists and is not an embedding, and so must not be replaced.
        """
        output = self.output
        if not output.exists():
            return None
        if output.is_dir() != self.is_zarr:
            what = "a file, but .zarr output is a folder" if self.is_zarr else "a folder, but .h5ad output is a file"
            raise OptionError(f"is {what}; choose another name.", output=self._given)
        if self.is_zarr and not any(output.iterdir()):
            return None
        try:
            if self.is_zarr:
                mark = str(read_json(output / "zarr.json")["attributes"][_MARK])
            else:
                with h5py.File(output, "r") as file:
                    mark = str(file.attrs[_MARK])
        except (OSError, ValueError, KeyError, TypeError):
            raise OptionError(
                "exists and is not an embedding written by scforge; choose another name.", output=self._given
            ) from None
        if others := others_in_store(output) if self.is_zarr else []:
            raise OptionError(
                f"contains {listing(others)}, which scforge did not write; move it, or choose another name.",
                output=self._given,
            )
        return mark

    def begin(self, plan: dict[str, Any], *, alone: bool) -> bool:
        """Create the folder, or resume from an existing folder; return False if the output is already complete.

        Parameters
        ----------
        plan
            JSON-safe description of model, cells and options.
        alone
            Whether this is the only process, which may recompute a complete output.

        Raises
        ------
        OptionError
            If the output contains another embedding, or another embedding was started there.
        """
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._lock):
            # Of several processes the last may come when the others have finished: it must not begin again.
            if self.is_complete(plan) and not (self.overwrite and alone):
                self._remove()  # of a process killed after its last step
                return False
            if not self.overwrite and self.mark() not in (None, sha256_of_json(plan, sort_keys=True)):
                raise OptionError(
                    "exists and contains an embedding of other cells or from another model, or with "
                    "other options; choose another name, or pass overwrite=True (--overwrite) to replace it.",
                    output=self._given,
                )
            begun = self._begun()
            if begun not in (None, plan):
                if not self.overwrite:
                    raise OptionError(
                        f"an unfinished embedding in {str(self.folder)!r} {_difference(begun or {}, plan)}; use the "
                        "same settings to resume, or pass overwrite=True (--overwrite) to start again."
                    )
                self._remove()
            self.folder.mkdir(exist_ok=True)
            if begun != plan:
                atomic_write_text(self.folder / _PLAN, json.dumps(plan), overwrite=True)
        return True

    def path_of(self, block: int) -> Path:
        """Return the file of a block of cells, which exists once the block is done."""
        return self.folder / f"{block}.npy"

    def write(self, block: int, embedding: np.ndarray) -> None:
        """Write the embedding of a block of cells, float32, shape (cells of the block, D), with its checksum."""
        with atomic_path(self.path_of(block), overwrite=True) as temporary, temporary.open("wb") as file:
            np.save(file, embedding)
            file.write(hashlib.sha256(embedding.tobytes()).digest())

    def _read(self, block: int, plan: dict[str, Any]) -> np.ndarray:
        path = self.path_of(block)
        n_cells = min(plan["block_size"], plan["n_cells"] - block * plan["block_size"])
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            embedding = np.load(file, allow_pickle=False)
            is_whole = (embedding.shape, embedding.dtype) == ((n_cells, plan["n_latent"]), np.dtype(np.float32))
            if is_whole and file.read() == hashlib.sha256(embedding.tobytes()).digest():
                return embedding
        raise DataError(f"{str(path)!r} is not an intact block of the embedding; remove it and run the command again.")

    def finish(
        self, plan: dict[str, Any], n_blocks: int, make: Callable[[], AnnData], copy: Callable[[Any], None]
    ) -> None:
        """Assemble the output if all blocks are done and no other process has done so.

        Parameters
        ----------
        plan, n_blocks
            Description of the embedding, and number of blocks.
        make
            Function that creates the AnnData into which the embedding is written.
        copy
            Function that copies further content into the HDF5 file or zarr group of the output.
        """
        with locked(self._lock):
            if not self.folder.exists() or not all(self.path_of(block).exists() for block in range(n_blocks)):
                return
            parts = (self._read(block, plan) for block in range(n_blocks))
            # Random, so that nothing of others lies there.
            result = self.folder / f"result.{secrets.token_hex(8)}{'.zarr' if self.is_zarr else '.h5ad'}"
            _write(result, make(), parts, plan, copy)
            self.mark()  # raises if others have written there meanwhile
            try:
                if self.is_zarr:
                    swap_in(result, self.output, overwrite=self.overwrite)
                else:
                    put_file(result, self.output, overwrite=self.overwrite)
            except OSError as error:
                if self.overwrite or not self.output.exists():
                    raise
                raise OptionError(
                    "has appeared meanwhile; move it, or choose another name.", output=self._given
                ) from error
            self._remove()

    def is_complete(self, plan: dict[str, Any]) -> bool:
        """Return whether the output exists and matches `plan`."""
        return self.mark() == sha256_of_json(plan, sort_keys=True)

    def _begun(self) -> dict[str, Any] | None:
        """Return the plan in the folder, or None if there is none. Raises an OptionError if the folder is a user's."""
        if not os.path.lexists(self.folder):
            return None
        is_folder = self.folder.is_dir() and not self.folder.is_symlink()
        parts = list(self.folder.iterdir()) if is_folder else []
        names = [part.name for part in parts]
        own = re.compile(r"\d+\.npy|result\.[0-9a-f]{16}\.(zarr|h5ad)|plan\.json|\.(\d+|plan)\.[0-9a-f]{8}\.(npy|json)")
        is_plain = all(part.is_dir() if part.suffix == ".zarr" else part.is_file() for part in parts)
        has_links = any(part.is_symlink() for part in parts)
        if not is_folder or not is_plain or has_links or not all(map(own.fullmatch, names)):
            raise OptionError(
                f"would be computed in {str(self.folder)!r}, which is not an unfinished embedding by "
                "scforge; move it, or choose another name.",
                output=self._given,
            )
        try:
            plan = read_json(self.folder / _PLAN)
        except (MissingFileError, ModelFileError):
            return {} if names else None
        return plan if isinstance(plan, dict) else {}

    def _remove(self) -> None:
        if self._begun() is not None:
            shutil.rmtree(self.folder)


def _write(
    path: Path, adata: AnnData, parts: Iterator[np.ndarray], plan: dict[str, Any], copy: Callable[[Any], None]
) -> None:
    """Write an AnnData as zarr or h5ad, with an embedding that is passed block by block."""
    import zarr
    from anndata.io import write_elem

    is_zarr, shape = path.suffix == ".zarr", (plan["n_cells"], plan["n_latent"])
    with contextlib.ExitStack() as stack:
        root: Any = zarr.open_group(path, mode="w", zarr_format=3) if is_zarr else stack.enter_context(new_h5(path))
        write_elem(root, "/", adata)
        copy(root)
        create = root["obsm"].create_array if is_zarr else root["obsm"].create_dataset
        array = create(plan["key"], shape=shape, chunks=(min(plan["block_size"], shape[0]), shape[1]), dtype="f4")
        array.attrs.update(_ENCODING)
        start = 0
        for part in parts:
            array[start : start + len(part)] = part
            start += len(part)
        root.attrs[_MARK] = sha256_of_json(plan, sort_keys=True)
        if is_zarr:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
            zarr.consolidate_metadata(root.store)


def _difference(begun: dict[str, Any], plan: dict[str, Any]) -> str:
    if not begun:
        return "has no intact plan"
    name = next(name for name in plan if begun.get(name) != plan[name])
    how = {
        "model": "another model (other weights, options or genes)",
        "source": "another source (other cells, or cells that have changed since)",
    }.get(name, f"{name}={begun.get(name)!r}, not {name}={plan[name]!r}")
    return f"was started with {how}"


@dataclass(frozen=True)
class EmbeddingInfo:
    """Summary of an embedding by one process; ``print(info)`` shows it.

    Attributes
    ----------
    output
        The file or folder.
    key
        Key in ``obsm`` of the output.
    n_cells, n_latent
        Number of cells and dimensions of the entire embedding.
    n_embedded
        Number of cells that this process embedded in this call.
    seconds
        Run time of this call.
    complete
        Whether the output is complete. If not, other processes are still running.
    counts
        Whether the output contains the genes and counts of the source.

    Examples
    --------
    >>> from pathlib import Path
    >>> info = EmbeddingInfo(Path("out.zarr"), "X_scforge", 2700, 32, 2700, seconds=1.5, complete=True)
    >>> info.n_cells, info.complete
    (2700, True)
    """

    output: Path
    key: str
    n_cells: int
    n_latent: int
    n_embedded: int
    seconds: float
    complete: bool
    counts: bool = False

    def __str__(self) -> str:
        rate = self.n_embedded / max(self.seconds, 1e-9)
        done = f"{self.n_embedded:,} of {self.n_cells:,} cells embedded in this run"
        done += f" in {self.seconds:,.1f} s ({rate:,.0f} cells/s)" if self.n_embedded else ""
        shape = f"{self.n_cells:,} cells x {self.n_latent:,} dimensions"
        where = f"obsm[{self.key!r}] of {self.output}"
        if self.complete:
            along = "obs, genes and counts" if self.counts else "obs and without the genes and counts of the source"
            return f"{done}; {where} is complete: {shape}, with {along}."
        return f"{done}; {where} ({shape}) appears when the other processes are done."


def embed_to(
    model: Encoder | str | os.PathLike[str],
    source: AnnData | Cells | CensusQuery | str | os.PathLike[str] | list[str],
    output: str | os.PathLike[str],
    *,
    key: str = AUTO_KEY,
    batch_size: int = 256,
    block_size: int = _BLOCK,
    rank: int | None = None,
    world_size: int | None = None,
    counts: bool = True,
    correction: float = 0.0,
    overwrite: bool = False,
    progress_bar: bool = True,
    device: str | torch.device = "auto",
) -> EmbeddingInfo:
    """Embed cells into a file. This function implements ``scforge embed``.

    The cells are split into blocks, and only one block at a time is in memory. Several independent processes share the
    work: block k is embedded by process k modulo `world_size`. The last process assembles the output, so it is complete
    or does not exist. Until then, the blocks are in a hidden folder next to it. If a process was killed, the same call
    resumes, even with a different number of processes. If the output is already complete, nothing is done.

    Parameters
    ----------
    model
        A model or its folder.
    source
        Cells: a store, which is read in blocks, or any other source for :func:`scforge.data.open_cells`, which each
        process reads into memory.
    output
        Path that ends with ``.zarr`` or ``.h5ad``, for an AnnData with ``obs`` as in the source, the embedding
        (float32, shape (N, D)) in ``obsm[key]``, and its settings in ``uns["scforge"][key]``. Several processes must
        have access to the same folder.
    key
        Key in ``obsm``; ``"auto"`` is the same as in :meth:`Encoder.get_latent_representation`.
    batch_size
        Number of cells per batch.
    block_size
        Number of cells per block, and per chunk of the output. A killed process loses less than one block.
    rank, world_size
        Index of this process, starting at 0, and number of processes. If None, reads both from ``torchrun`` or
        ``srun``, or uses a single process.
    counts
        Whether `output` also contains ``X``, ``var``, ``obsm`` and the layer with the counts, e.g. to color a UMAP by a
        gene. They are only copied from an AnnData or a single local h5ad file, block by block from h5ad to h5ad. Output
        for a store, several files or a URL, which may be much larger than memory, never contains them. To plot a gene
        then, copy ``obsm[key]`` into the source, which has the same order of cells.
    correction
        How strongly the embedding is corrected for batches, see :meth:`Encoder.get_latent_representation`.
    overwrite
        Whether to replace an embedding of other cells or from another model, even if it is unfinished. A single process
        also recomputes an identical embedding.
    progress_bar
        Whether to show a progress bar, in the first process only.
    device
        Device to compute on; ``"auto"`` uses a CUDA device if available, a different one for each process on a machine.

    Returns
    -------
    A summary of this process.

    Raises
    ------
    OptionError
        If an argument is invalid, `output` exists and is not an embedding, or an unfinished output is from other cells
        or another model.
    MissingFileError, ModelFileError
        If the model or the source is missing or corrupted.
    GeneMismatchError
        If `source` contains too few genes of the model.

    Warns
    -----
    NotTrainedWarning
        If the model is not trained.

    Examples
    --------
    >>> import anndata, scforge
    >>> adata = scforge.datasets.pbmc3k()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> model = scforge.models.Encoder(adata)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> info = embed_to(model, adata, "embedded.zarr", progress_bar=False)
    >>> found = anndata.read_zarr("embedded.zarr")
    >>> found.obsm["X_scforge"].shape, found.shape
    ((2700, 32), (2700, 16634))
    """
    rank, world_size = _which_process(rank, world_size)
    check_count("batch_size", batch_size, "cells")
    check_count("block_size", block_size, "cells")
    if not isinstance(key, str) or not key or "/" in key:
        raise OptionError("is not a valid obsm key; pass a string without a slash.", key=key)
    if is_url(output):
        raise OptionError("is a URL; pass a local path, and upload the result afterwards.", output=output)
    files = EmbeddingFiles(Path(output), overwrite=overwrite)
    if not isinstance(model, Encoder):
        model = load_named(model, f"model={str(model)!r} (--model)")
    fitted = model.fitted
    fitted.check_ready("its embedding is")
    key = fitted.obsm_key if key == AUTO_KEY else key
    before = model.device
    model.to_device(chosen_device(device))
    try:
        cells = _open(model, source)
        own = (
            {}
            if isinstance(source, list | tuple) or is_query(source)
            else setup_of(type(model), source_of(model, source))
        )
        codes = fitted.codes_to_correct(cells, correction, batch_key=own.get("batch_key"))
        kept = _with_genes(model, source) if counts else None
        identity = json.dumps(model.spec.to_json(), sort_keys=True) + model.vocab.hash
        plan = {
            "model": _hash_with(identity.encode(), model.module.state_dict()),
            "source": source_identity(source, cells, **_setup(model)),
            "key": key,
            "n_cells": len(cells),
            "block_size": block_size,
            "counts": kept is not None,
        }
        if codes is not None:
            assert fitted.correction is not None
            corrected = _hash_with(codes.tobytes(), fitted.correction.tensors())
            plan |= {"correction": float(correction), "corrected": corrected}
        hidden = not progress_bar or rank != 0
        return _embed_blocks(
            model, cells, kept, codes, files, plan, rank, world_size, batch_size=batch_size, hidden=hidden
        )
    finally:
        model.to_device(before)


def _embed_blocks(
    model: Encoder,
    cells: Cells,
    kept: AnnData | Path | None,
    codes: np.ndarray | None,
    files: EmbeddingFiles,
    plan: dict[str, Any],
    rank: int,
    world_size: int,
    *,
    batch_size: int,
    hidden: bool,
) -> EmbeddingInfo:
    """Embed the remaining blocks of this process, and assemble the output if all blocks are done."""
    from tqdm import tqdm

    def embedded(rows: np.ndarray) -> np.ndarray:
        try:
            found = embed(model.module, cells, model.tokenizer, objective=objective, batch_size=batch_size, rows=rows)
        except torch.OutOfMemoryError as error:
            raise OptionError(
                f"requires more memory than the device {str(model.device)!r} has; lower batch_size (--batch-size).",
                batch_size=batch_size,
            ) from error
        return model.fitted.corrected(found, None if codes is None else codes[rows], plan.get("correction", 0.0))

    def frame() -> AnnData:
        obs = embedded_adata(cells, np.empty((len(cells), 0), dtype=np.float32), plan["key"]).obs
        settings = model.fitted.provenance_of(cells, plan["n_latent"], correction=plan.get("correction", 0.0))
        uns = {UNS_KEY: {plan["key"]: settings}}
        if isinstance(kept, Path) and source_identity(kept, cells, **_setup(model)) != plan["source"]:
            raise DataError("has changed since its cells were embedded; embed them again.", source=str(kept))
        found = read_h5ad(kept) if isinstance(kept, Path) and copied is None else kept
        if not isinstance(found, AnnData):
            return AnnData(obs=obs, uns=uns)
        layer = (setup_of(type(model), found) or model.fitted.setup)["layer"]
        layers = {} if layer is None else {layer: found.layers[layer]}
        obsm = {key: value for key, value in found.obsm.items() if key != plan["key"]}
        return AnnData(found.X, obs=obs, var=found.var, layers=layers, obsm=obsm, uns=uns)

    def copy(root: Any) -> None:
        """Copy the counts and genes of an h5ad file into another one, a block at a time."""
        if copied is None:
            return
        layer = model.fitted.setup["layer"]
        layers = [] if layer is None else [f"layers/{layer}"]
        with h5py.File(copied, "r") as file:
            check_h5(file, str(copied))
            for name in ["X", "var", *layers, "obsm"]:
                if name in file:
                    if name in root:
                        del root[name]
                    file.copy(name, root, name)
        if f"obsm/{plan['key']}" in root:
            del root[f"obsm/{plan['key']}"]

    copied: Path | None = None
    if isinstance(kept, Path) and not files.is_zarr:
        with h5py.File(kept, "r") as file:
            copied = kept if file.attrs.get("encoding-type") == "anndata" else None
    objective = model.objective
    plan = json.loads(json.dumps(plan | {"n_latent": embedded(np.zeros(1, dtype=np.int64)).shape[1]}))
    n_cells, size = plan["n_cells"], plan["block_size"]
    blocks = [np.arange(start, min(start + size, n_cells)) for start in range(0, n_cells, size)]
    n_embedded, began = 0, time.perf_counter()
    if files.begin(plan, alone=world_size == 1):
        mine = range(rank, len(blocks), world_size)
        todo = [block for block in mine if not files.path_of(block).exists()]
        total, left = (sum(len(blocks[block]) for block in some) for some in (mine, todo))
        with tqdm(total=total, initial=total - left, desc="Embedding", unit="cell", disable=hidden or None) as bar:
            for block in todo:
                files.write(block, embedded(blocks[block]))
                n_embedded += len(blocks[block])
                bar.update(len(blocks[block]))
        # Also with nothing to do: all may be done, but for the last step.
        files.finish(plan, len(blocks), frame, copy)
    return EmbeddingInfo(
        output=files.output,
        key=plan["key"],
        n_cells=n_cells,
        n_latent=plan["n_latent"],
        n_embedded=n_embedded,
        seconds=time.perf_counter() - began,
        complete=files.is_complete(plan),
        counts=plan["counts"],
    )


def _with_genes(model: Encoder, source: Any) -> AnnData | Path | None:
    """Return the cells whose genes and counts the output can contain: an AnnData or an h5ad file; None for others."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return path if path.suffix == ".h5ad" and path.is_file() else None
    found = source_of(model, source)
    if not isinstance(found, AnnData):
        return None
    return found.to_memory() if found.isbacked else found


def _open(model: Encoder, source: Any) -> Cells:
    """Open cells over the genes of the model."""
    try:
        if is_query(source):
            cells = open_cells(source, model.vocab, cache=AUTO)
        elif isinstance(source, list | tuple):
            cells = open_cells(source, model.vocab, **_setup(model))
        else:
            cells = model.open_cells(source)
    except GeneMismatchError as error:
        problem, _, way_out = str(error).rpartition("; ")
        if "_protein_coding'" not in way_out:
            raise
        raise GeneMismatchError(
            f"{problem}; the model (--model) contains genes of a single species, so use cells of that species, or a "
            "model that was trained on the species of these cells."
        ) from error
    if not len(cells):
        raise DataError("contains no cells to embed; pass at least one cell.", argument="source")
    return cells


def _setup(model: Encoder) -> dict[str, Any]:
    """Return the layer and gene column of the training data."""
    setup = model.fitted.setup
    return {"layer": setup.get("layer"), "gene_key": setup.get("gene_key")}


def _which_process(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the index of this process and the number of processes, as given or as set by a launcher."""
    if (rank is None) != (world_size is None):
        raise OptionError(f"and world_size={world_size!r} must be given together; pass both, or neither.", rank=rank)
    if rank is None or world_size is None:
        # SLURM says SLURM_NTASKS to the script of a job, too, which is one process; the other name srun says alone.
        for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            if all(os.environ.get(name, "").isdecimal() for name in names):
                rank, world_size = (int(os.environ[name]) for name in names)
                break
        else:
            return 0, 1
    check_count("world_size", world_size, "processes")
    check_count("rank", rank, "", least=0)
    if rank >= world_size:
        raise OptionError(f"must be less than world_size={world_size}, because ranks start from 0.", rank=rank)
    return int(rank), int(world_size)
