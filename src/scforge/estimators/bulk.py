"""Embedding as many cells as there are, into a file: block by block, over any number of processes, resumable.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from anndata import AnnData

from scforge._checks import check_bool, check_count
from scforge._constants import AUTO_KEY, UNS_KEY
from scforge.data.cells import Cells
from scforge.data.readers import is_query, is_url
from scforge.data.sources import open_cells
from scforge.errors import DataError, GeneMismatchError, NotTrainedWarning, OptionError, warn
from scforge.estimators.base import CellModel
from scforge.estimators.bulk_files import EmbeddingFiles
from scforge.estimators.config_data import embedded_adata
from scforge.estimators.identity import model_identity, source_identity
from scforge.estimators.model_folder import load_named
from scforge.estimators.placing import device_for, move_to
from scforge.models.components.gene_vectors import check_filled
from scforge.training.predict import embed

if TYPE_CHECKING:
    from scforge.data.census import CensusQuery


_BLOCK = 8192
"""Cells of a block: few enough for little memory, many enough that cells of like length find each other."""


@dataclass(frozen=True)
class EmbeddingInfo:
    """What a process did for an embedding; ``print(info)`` shows it.

    Attributes
    ----------
    output
        The file or folder.
    key
        Key in ``obsm`` there.
    n_cells, n_latent
        Cells and dimensions of the whole embedding.
    n_embedded
        Cells that this process embedded in this call.
    seconds
        How long that took.
    complete
        Whether the output is there; if not, other processes are still at work.

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

    def __str__(self) -> str:
        rate = self.n_embedded / max(self.seconds, 1e-9)
        done = f"{self.n_embedded:,} of {self.n_cells:,} cells embedded in this run"
        done += f" in {self.seconds:,.1f} s ({rate:,.0f} cells/s)" if self.n_embedded else ""
        shape = f"{self.n_cells:,} cells x {self.n_latent:,} dimensions"
        where = f"obsm[{self.key!r}] of {self.output}"
        if self.complete:
            return f"{done}; {where} is complete: {shape}, with obs and without the genes and counts of the source."
        return f"{done}; {where} ({shape}) appears when the other processes are done."


def embed_to(
    model: CellModel | str | os.PathLike[str],
    source: AnnData | Cells | CensusQuery | str | os.PathLike[str] | list[str],
    output: str | os.PathLike[str],
    *,
    key: str = AUTO_KEY,
    batch_size: int = 256,
    block_size: int = _BLOCK,
    rank: int | None = None,
    world_size: int | None = None,
    overwrite: bool = False,
    progress_bar: bool = True,
    device: str | torch.device = "auto",
) -> EmbeddingInfo:
    """Embed cells into a file, as ``scforge embed`` does.

    The cells are cut into blocks, of which one at a time is in memory. Several processes, which need not know of each
    other, take turns: block k belongs to process k modulo `world_size`. Whoever ends last puts the output in its place,
    so it appears whole or not at all. Until then it grows in a hidden folder beside, from which the same call goes on
    if a process was killed, also with another number of processes. Where the output is complete already, nothing is
    done.

    Parameters
    ----------
    model
        A model, or the folder of one.
    source
        Cells: a store, which stays on disk; or what else :func:`scforge.data.open_cells` takes, which each process
        reads into its memory.
    output
        ``.zarr`` or ``.h5ad``: an AnnData with ``obs`` as in the source, the embedding (float32, shape (N, D)) in
        ``obsm[key]``, and in ``uns["scforge"][key]`` what it was made with. It has no genes, as the source may be far
        larger than memory; to plot a gene, copy ``obsm[key]`` into the cells of the source, whose order is the same.
        Several processes need to see the same folder.
    key
        Key in ``obsm``; ``"auto"`` as for :meth:`Encoder.get_latent_representation`.
    batch_size
        Cells that go through the model at once.
    block_size
        Cells of a block, and of a chunk of the output. A process that is killed loses less than one.
    rank, world_size
        Which process this is, from 0, and of how many. None: what ``torchrun`` or ``srun`` says, else 0 of 1.
    overwrite
        Replace an embedding of other cells or by another model, finished or not. One process also makes one again that
        is the same.
    progress_bar
        Show a bar; of several processes that of the first.
    device
        Where to compute; ``"auto"`` takes a CUDA device if there is one, each process of a machine its own.

    Returns
    -------
    What this process did.

    Raises
    ------
    OptionError
        If an argument cannot be used, something else is at `output`, or what was begun there is of other cells or by
        another model.
    MissingFileError, ModelFileError
        If the model or the source is not there, or is damaged.
    GeneMismatchError
        If `source` has too few genes of the model.

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
    >>> anndata.read_zarr("embedded.zarr").obsm["X_scforge"].shape
    (2700, 32)
    """
    rank, world_size = _which_process(rank, world_size)
    check_count("batch_size", batch_size, "cells")
    check_count("block_size", block_size, "cells")
    if not isinstance(key, str) or not key or "/" in key:
        raise OptionError(f"key={key!r} is not a name in obsm; give text without a slash.")
    if is_url(output):
        raise OptionError(f"output={output!r} is a URL; give a path, and copy the result from there.")
    files = EmbeddingFiles(Path(output), overwrite=check_bool("overwrite", overwrite))
    where = device_for(device)
    if not isinstance(model, CellModel):
        model = _load(model)
    check_filled(model.module)
    key = model._obsm_key if key == AUTO_KEY else key
    if not model.is_trained_:
        warn("The model is not trained; its embedding is random.", NotTrainedWarning)
    try:
        cells = _open(model, source)
    except GeneMismatchError as error:
        problem, _, way_out = str(error).rpartition("; ")
        if "_protein_coding'" not in way_out:
            raise
        # Who trains may take another vocabulary; a trained model brings its own.
        raise GeneMismatchError(
            f"{problem}; the model (--model) knows genes of its own species only, so give cells of that species, or a "
            "model that was trained on this one."
        ) from error
    if not len(cells):
        raise DataError("source has no cells to embed.")
    before = model.device
    move_to(model, where)
    try:
        return _Worker(model, cells, batch_size).work(
            files,
            {
                "model": model_identity(model),
                "source": source_identity(source, cells, **_setup(model)),
                "key": key,
                "n_cells": len(cells),
                "block_size": block_size,
            },
            rank,
            world_size,
            hidden=not check_bool("progress_bar", progress_bar) or rank != 0,
        )
    finally:
        move_to(model, before)


