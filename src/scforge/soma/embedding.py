"""Document vectors from a byte-level language model, and gene tables for the tokenizer ``gene_embedding``.

Shapes: N documents, B chunks, S tokens, H hidden.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from scforge._checks import check_choice, check_count
from scforge._io import atomic_path, check_output
from scforge.errors import DataError, OptionError, spelled
from scforge.soma.byte_data import Chunks
from scforge.soma.documents import Document, Files, read_documents
from scforge.soma.model_folder import device_of, read_model
from scforge.soma.v1.torch import Model

_SUFFIXES = (".parquet", ".npz", ".csv")


type ModelOrFolder = str | os.PathLike[str]


def embed(
    files: Files,
    model: ModelOrFolder,
    output: str | os.PathLike[str] | None = None,
    *,
    duplicates: str = "error",
    batch_size: int = 32,
    device: str = "auto",
    overwrite: bool = False,
    progress_bar: bool = True,
    **reading: Any,
) -> pd.DataFrame:
    r"""Embed files: one vector for each FASTA record, each table row, or each other file.

    The vector of a document is the mean of the model states over all its bytes. Long documents are split into sequences
    of the training length.

    Parameters
    ----------
    files
        Files to embed; see :func:`read_documents`.
    model
        Folder of the model or of its training run, or the result of :func:`scforge.soma.train`.
    output
        File to write the table to: ``.parquet`` or ``.npz``, which the tokenizer ``gene_embedding`` reads, or ``.csv``.
    duplicates
        ``"error"`` to reject duplicate names, or ``"mean"`` to average the vectors of entries with the same name, e.g.
        the isoforms of a gene.
    batch_size
        Number of sequences per batch.
    device
        ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    overwrite
        Whether to replace `output`.
    progress_bar
        Whether to show a progress bar.
    **reading
        Options for :func:`read_documents`: ``kind``, ``field``, ``gene_column``, ``text_column``.

    Returns
    -------
    One row per name, in the order of the files, float32; the index is named ``gene``.

    Raises
    ------
    OptionError
        If an option cannot be used.
    MissingFileError
        If a file or the model does not exist.
    ModelFileError
        If the model is corrupted.
    DataError
        If a file is empty or cannot be read, or a name occurs more than once.

    Examples
    --------
    >>> from pathlib import Path
    >>> from scforge import soma
    >>> _ = Path("dna.fasta").write_text(">a\nACGTACGT\n>b\nTTGACGTT\n")
    >>> sizes = {"embedding_dim": 8, "num_layers": 1, "num_heads": 1, "seq_len": 8}
    >>> trained = soma.train("dna.fasta", "run", **sizes, max_epochs=1, progress_bar=False)
    >>> vectors = soma.embed("dna.fasta", trained, "vectors.csv", progress_bar=False)
    >>> vectors.shape, vectors.index.tolist()
    ((2, 8), ['a', 'b'])
    """
    return _embed(
        read_documents(files, **reading), model, output, duplicates, batch_size, device, overwrite, progress_bar
    )


def gene_table(
    genes: Mapping[str, str | bytes],
    model: ModelOrFolder,
    output: str | os.PathLike[str] | None = None,
    *,
    batch_size: int = 32,
    device: str = "auto",
    overwrite: bool = False,
    progress_bar: bool = True,
) -> pd.DataFrame:
    r"""Embed the description or sequence of each gene, for the tokenizer ``gene_embedding``.

    Parameters
    ----------
    genes
        A mapping from gene name to text or bytes.
    model, output, batch_size, device, overwrite, progress_bar
        As in :func:`embed`, which also lists the errors.

    Returns
    -------
    One row per gene, float32. Both the table and the file `output` are valid values of the tokenizer option `table`.

    Raises
    ------
    DataError
        If there are no genes, or a gene has no text.

    Examples
    --------
    >>> from pathlib import Path
    >>> from scforge import soma
    >>> _ = Path("dna.fasta").write_text(">a\nACGTACGT\n>b\nTTGACGTT\n")
    >>> sizes = {"embedding_dim": 8, "num_layers": 1, "num_heads": 1, "seq_len": 8}
    >>> trained = soma.train("dna.fasta", "genes", **sizes, max_epochs=1, progress_bar=False)
    >>> genes = {"TP53": "guards the genome", "LYZ": "lyses bacterial walls"}
    >>> soma.gene_table(genes, trained, progress_bar=False).shape
    (2, 8)
    """
    if not isinstance(genes, Mapping) or not genes:
        raise DataError(
            "is empty or not a dict; pass at least one gene name with its text or sequence.", argument="genes"
        )
    documents = []
    for name, text in genes.items():
        if not isinstance(text, str | bytes) or not text:
            raise DataError(
                f"contains {text!r} for gene {name!r}; pass text or bytes, or remove the gene.", argument="genes"
            )
        documents.append(Document(str(name), text.encode() if isinstance(text, str) else text))
    return _embed(documents, model, output, "error", batch_size, device, overwrite, progress_bar)


def _embed(
    documents: Sequence[Document],
    model: ModelOrFolder,
    output: str | os.PathLike[str] | None,
    duplicates: str,
    batch_size: int,
    device: str,
    overwrite: bool,
    progress_bar: bool,
) -> pd.DataFrame:
    check_count("batch_size", batch_size, "sequences")
    check_choice("duplicates", duplicates, ("error", "mean"))
    if output is not None:
        if Path(output).suffix not in _SUFFIXES:
            raise OptionError(f"has an unknown format; it must end with {' or '.join(_SUFFIXES)}.", output=str(output))
        check_output("output", Path(output), overwrite=overwrite)
    names = pd.Index([document.name for document in documents], name="gene")
    if duplicates == "error" and names.has_duplicates:
        twice = names[names.duplicated()].unique()
        raise DataError(
            f"contains the name {twice[0]!r} more than once; rename one of the records, or pass "
            f"{spelled("duplicates='mean'", '--duplicates mean')}.",
            argument="files",
        )
    module, seq_len = read_model(model)
    vectors = _vectors(
        module.to(device_of(device)), Chunks(documents, seq_len), len(documents), batch_size, progress_bar
    )
    table = pd.DataFrame(vectors, index=names).add_prefix("soma_")
    if names.has_duplicates:
        table = table.groupby(level=0, sort=False).mean()
    if output is not None:
        with atomic_path(output, overwrite=overwrite, argument="output") as temporary:
            if temporary.suffix == ".parquet":
                table.to_parquet(temporary)
            elif temporary.suffix == ".npz":
                np.savez(temporary, genes=table.index.to_numpy(dtype=str), vectors=table.to_numpy())
            else:
                table.to_csv(temporary)
    return table


@torch.inference_mode()
def _vectors(module: Model, chunks: Chunks, n_documents: int, batch_size: int, progress_bar: bool) -> np.ndarray:
    """Return the mean state over the bytes of each document, float32, shape (N, H)."""
    device = next(module.parameters()).device
    sums = torch.zeros((n_documents, module.config.embedding_dim), dtype=torch.float64)
    order = np.argsort(-chunks.sizes, kind="stable")  # chunks of similar length share a batch
    with tqdm(total=len(chunks), desc="Embedding", unit="sequence", disable=not progress_bar) as bar:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            ids, _ = chunks.tokens(chosen, shorten=True)
            # Positions count from 0 in each sequence, as in training.
            states_bsh = module.encode(
                torch.from_numpy(ids).to(device), torch.arange(ids.shape[1], device=device)[None]
            )
            is_byte_bs = torch.from_numpy(np.arange(ids.shape[1]) < chunks.sizes[chosen][:, None])
            sums_bh = (states_bsh * is_byte_bs.to(device)[..., None]).sum(dim=1)
            sums.index_add_(0, torch.from_numpy(chunks.documents[chosen]), sums_bh.cpu().double())
            bar.update(len(chosen))
    n_bytes = np.bincount(chunks.documents, weights=chunks.sizes, minlength=n_documents)
    return (sums.numpy() / n_bytes[:, None]).astype(np.float32)
