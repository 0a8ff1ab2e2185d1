"""Genes whose identity is a pretrained vector, as TranscriptFormer, UCE and scGenePT present them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from scforge._checks import check_bool
from scforge.data.cells import CellBlock
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers._gene_table import match_vectors, read_table
from scforge.tokenizers.batch import RaggedTokens
from scforge.tokenizers.continuous_projection import ContinuousProjectionTokenizer
from scforge.tokenizers.registry import register_tokenizer

if TYPE_CHECKING:
    from scforge.tokenizers._gene_table import GeneTable

__all__ = ["GeneEmbeddingTokenizer"]


@register_tokenizer("gene_embedding")
class GeneEmbeddingTokenizer(ContinuousProjectionTokenizer):
    """Present the expressed genes of a cell, and give the model a pretrained vector for each gene.

    Tokens are those of :class:`~scforge.tokenizers.ContinuousProjectionTokenizer`, with its options. The vectors (of
    protein sequences by ESM-2, of GO terms, of texts) become the gene embedding of the model, through a learned
    projection; see :class:`scforge.models.components.GeneVectorEmbedding`. A saved model holds them in its weights and
    does not need the table again.

    Parameters
    ----------
    vocab
        The genes.
    table
        The vectors: a data frame indexed by gene name, a dict from gene name to vector, or a file. ``.npz``: arrays
        ``genes`` (text) and ``vectors`` (N, D). ``.parquet``: one row a gene, with an index or a column of names, and
        numbers in the other columns or vectors in one. ``.safetensors``: a matrix with the names as JSON list under
        ``genes`` in the metadata, or one vector a gene. Names are Ensembl ids, versions ignored, or symbols, as the
        vocabulary knows them. None tokenises without vectors, as a saved model does.
    missing
        What happens to genes of the vocabulary without a vector: ``"learned"``, the model learns a vector of its own
        for each; ``"drop"``, they do not become tokens, but their counts stay in the library size.
    freeze
        Whether training leaves the vectors as they are. Their projection is learned in any case.
    dropped
        Names of the genes that do not become tokens; made of `table` with ``missing="drop"``, and kept in its place.
    **options
        Options of :class:`~scforge.tokenizers.ContinuousProjectionTokenizer`, e.g. ``max_len``, ``append_cls``,
        ``order``, ``attention_bias``.

    Raises
    ------
    OptionError
        If an option cannot be used.
    MissingFileError
        If the file does not exist.
    DataError
        If the table cannot be read, or rows of one gene differ.
    GeneMismatchError
        If the table has no gene of the vocabulary.

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
        if missing not in ("learned", "drop"):
            raise OptionError(f"missing={missing!r} is not known; choose 'learned' or 'drop'.")
        if missing == "drop" and table is None and dropped is None:
            raise OptionError("missing='drop' needs a table to tell which genes have no vector; pass table=...")
        if dropped is not None and (isinstance(dropped, str) or not isinstance(dropped, Sequence | np.ndarray)):
            raise OptionError(f"dropped={dropped!r} is not a list of gene names; leave it out.")
        if dropped is not None and (missing == "learned" or table is not None):
            raise OptionError("dropped is made of the table with missing='drop'; leave it out.")
        if missing == "drop" and options.get("library_size", "data") != "data":
            raise OptionError("missing='drop' counts dropped genes in the library size; pass library_size='data'.")
        self.table = None  # a saved model is loaded where the table is not
        self.missing = missing
        self.freeze = check_bool("freeze", freeze)
        self._vectors = None if table is None else match_vectors(*read_table(table), vocab)
        if missing == "drop" and self._vectors is not None:
            without = np.isnan(self._vectors[vocab.n_special :, 0])
            dropped = [gene for gene, gone in zip(vocab.genes, without, strict=True) if gone]
        self.dropped = None if dropped is None else [str(gene) for gene in dropped]
        self._kept = None if self.dropped is None else _kept(vocab, self.dropped)

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
        """Present cells as TranscriptFormer does, see the base class; genes without a vector in `table` are dropped.

        Parameters
        ----------
        vocab, max_len, order, seed, table, **options
            As of the class.

        Returns
        -------
        The tokenizer.
        """
        missing = "learned" if table is None else "drop"
        return super().transcriptformer(
            vocab, max_len=max_len, order=order, seed=seed, table=table, missing=missing, **options
        )

    def gene_vectors(self) -> np.ndarray:
        """Return the vector of each token, float32, shape (V, D); rows of NaN for tokens without one.

        Raises
        ------
        OptionError
            If the tokenizer was made without a table.
        """
        if self._vectors is None:
            raise OptionError(
                "table=None but the tokenizer 'gene_embedding' needs gene vectors to make a model; "
                "pass a file, a data frame or a dict as its option table."
            )
        return self._vectors

    def lengths(self, n_expressed: np.ndarray) -> np.ndarray:
        """Return the number of tokens of cells with `n_expressed` expressed genes; if some are dropped, at most."""
        lengths = super().lengths(n_expressed)
        return lengths if self._kept is None else np.minimum(lengths, int(self._kept.sum()) + self._n_around)

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        return super()._tokenize(block if self._kept is None else _restrict(block, self._kept))

    def __repr__(self) -> str:
        shown = self.config() | {"dropped": None if self.dropped is None else f"{len(self.dropped)} genes"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _kept(vocab: GeneVocab, dropped: Sequence[str]) -> np.ndarray:
    """Return True for the genes that are not dropped, bool, shape (number of genes,)."""
    gone = vocab.gene_indices(dropped)
    if (gone < 0).any():
        raise OptionError(f"dropped names {dropped[int((gone < 0).argmax())]!r}, which is no gene of the vocabulary.")
    kept = np.ones(vocab.n_genes, dtype=np.bool_)
    kept[gone] = False
    return kept


def _restrict(block: CellBlock, kept: np.ndarray) -> CellBlock:
    """Return the block without the genes that are not `kept`; library sizes stay."""
    chosen = kept[block.genes]
    before = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])
    return replace(
        block,
        indptr=before[block.indptr],
        genes=block.genes[chosen],
        counts=block.counts[chosen],
        measured=kept if block.measured is None else block.measured & kept,
    )
