"""What a tokenizer is.

Shapes: B cells, S tokens of the longest cell of the batch, Z tokens of all cells together, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_bool, check_count
from scforge._constants import CLS_TOKEN, EOS_TOKEN
from scforge.data.cells import CellBlock
from scforge.data.compressed import row_sums
from scforge.data.mapping import GeneMap
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError
from scforge.tokenizers._expression import keep
from scforge.tokenizers._input import checked_counts, checked_map, checked_totals
from scforge.tokenizers.batch import RaggedTokens, TokenBatch, frame, pad

if TYPE_CHECKING:
    from scipy import sparse

__all__ = ["Tokenizer"]


class Tokenizer(ABC):
    """Turns counts into tokens, vectorised over a block of cells.

    A subclass implements :meth:`_tokenize` and is registered with :func:`~scforge.tokenizers.register_tokenizer`.
    Its options are keyword-only arguments of the constructor, kept under their own names.

    Parameters
    ----------
    vocab
        The genes, and what is known of them.
    max_len
        Most tokens of a cell, special tokens included; the most expressed genes are kept (by the order of the
        strategy). None takes the strategy's default.
    append_cls
        Put a CLS token before the genes of each cell.
    append_eos
        Put an EOS token behind them.

    Raises
    ------
    OptionError
        If an option cannot be used, or needs a special token that the vocabulary lacks.

    Examples
    --------
    >>> import numpy as np
    >>> from scforge.data import GeneVocab
    >>> from scforge.tokenizers import RaggedTokens
    >>> class ExpressedGenes(Tokenizer):
    ...     def _tokenize(self, block):
    ...         indptr, kept = self.truncate(block)
    ...         return RaggedTokens(indptr, self.vocab.n_special + block.genes[kept], block.counts[kept])
    >>> tokenizer = ExpressedGenes(GeneVocab.from_genes(["A", "B", "C"]), max_len=3)
    >>> batch = tokenizer(np.array([[5, 0, 2], [1, 7, 3]]))
    >>> batch["input_ids"].tolist(), batch["values"].tolist()
    ([[3, 4, 6], [3, 5, 6]], [[0.0, 5.0, 2.0], [0.0, 7.0, 3.0]])
    """

    default_max_len: int | None = 2048
    ordered_by_gene: bool = False
    """Whether the order of the tokens tells something of which genes they are, so that the neighbours of a hidden token
    would narrow it down."""
    ranks: bool = False
    """Whether the order of the tokens is a ranking of the genes of the cell."""
    samples: bool = False
    """Whether truncation draws genes at random, rather than keeping the most expressed."""
    lists_all_genes: bool = False
    """Whether all measured genes are tokens, so that a hidden gene is known to be one of those that are missing."""
    gives_counts: bool = False
    """Whether the values of genes are their counts, whole numbers."""
    needs_medians: bool = False
    """Whether the strategy uses the medians of the vocabulary."""
    needs_entropies: bool = False
    """Whether the strategy uses the entropies of the vocabulary."""

    def __init__(
        self, vocab: GeneVocab, *, max_len: int | None = None, append_cls: bool = True, append_eos: bool = False
    ) -> None:
        self.vocab = vocab
        if max_len is not None:
            check_count("max_len", max_len, "tokens", least=0)
        self.max_len = self.default_max_len if max_len is None else int(max_len)
        self.append_cls = check_bool("append_cls", append_cls)
        self.append_eos = check_bool("append_eos", append_eos)
        if self.max_len is not None and self.max_len <= self._n_around:
            raise OptionError(f"max_len={max_len} leaves no room for a gene; give the number of tokens of a cell.")
        if self.max_len is not None and self.max_len >= _MOST_TOKENS:
            raise OptionError(f"max_len={max_len} is too large; give a number below 2^31, or None for the default.")
        for option, token in _TOKEN_OF.items():
            if getattr(self, option):
                self._require_token(option, token)

    @abstractmethod
    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        """Return the gene tokens of each cell, in order, at most `most_genes` a cell, without CLS and EOS."""

    @classmethod
    def special_tokens(cls, options: dict[str, Any]) -> tuple[str, ...]:
        """Return the special tokens that a tokenizer with these options needs in its vocabulary.

        Parameters
        ----------
        options
            Options of the constructor; for others the defaults hold.

        Returns
        -------
        Names of the tokens, e.g. ``("<cls>",)``.
        """
        defaults = {"append_cls": True} | options
        return tuple(token for option, token in _TOKEN_OF.items() if defaults.get(option))

    def _require_token(self, option: str, token: str) -> None:
        if self.vocab.token_id(token) is None:
            raise OptionError(
                f"{option}={getattr(self, option)!r} needs the token {token!r}, which the vocabulary lacks; "
                f"add it with vocab.with_special_tokens({token!r})."
            )

    def truncate(self, block: CellBlock) -> tuple[np.ndarray, np.ndarray | slice]:
        """Choose the entries of each cell that fit into `max_len`: those with the highest counts.

        Parameters
        ----------
        block
            The cells.

        Returns
        -------
        Row boundaries, int64, shape (B + 1,), and positions of the kept entries, in their order.
        """
        return keep(block.indptr, block.counts, block, self.most_genes)

    @property
    def _n_around(self) -> int:
        """Special tokens of a cell."""
        return int(self.append_cls) + int(self.append_eos)

    @property
    def most_genes(self) -> int:
        """Most genes of a cell that become tokens."""
        return np.iinfo(np.int64).max if self.max_len is None else self.max_len - self._n_around

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the options of the constructor."""
        names: dict[str, None] = {}
        for base in cls.__mro__:
            if "__init__" in vars(base) and base is not object:
                parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
                names |= {p.name: None for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
                if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
                    break  # it passes nothing on that it does not name
        return list(names)

    def config(self) -> dict[str, Any]:
        """Options that make this tokenizer again, JSON-safe; the vocabulary is kept beside them."""
        return {name: getattr(self, name) for name in self.option_names()}

    def gene_vectors(self) -> np.ndarray | None:
        """Return pretrained vectors that a model should start its gene embedding from, or None.

        Float32, shape (V, D); rows of NaN for tokens without a vector, special tokens among them.
        """
        return None

    def ragged(self, block: CellBlock) -> RaggedTokens:
        """Tokenise a block without padding, special tokens included.

        Parameters
        ----------
        block
            The cells.

        Returns
        -------
        The tokens of all cells, one after the other.
        """
        return frame(self._tokens(block), *self._frame)

    def lengths(self, n_expressed: np.ndarray) -> np.ndarray:
        """Return the number of tokens of cells with `n_expressed` expressed genes.

        Parameters
        ----------
        n_expressed
            Number of expressed vocabulary genes of each cell, any integers, shape (B,).

        Returns
        -------
        Special tokens included, shape (B,).
        """
        most = min(self.most_genes, np.iinfo(n_expressed.dtype).max)
        return np.minimum(n_expressed, most) + self._n_around

    def max_tokens(self) -> int:
        """Return the largest number of tokens that a cell can have."""
        return int(self.lengths(np.array([self.vocab.n_genes]))[0])

    def __call__(
        self,
        cells: CellBlock | sparse.csr_matrix | np.ndarray,
        gene_ids: Sequence[str] | np.ndarray | GeneMap | None = None,
        *,
        totals: np.ndarray | None = None,
    ) -> TokenBatch:
        """Tokenise cells, padded to the longest.

        Parameters
        ----------
        cells
            A block, which is taken as it is, or raw counts as a sparse matrix or an array of shape
            (B, number of columns).
        gene_ids
            Name of the gene of each column of `cells`. Names that the vocabulary does not have are left out, columns of
            one gene are summed. None: the columns are the genes of the vocabulary.
        totals
            Library size of each cell, shape (B,); the row sums of `cells` if not given.

        Returns
        -------
        Tensors of shape (B, S), see :class:`~scforge.tokenizers.TokenBatch`.

        Raises
        ------
        OptionError
            If `cells` is no matrix, or `gene_ids` no list of names.
        DataError
            If `cells` does not hold raw counts, or `gene_ids` or `totals` do not fit.
        GeneMismatchError
            If no column is a gene of the vocabulary.

        Examples
        --------
        >>> import scanpy as sc, scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> vocab = scforge.data.GeneVocab.named("human_protein_coding")
        >>> tokenizer = scforge.tokenizers.get_tokenizer("rank_value", vocab, use_medians=False)
        >>> tokenizer(adata.X[:8], adata.var_names)["input_ids"].shape[0]
        8
        """
        if isinstance(cells, CellBlock):
            if gene_ids is not None or totals is not None:
                raise OptionError("gene_ids and totals belong to a matrix, but cells is a block; leave them out.")
            return self._batch(cells)
        counts = checked_counts(cells)
        if totals is not None:
            totals = checked_totals(totals, counts.shape[0])
        if gene_ids is None:
            if counts.shape[1] != self.vocab.n_genes:
                raise DataError(
                    f"cells has {counts.shape[1]} columns but the vocabulary {self.vocab.n_genes} genes; "
                    "pass the names of the columns as gene_ids."
                )
            return self._batch(CellBlock.from_csr(counts, totals))
        gene_map = checked_map(gene_ids, self.vocab, counts.shape[1])
        if totals is None:
            totals = row_sums(counts)
        return pad(self._tokenize_mapped(counts, gene_map, totals), *self._frame)

    def _batch(self, block: CellBlock) -> TokenBatch:
        """Tokenise a block and pad it; a strategy may do both at once."""
        return pad(self._tokens(block), *self._frame)

    def _tokenize_mapped(self, counts: sparse.csr_matrix, gene_map: GeneMap, totals: np.ndarray) -> RaggedTokens:
        return self._tokens(CellBlock.from_csr(gene_map.apply(counts), totals, measured=gene_map.measured))

    def _tokens(self, block: CellBlock) -> RaggedTokens:
        """Return what the strategy makes of a block, after a look at its kind."""
        tokens = self._tokenize(block)
        if not isinstance(tokens, RaggedTokens):
            raise OptionError(
                f"{type(self).__name__}._tokenize returned {type(tokens).__name__}; return "
                "scforge.tokenizers.RaggedTokens(indptr, ids, values)."
            )
        return tokens

    @property
    def _frame(self) -> tuple[int, int]:
        """Ids of the tokens before and behind the genes; -1 for none."""
        return (
            self.vocab.special_tokens.index(CLS_TOKEN) if self.append_cls else -1,
            self.vocab.special_tokens.index(EOS_TOKEN) if self.append_eos else -1,
        )

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({options})"


_MOST_TOKENS = 2**31
_TOKEN_OF = {"append_cls": CLS_TOKEN, "append_eos": EOS_TOKEN}
