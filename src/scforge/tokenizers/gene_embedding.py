"""A tokenizer with external gene vectors, such as text or protein embeddings."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open

from scforge._checks import check_bool, check_choice
from scforge.data.cells import CellBlock
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, OptionError, first_line, listing, warn
from scforge.tokenizers.base import RaggedTokens, no_known_gene, register_tokenizer
from scforge.tokenizers.continuous_projection import ContinuousProjectionTokenizer

logger = logging.getLogger("scforge")

_FEW = 0.5
"""Fraction of the vocabulary below which a warning is issued."""

_SUFFIXES = (".npz", ".parquet", ".safetensors")


type GeneTable = str | os.PathLike[str] | pd.DataFrame | Mapping[str, Any]
"""A file, a data frame indexed by gene name, or a dictionary from gene name to vector."""


def read_table(table: GeneTable) -> tuple[list[str], np.ndarray]:
    """Return the gene names and the vectors (float32, shape (N, D)) of a table.

    Raises
    ------
    OptionError
        If the type of `table` is not supported.
    MissingFileError
        If the file does not exist.
    DataError
        If the content is not a table of finite numbers with one name per row.
    """
    where = "table" if isinstance(table, pd.DataFrame | Mapping) else f"table={str(table)!r}"
    if isinstance(table, str | os.PathLike):
        if Path(table).suffix not in _SUFFIXES:
            raise OptionError(f"{where} has an unknown format; save the vectors as {' or '.join(_SUFFIXES)}.")
        if not Path(table).is_file():
            raise MissingFileError(f"{where} does not exist; pass the file with the gene vectors.")
    try:
        names, vectors = _read(table)
    except Exception as error:  # each reader raises different errors
        raise DataError(
            f"{where} cannot be read as genes with vectors of equal length: {first_line(error)}."
        ) from error
    if vectors.dtype.kind not in "biuf" or vectors.ndim != 2 or not vectors.size or len(names) != len(vectors):
        raise DataError(
            f"{where} has {len(names)} gene names and vectors of dtype {vectors.dtype} and shape {vectors.shape}; pass "
            "numeric vectors of shape (genes, dimensions)."
        )
    with np.errstate(over="ignore"):
        vectors = vectors.astype(np.float32, copy=False)
    bad = ~np.isfinite(vectors).all(axis=1)
    if bad.any():
        raise DataError(
            f"{where} contains missing or infinite values in the vectors of {int(bad.sum())} genes (first: "
            f"{names[int(bad.argmax())]!r}); remove these genes."
        )
    return names, vectors


def _read(table: Any) -> tuple[list[str], np.ndarray]:
    """Return names and vectors. Raises a ValueError or an error of a reader if the table cannot be read."""
    if isinstance(table, pd.DataFrame):
        return _parse_frame(table)
    if isinstance(table, Mapping):
        return [str(name) for name in table], _stack(table.values())
    path = Path(table)
    if path.suffix == ".parquet":
        return _parse_frame(pd.read_parquet(path))
    if path.suffix == ".npz":
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            return np.asarray(content["genes"]).astype(str).tolist(), np.asarray(content["vectors"])
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a dict
    if "genes" not in metadata:
        return list(tensors), _stack(tensors.values())
    (matrix,) = tensors.values()
    return [str(name) for name in json.loads(metadata["genes"])], matrix.float().numpy()


def _parse_frame(frame: pd.DataFrame) -> tuple[list[str], np.ndarray]:
    """Return names (index or only text column) and vectors (numeric columns or one column of vectors)."""
    is_number = np.array([dtype.kind in "biuf" for dtype in frame.dtypes], dtype=bool)
    numbers, others = frame.loc[:, is_number], frame.loc[:, ~is_number]
    nested = [name for name in others if len(frame) and isinstance(frame[name].iloc[0], list | tuple | np.ndarray)]
    texts = [name for name in others if name not in nested]
    indexed = not pd.api.types.is_numeric_dtype(frame.index.dtype)
    if len(texts) + indexed != 1 or len(nested) + bool(numbers.shape[1]) > 1:
        raise ValueError(
            "a table needs gene names (as the index or as its only text column) and either numeric columns or one "
            f"column of vectors; its columns are {listing(map(str, frame.columns))}"
        )
    names = frame.index.to_series() if indexed else frame[texts[0]]
    if names.isna().any():
        raise ValueError(f"{int(names.isna().sum())} rows have no gene name")
    vectors = _stack(frame[nested[0]]) if nested else numbers.to_numpy(dtype=np.float32, na_value=np.nan)
    return names.astype(str).tolist(), vectors


def _stack(rows: Iterable[Any]) -> np.ndarray:
    """Stack one vector per gene; all vectors must have the same size."""
    arrays = [row.detach().cpu().float().numpy() if isinstance(row, torch.Tensor) else row for row in rows]
    return np.stack([np.asarray(array) for array in arrays]) if arrays else np.empty((0, 0))


def match_vectors(names: Sequence[str], vectors: np.ndarray, vocab: GeneVocab) -> np.ndarray:
    """Return the vector of each token, float32, shape (V, D), with NaN rows for tokens without a vector.

    Parameters
    ----------
    names
        Gene name of each row: Ensembl ids, with or without version, or symbols.
    vectors
        Vector of each row, shape (N, D).
    vocab
        The genes.

    Raises
    ------
    GeneMismatchError
        If no name is a vocabulary gene.
    DataError
        If several rows of the same gene differ.
    """
    genes = vocab.gene_indices(names)
    matching = np.flatnonzero(genes >= 0)
    if not len(matching):
        raise no_known_gene("table", names, vocab)
    tokens = genes[matching] + vocab.n_special
    matched = np.full((len(vocab), vectors.shape[1]), np.nan, dtype=np.float32)
    matched[tokens] = vectors[matching]
    differs = (matched[tokens] != vectors[matching]).any(axis=1)
    if differs.any():
        gene = genes[matching][differs][0]
        rows = [names[row] for row in matching[genes[matching] == gene]]
        raise DataError(
            f"contains several vectors for gene {vocab.genes[gene]!r}, in the rows {listing(rows)}; keep one of "
            "the rows.",
            argument="table",
        )
    n_known = len(np.unique(tokens))
    report = f"table contains vectors for {n_known:,} of the {vocab.n_genes:,} genes of the vocabulary"
    logger.info("%s.", report)
    if n_known < _FEW * vocab.n_genes:
        warn(f"{report} ({n_known / vocab.n_genes:.0%}).")
    return matched


@register_tokenizer("gene_embedding")
class GeneEmbeddingTokenizer(ContinuousProjectionTokenizer):
    """Tokenize the expressed genes of a cell, with a pretrained vector for each gene.

    Tokens and options are the same as in :class:`~scforge.tokenizers.ContinuousProjectionTokenizer`. The vectors (e.g.
    ESM-2 embeddings of protein sequences, or embeddings of GO terms or text) become the gene embedding of the model
    through a learned projection, see :class:`scforge.models.components.GeneVectorEmbedding`. A saved model contains the
    vectors in its weights and does not need the table again.

    Parameters
    ----------
    vocab
        The genes.
    table
        The vectors: a data frame indexed by gene name, a dict from gene name to vector, or a file. ``.npz``: arrays
        ``genes`` (text) and ``vectors`` (N, D). ``.parquet``: one row per gene, with an index or a column of names, and
        numbers in the other columns or vectors in one column. ``.safetensors``: a matrix with the names as a JSON list
        under ``genes`` in the metadata, or one vector per gene. Names are Ensembl ids (versions are ignored) or symbols
        of the vocabulary. If None, tokenizes without vectors, as in a saved model.
    missing
        Treatment of vocabulary genes without a vector. With ``"learned"``, the model learns a separate vector for each
        of these genes. With ``"drop"``, they do not become tokens, but their counts stay in the library size.
    freeze
        Whether the vectors are frozen during training. Their projection is always learned.
    dropped
        Names of the genes that do not become tokens. With ``missing="drop"``, they are derived from `table` and stored
        instead of it.
    **options
        Options of :class:`~scforge.tokenizers.ContinuousProjectionTokenizer`, e.g. ``max_len``, ``append_cls``,
        ``order``, ``attention_bias``.

    Raises
    ------
    OptionError
        If an option is invalid.
    MissingFileError
        If the file does not exist.
    DataError
        If the table cannot be read, or several rows of the same gene differ.
    GeneMismatchError
        If the table contains no vocabulary gene.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> from scforge.data import GeneVocab
    >>> table = {"A": [0.5, 1.0], "C": [0.0, -2.0]}
    >>> tokenizer = GeneEmbeddingTokenizer(GeneVocab.from_genes(["A", "B", "C"]), table=table, missing="drop")
    >>> tokenizer(csr_matrix(np.array([[1, 4, 3]])))["input_ids"].tolist()
    [[3, 4, 6]]
    >>> tokenizer.gene_vectors()[4:].tolist()
    [[0.5, 1.0], [nan, nan], [0.0, -2.0]]
    """

    def __init__(
        self,
        vocab: GeneVocab,
        *,
        table: GeneTable | None = None,
        missing: str = "learned",
        freeze: bool = True,
        dropped: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(vocab, **options)
        self.missing = check_choice("missing", missing, ["learned", "drop"])
        if missing == "drop" and table is None and dropped is None:
            raise OptionError(
                "requires table, which defines the genes without a vector; pass table=...", missing="drop"
            )
        if dropped is not None and (missing == "learned" or table is not None):
            raise OptionError(
                "is computed from table with missing='drop' and cannot be passed here; omit it.", argument="dropped"
            )
        if missing == "drop" and options.get("library_size", "data") != "data":
            raise OptionError("needs the library size of all genes; pass library_size='data'.", missing="drop")
        self.table = None  # a saved model is loaded where the table is not
        self.freeze = check_bool("freeze", freeze)
        self._vectors = None if table is None else match_vectors(*read_table(table), vocab)
        if missing == "drop" and self._vectors is not None:
            without = np.isnan(self._vectors[vocab.n_special :, 0])
            dropped = [gene for gene, gone in zip(vocab.genes, without, strict=True) if gone]
        self.dropped = None if dropped is None else [str(gene) for gene in dropped]
        self._kept = None
        if self.dropped is not None:
            gone = vocab.gene_indices(self.dropped)
            if (gone < 0).any():
                raise OptionError(
                    f"contains {self.dropped[int((gone < 0).argmax())]!r}, which is not a gene of the "
                    "vocabulary; remove it from dropped.",
                    argument="dropped",
                )
            self._kept = ~np.isin(np.arange(vocab.n_genes), gone)

    @classmethod
    def transcriptformer(
        cls,
        vocab: GeneVocab,
        *,
        max_len: int = 2048,
        order: str = "random",
        seed: int = 0,
        table: GeneTable | None = None,
        **options: Any,
    ) -> Self:
        """Tokenize cells as in TranscriptFormer, see the base class; genes without a vector in `table` are dropped.

        Parameters
        ----------
        vocab, max_len, order, seed, table, **options
            See the class.

        Returns
        -------
        The tokenizer.
        """
        missing = "learned" if table is None else "drop"
        return super().transcriptformer(
            vocab, max_len=max_len, order=order, seed=seed, table=table, missing=missing, **options
        )

    def gene_vectors(self) -> np.ndarray:
        """Return the vector of each token, float32, shape (V, D), with NaN rows for tokens without a vector.

        Raises
        ------
        OptionError
            If the tokenizer was created without a table.
        """
        if self._vectors is None:
            raise OptionError(
                ", but the tokenizer 'gene_embedding' requires gene vectors; pass a file, a data frame or a "
                "dict as table.",
                table=None,
            )
        return self._vectors

    def lengths(self, n_expressed: np.ndarray) -> np.ndarray:
        """Return the number of tokens of cells with `n_expressed` genes, or its maximum if genes are dropped."""
        lengths = super().lengths(n_expressed)
        return lengths if self._kept is None else np.minimum(lengths, int(self._kept.sum()) + self._n_around)

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        if self._kept is not None:  # library sizes stay those of all genes
            chosen = self._kept[block.genes]
            before = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])
            block = replace(
                block,
                indptr=before[block.indptr],
                genes=block.genes[chosen],
                counts=block.counts[chosen],
                measured=self._kept if block.measured is None else block.measured & self._kept,
            )
        return super()._tokenize(block)

    def __repr__(self) -> str:
        shown = self.config() | {"dropped": None if self.dropped is None else f"{len(self.dropped)} genes"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