def _load(path: str | os.PathLike[str]) -> CellModel:
    """Load a model; say so if its folder is that of a whole training."""
    return load_named(path, f"model={str(path)!r} (--model)")


@dataclass(frozen=True)
class _Worker:
    """One process of an embedding."""

    model: CellModel
    cells: Cells
    batch_size: int

    def embed(self, rows: np.ndarray) -> np.ndarray:
        """Return the embedding of the cells at `rows`, float32, shape (len(rows), D)."""
        model = self.model
        objective = model.spec.build_objective()
        try:
            return embed(
                model.module, self.cells, model.tokenizer, objective=objective, batch_size=self.batch_size, rows=rows
            )
        except torch.OutOfMemoryError as error:
            raise OptionError(
                f"batch_size={self.batch_size} needs more memory than the device {str(model.device)!r} has; pass a "
                "smaller one (--batch-size)."
            ) from error

    def work(
        self, files: EmbeddingFiles, plan: dict[str, Any], rank: int, world_size: int, *, hidden: bool
    ) -> EmbeddingInfo:
        """Embed the blocks of this process that are not done yet, and finish if it is the last."""
        from tqdm import tqdm

        plan["n_latent"] = self.embed(np.zeros(1, dtype=np.int64)).shape[1]
        plan = json.loads(json.dumps(plan))  # as it is read from the journal
        n_cells, size = plan["n_cells"], plan["block_size"]
        blocks = [np.arange(start, min(start + size, n_cells)) for start in range(0, n_cells, size)]
        n_embedded, began = 0, time.perf_counter()
        with files.at_work(plan, rank, world_size, lambda: self._frame(plan)) as needed:
            mine = range(rank, len(blocks), world_size) if needed else range(0)
            todo = sorted(set(mine) - files.done()) if needed else []
            total, left = (sum(len(blocks[block]) for block in some) for some in (mine, todo))
            with tqdm(total=total, initial=total - left, desc="Embedding", unit="cell", disable=hidden or None) as bar:
                while needed:
                    for block in todo:
                        files.write(block, self.embed(blocks[block]))
                        n_embedded += len(blocks[block])
                        bar.update(len(blocks[block]))
                    # Also with nothing to do: all may be done, but for the last step.
                    todo = files.finish(plan, len(blocks))
                    needed = bool(todo)
        return EmbeddingInfo(
            output=files.output,
            key=plan["key"],
            n_cells=n_cells,
            n_latent=plan["n_latent"],
            n_embedded=n_embedded,
            seconds=time.perf_counter() - began,
            complete=files.is_complete(plan),
        )

    def _frame(self, plan: dict[str, Any]) -> AnnData:
        """Return what the output holds besides the embedding."""
        adata = embedded_adata(self.cells, np.empty((len(self.cells), 0), dtype=np.float32), plan["key"])
        made_with = self.model._provenance(self.cells, plan["n_latent"])
        return AnnData(obs=adata.obs, uns={UNS_KEY: {plan["key"]: made_with}})


def _open(model: CellModel, source: Any) -> Cells:
    """Open the cells over the genes of the model."""
    if is_query(source):
        return open_cells(source, model.vocab)
    if isinstance(source, list | tuple):
        return open_cells(source, model.vocab, **_setup(model))
    return model.cells(source)


def _setup(model: CellModel) -> dict[str, Any]:
    """Return where counts and names of genes were in the training data."""
    setup = model.registry_["setup_args"]
    return {"layer": setup.get("layer"), "gene_key": setup.get("gene_key")}


def _which_process(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return which process this is, and of how many, as given or as a launcher says."""
    if (rank is None) != (world_size is None):
        raise OptionError(f"rank={rank!r} and world_size={world_size!r} belong together; give both or neither.")
    found: tuple[Any, Any] = (rank, world_size)
    if rank is None:
        # SLURM says SLURM_NTASKS to the script of a job, too, which is one process; the other name srun says alone.
        for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            if all(os.environ.get(name, "").isdecimal() for name in names):
                found = (int(os.environ[names[0]]), int(os.environ[names[1]]))
                break
        else:
            return 0, 1
    check_count("world_size", found[1], "processes")
    check_count("rank", found[0], "a process", least=0)
    if found[0] >= found[1]:
        raise OptionError(f"rank={found[0]} is not below world_size={found[1]}; ranks count from 0.")
    return int(found[0]), int(found[1])
