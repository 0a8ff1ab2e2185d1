"""The base class of tokenizers, token batches, and the registry."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numba
import numpy as np
import torch
from scipy import sparse

from scforge._checks import check_bool, check_count
from scforge._constants import CLS_TOKEN, EOS_TOKEN
from scforge._registry import Registry, check_kinds, check_options
from scforge.data.cells import CellBlock
from scforge.data.checks import row_sums, sound_csr, value_problem
from scforge.data.genes import GeneMap, how_to_convert
from scforge.data.vocab import GeneVocab, recognize_ids
from scforge.errors import DataError, GeneMismatchError, OptionError, listing
from scforge.tokenizers._expression import keep

_TOKEN_OF = {"append_cls": CLS_TOKEN, "append_eos": EOS_TOKEN}

TOKENIZERS: Registry[type[Tokenizer]] = Registry(
    "tokenizer",
    group="scforge.tokenizers",
    base="scforge.tokenizers.Tokenizer",
    builtin={
        "binned_expression": "scforge.tokenizers.binned_expression",
        "continuous_projection": "scforge.tokenizers.continuous_projection",
        "entropy_ranked": "scforge.tokenizers.entropy_ranked",
        "gene_embedding": "scforge.tokenizers.gene_embedding",
        "rank_value": "scforge.tokenizers.rank_value",
    },
)


class TokenBatch(TypedDict):
    """A batch of tokenized cells, i.e. the keyword arguments of a model's ``forward`` and ``encode``.

    ``input_ids``
        Token ids, int64, shape (B, S), followed by PAD (0) after the last token of a cell.
    ``attention_mask``
        True for tokens, False for padding, bool, shape (B, S).
    ``values``
        Expression value of each token, float32, shape (B, S); 0 at CLS, EOS, padding and masked positions.
    ``bin_ids``
        Expression bin of each token, int64, shape (B, S); 0 for genes without counts, and if `values` is 0. Only
        present if the tokenizer bins expression.
    ``attention_bias``
        Value added to the attention scores of each token as a key, float32, shape (B, S). Only present if the tokenizer
        has this option.
    ``labels``
        Token ids to predict, int64, shape (B, S); -100 at positions without a target. Only present after masking.
    ``bin_labels``
        Bins to predict, int64, shape (B, S); -100 at positions without a target. Only present after masking, if there
        are `bin_ids`.
    ``value_labels``
        Original values of masked tokens, float32, shape (B, S); 0 elsewhere. Only present after masking.
    ``masked_positions``
        True for tokens chosen for prediction, bool, shape (B, S). Only present after masking.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from scforge.data import GeneVocab
    >>> from scforge.tokenizers import get_tokenizer
    >>> tokenizer = get_tokenizer("binned_expression", GeneVocab.from_genes(["A", "B", "C"]), n_bins=3, side="one")
    >>> batch = tokenizer(np.array([[1, 0, 3], [0, 2, 0]]))
    >>> sorted(batch), batch["attention_mask"].tolist()
    (['attention_mask', 'bin_ids', 'input_ids', 'values'], [[True, True, True], [True, True, False]])
    >>> ids = torch.tensor([[3, 4, 6]])
    >>> by_hand = TokenBatch(input_ids=ids, attention_mask=ids != 0, values=torch.tensor([[0.0, 1.5, 2.5]]))
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    values: torch.Tensor
    bin_ids: NotRequired[torch.Tensor]
    attention_bias: NotRequired[torch.Tensor]
    labels: NotRequired[torch.Tensor]
    bin_labels: NotRequired[torch.Tensor]
    value_labels: NotRequired[torch.Tensor]
    masked_positions: NotRequired[torch.Tensor]


class RaggedTokens(NamedTuple):
    """Concatenated tokens of several cells, without padding.

    Parameters
    ----------
    indptr
        Start of each cell, and end of the last cell, int64, shape (B + 1,).
    ids
        Token ids, int32, shape (Z,).
    values
        Expression values, float32, shape (Z,).
    extras
        Additional properties of the tokens (``bin_ids``, ``attention_bias``), arrays of shape (Z,).

    Examples
    --------
    >>> import numpy as np
    >>> indptr, ids = np.array([0, 2, 3]), np.array([4, 6, 5], dtype=np.int32)
    >>> tokens = RaggedTokens(indptr, ids, np.array([1.0, 3.0, 2.0], dtype=np.float32))
    >>> [cell.tolist() for cell in np.split(tokens.ids, tokens.indptr[1:-1])]
    [[4, 6], [5]]
    """

    indptr: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    extras: Mapping[str, np.ndarray] = MappingProxyType({})


def insert(
    tokens: RaggedTokens, places: np.ndarray, ids: Sequence[int] | np.ndarray, values: np.ndarray | float = 0.0
) -> RaggedTokens:
    """Insert the tokens `ids` into each cell, before the entries at ascending `places`, with extras set to 0."""
    n_cells = len(tokens.indptr) - 1
    return RaggedTokens(
        tokens.indptr + len(ids) * np.arange(n_cells + 1),
        np.insert(tokens.ids, places, np.tile(ids, n_cells)),
        np.insert(tokens.values, places, values),
        {name: np.insert(array, places, 0) for name, array in tokens.extras.items()},
    )


def concatenate(parts: Sequence[RaggedTokens]) -> RaggedTokens:
    """Concatenate the cells of all `parts`."""
    shifts = np.cumsum([0, *[part.indptr[-1] for part in parts]])
    return RaggedTokens(
        np.concatenate([[0], *[part.indptr[1:] + shift for part, shift in zip(parts, shifts, strict=False)]]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        {name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras},
    )


def pad(tokens: RaggedTokens, first: int = -1, last: int = -1) -> TokenBatch:
    """Pad ragged tokens to the longest cell (at least one position), with `first` and `last` around each cell.

    -1 adds no token. Integers become int64, and floating-point numbers become float32.
    """
    before, around = int(first >= 0), int(first >= 0) + int(last >= 0)
    longest = max(1, int(np.diff(tokens.indptr).max(initial=0)) + around)
    # Memory comes from NumPy, which asks for large pages: fresh small pages would cost as much as the tokenizing.
    ids = np.empty((len(tokens.indptr) - 1, longest), dtype=np.int64)
    mask = np.empty(ids.shape, dtype=np.bool_)
    _pad_ids(tokens.indptr, tokens.ids, first, last, ids, mask)
    batch: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    for name, array in {"values": tokens.values, **tokens.extras}.items():
        kind = np.int64 if array.dtype.kind in "iub" else np.float32
        out = np.empty(ids.shape, dtype=kind)
        _pad(tokens.indptr, array, before, out)
        batch[name] = torch.from_numpy(out)
    return cast(TokenBatch, batch)


@numba.njit(cache=True, nogil=True)
def _pad_ids(indptr, ids, first, last, out, mask):
    for cell in range(len(indptr) - 1):
        position = 0
        if first >= 0:
            out[cell, 0] = first
            position = 1
        for entry in range(indptr[cell], indptr[cell + 1]):
            out[cell, position] = ids[entry]
            position += 1
        if last >= 0:
            out[cell, position] = last
            position += 1
        mask[cell, :position] = True
        mask[cell, position:] = False
        out[cell, position:] = 0


@numba.njit(cache=True, nogil=True)
def _pad(indptr, array, before, out):
    for cell in range(len(indptr) - 1):
        start, size = indptr[cell], indptr[cell + 1] - indptr[cell]
        out[cell, :before] = 0
        for entry in range(size):
            out[cell, before + entry] = array[start + entry]
        out[cell, before + size :] = 0


def checked_counts(cells: Any) -> sparse.csr_matrix:
    """Return counts as a CSR matrix, shape (B, number of columns). Raises an error if they are not raw counts."""
    is_matrix = sparse.issparse(cells) or isinstance(cells, np.ndarray)
    if not is_matrix or cells.ndim != 2 or cells.dtype.kind not in "biuf":
        raise OptionError(
            f"is of type {type(cells).__name__!r} and not a numeric matrix; pass counts of shape (cells, genes) "
            "as a sparse matrix or a NumPy array, e.g. tokenizer(adata.X, adata.var_names).",
            argument="cells",
        )
    if sparse.issparse(cells):
        cells = sound_csr(cells, "cells")
    # A dtype that supports sums and sparse matrices.
    dtype = cells.dtype.newbyteorder("=")
    if dtype.kind == "b":
        dtype = np.dtype(np.uint8)
    elif dtype.kind == "f":
        dtype = np.dtype(np.float32 if dtype.itemsize <= 4 else np.float64)
    cells = cells.astype(dtype, copy=False)
    matrix = cells if isinstance(cells, sparse.csr_matrix) else sparse.csr_matrix(cells)
    data = matrix.data
    problem = value_problem(data)
    if problem is None and data.dtype == np.float64 and data.max(initial=0) > np.finfo(np.float32).max:
        problem = f"contains values that are too large (largest: {data.max():g})"
    if problem:
        raise DataError(f"{problem}, but raw counts are needed; pass the matrix with the raw counts.", argument="cells")
    return matrix


def checked_map(gene_ids: Any, vocab: GeneVocab, n_columns: int) -> GeneMap:
    """Return the map from columns to genes. Raises an error if it does not match the vocabulary or the columns."""
    gene_map = gene_ids if isinstance(gene_ids, GeneMap) else GeneMap.of(gene_ids, vocab)
    highest = gene_map.columns.max(initial=-1)
    if gene_map.n_genes != vocab.n_genes or highest >= vocab.n_genes:
        raise DataError(
            f"is a GeneMap for {max(gene_map.n_genes, highest + 1)} genes, but the vocabulary has "
            f"{vocab.n_genes} genes; create the GeneMap with GeneMap.of(names, tokenizer.vocab).",
            argument="gene_ids",
        )
    if len(gene_map.columns) != n_columns:
        raise DataError(
            f"contains {len(gene_map.columns)} genes, but cells has {n_columns} columns; pass one gene per column.",
            argument="gene_ids",
        )
    if n_columns and highest < 0:
        raise no_known_gene("gene_ids", None if gene_map is gene_ids else [str(name) for name in gene_ids], vocab)
    return gene_map


def no_known_gene(argument: str, names: Sequence[str] | None, vocab: GeneVocab) -> GeneMismatchError:
    """Return the error, with advice, for names (or, if None, a map) without any vocabulary gene."""
    start = f"{argument} contains none of the {vocab.n_genes} genes of the vocabulary"
    if names is None:
        return GeneMismatchError(f"{start}; create the GeneMap with GeneMap.of(names, tokenizer.vocab).")
    kind, expected = recognize_ids(names), recognize_ids(vocab.genes)
    hint = how_to_convert(kind, expected) or "convert them to the names in the vocabulary"
    return GeneMismatchError(
        f"{start}. It contains {kind} such as {listing(names[:2])}, but the vocabulary contains {expected} such as "
        f"{listing(vocab.genes[:2])}; {hint}."
    )


class Tokenizer(ABC):
    """Base class for tokenizers, which convert counts to tokens, vectorized over a block of cells.

    A subclass implements :meth:`_tokenize` and is registered with :func:`~scforge.tokenizers.register_tokenizer`.
    Its options are keyword-only arguments of the constructor, and are stored as attributes with the same names.

    Parameters
    ----------
    vocab
        The genes, with their statistics.
    max_len
        Maximum number of tokens per cell, including special tokens. The most expressed genes, as ordered by the
        tokenizer, are kept. If None, uses the default of the tokenizer.
    append_cls
        Whether to add a CLS token before the genes of each cell.
    append_eos
        Whether to add an EOS token after the genes of each cell.

    Raises
    ------
    OptionError
        If an option cannot be used, or requires a special token that is not in the vocabulary.

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
    """Whether the order of the tokens reveals the genes, so that the neighbors of a masked token
    would narrow it down."""
    ranks: bool = False
    """Whether the tokens are ordered by a ranking of the genes of the cell."""
    samples: bool = False
    """Whether truncation samples genes at random, instead of keeping the most expressed genes."""
    lists_all_genes: bool = False
    """Whether all measured genes are tokens, so that a masked gene must be one of the missing genes."""
    gives_counts: bool = False
    """Whether the values of genes are their counts, i.e. integers."""
    gives_expression: bool = False
    """Whether the values of genes are log1p CP10K, and no other token property depends on them."""
    needs_medians: bool = False
    """Whether the tokenizer uses the medians of the vocabulary."""
    needs_entropies: bool = False
    """Whether the tokenizer uses the entropies of the vocabulary."""

    def __init__(
        self, vocab: GeneVocab, *, max_len: int | None = None, append_cls: bool = True, append_eos: bool = False
    ) -> None:
        self.vocab = vocab
        self.max_len = self.default_max_len if max_len is None else check_count("max_len", max_len, "tokens", least=0)
        self.append_cls = check_bool("append_cls", append_cls)
        self.append_eos = check_bool("append_eos", append_eos)
        if self.max_len is not None and self.max_len <= self._n_around:
            raise OptionError("leaves no token for genes; increase max_len.", max_len=max_len)
        for option, token in _TOKEN_OF.items():
            if getattr(self, option):
                self._require_token(option, token)

    @abstractmethod
    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        """Return the ordered gene tokens of each cell, at most `most_genes` per cell, without CLS and EOS."""

    @classmethod
    def special_tokens(cls, options: dict[str, Any]) -> tuple[str, ...]:
        """Return the special tokens that a tokenizer with these options needs in its vocabulary.

        Parameters
        ----------
        options
            Options of the constructor. Missing options have their default values.

        Returns
        -------
        Names of the tokens, e.g. ``("<cls>",)``.
        """
        defaults = {"append_cls": True} | options
        return tuple(token for option, token in _TOKEN_OF.items() if defaults.get(option))

    def _require_token(self, option: str, token: str) -> None:
        if self.vocab.token_id(token) is None:
            raise OptionError(
                f"requires the token {token!r}, which is not in the vocabulary; add "
                f"the token with vocab.with_special_tokens({token!r}).",
                argument=option,
                value=getattr(self, option),
            )

    def truncate(self, block: CellBlock) -> tuple[np.ndarray, np.ndarray | slice]:
        """Choose the entries of each cell that fit into `max_len`, i.e. the highest counts.

        Parameters
        ----------
        block
            The cells.

        Returns
        -------
        Row boundaries (int64, shape (B + 1,)), and ordered positions of the kept entries.
        """
        return keep(block.indptr, block.counts, block, self.most_genes)

    @property
    def _n_around(self) -> int:
        """Number of special tokens per cell."""
        return int(self.append_cls) + int(self.append_eos)

    @property
    def most_genes(self) -> int:
        """Maximum number of genes per cell that become tokens."""
        return np.iinfo(np.int64).max if self.max_len is None else self.max_len - self._n_around

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the names of the constructor options."""
        names: dict[str, None] = {}
        for base in cls.__mro__:
            if "__init__" in vars(base) and base is not object:
                parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
                names |= {p.name: None for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
                if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
                    break  # it passes nothing on that it does not name
        return list(names)

    def config(self) -> dict[str, Any]:
        """Return JSON-safe options that recreate this tokenizer; the vocabulary is stored separately."""
        return {name: getattr(self, name) for name in self.option_names()}

    def gene_vectors(self) -> np.ndarray | None:
        """Return pretrained vectors to initialize the gene embedding of a model, or None.

        The vectors are float32, shape (V, D), with NaN rows for tokens without a vector, including special tokens.
        """
        return None

    def ragged(self, block: CellBlock) -> RaggedTokens:
        """Tokenize a block without padding, including special tokens.

        Parameters
        ----------
        block
            The cells.

        Returns
        -------
        The concatenated tokens of all cells.
        """
        tokens, around = self._tokenize(block), np.array(self._frame)
        wanted = around >= 0
        if not wanted.any():
            return tokens
        places = np.stack([tokens.indptr[:-1], tokens.indptr[1:]], axis=1)[:, wanted].ravel()
        return insert(tokens, places, around[wanted])

    def lengths(self, n_expressed: np.ndarray) -> np.ndarray:
        """Return the number of tokens of cells with `n_expressed` expressed genes, if all genes are measured.

        Parameters
        ----------
        n_expressed
            Number of expressed vocabulary genes of each cell, any integer type, shape (B,).

        Returns
        -------
        Number of tokens, including special tokens, shape (B,).
        """
        most = min(self.most_genes, np.iinfo(n_expressed.dtype).max)
        n_genes = np.full_like(n_expressed, self.vocab.n_genes) if self.lists_all_genes else n_expressed
        return np.minimum(n_genes, most) + self._n_around

    def max_tokens(self) -> int:
        """Return the maximum number of tokens per cell."""
        return int(self.lengths(np.array([self.vocab.n_genes]))[0])

    def __call__(
        self,
        cells: CellBlock | sparse.csr_matrix | np.ndarray,
        gene_ids: Sequence[str] | np.ndarray | GeneMap | None = None,
        *,
        totals: np.ndarray | None = None,
    ) -> TokenBatch:
        """Tokenize cells, and pad them to the longest cell.

        Parameters
        ----------
        cells
            A block, or raw counts as a sparse matrix or an array of shape (B, number of columns).
        gene_ids
            Gene name of each column of `cells`. Names outside the vocabulary are left out, and columns of the same gene
            are summed. If None, the columns must be the vocabulary genes.
        totals
            Library size of each cell, shape (B,). If None, uses the row sums of `cells`.

        Returns
        -------
        Tensors of shape (B, S), see :class:`~scforge.tokenizers.TokenBatch`.

        Raises
        ------
        OptionError
            If `cells` is not a matrix, or `gene_ids` is not a list of names.
        DataError
            If `cells` does not contain raw counts, or `gene_ids` or `totals` do not match the cells.
        GeneMismatchError
            If no column is a vocabulary gene.

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
                raise OptionError(
                    "and totals are only for a matrix, but cells is a CellBlock; omit gene_ids and totals.",
                    argument="gene_ids",
                )
            return self._batch(cells)
        counts = checked_counts(cells)
        if totals is not None:
            totals, n_cells = np.asarray(totals, dtype=np.float64), counts.shape[0]
            if totals.shape != (n_cells,):
                raise DataError(
                    f"has shape {totals.shape}, but there are {n_cells} cells; pass one number per cell.",
                    argument="totals",
                )
            if len(bad := totals[~(np.isfinite(totals) & (totals >= 0))]):
                raise DataError(
                    f"contains {bad[0]:g}, which is not a library size; pass zero or a positive number.",
                    argument="totals",
                )
        if gene_ids is None:
            if counts.shape[1] != self.vocab.n_genes:
                raise DataError(
                    f"has {counts.shape[1]} columns, but the vocabulary has {self.vocab.n_genes} genes; pass the "
                    "column names as gene_ids.",
                    argument="cells",
                )
            return self._batch(CellBlock.from_csr(counts, totals))
        gene_map = checked_map(gene_ids, self.vocab, counts.shape[1])
        if totals is None:
            totals = row_sums(counts)
        return pad(self._tokenize_mapped(counts, gene_map, totals), *self._frame)

    def _batch(self, block: CellBlock) -> TokenBatch:
        """Tokenize and pad a block; a subclass may do both in one step."""
        return pad(self._tokenize(block), *self._frame)

    def _tokenize_mapped(self, counts: sparse.csr_matrix, gene_map: GeneMap, totals: np.ndarray) -> RaggedTokens:
        return self._tokenize(CellBlock.from_csr(gene_map.apply(counts), totals, measured=gene_map.measured))

    @property
    def _frame(self) -> tuple[int, int]:
        """Ids of the tokens before and after the genes; -1 for no token."""
        return (
            self.vocab.special_tokens.index(CLS_TOKEN) if self.append_cls else -1,
            self.vocab.special_tokens.index(EOS_TOKEN) if self.append_eos else -1,
        )

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({options})"


register_tokenizer, list_tokenizers = TOKENIZERS.register, TOKENIZERS.names


def get_tokenizer(name: str, vocab: GeneVocab, **options: Any) -> Tokenizer:
    """Create the tokenizer registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"rank_value"``.
    vocab
        The genes.
    **options
        Options of the tokenizer.

    Returns
    -------
    The tokenizer, which is called with counts.

    Raises
    ------
    OptionError
        If the name or an option is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from scforge.data import GeneVocab
    >>> vocab = GeneVocab.from_genes(["CD3D", "LYZ", "MS4A1"])
    >>> tokenizer = get_tokenizer("continuous_projection", vocab, max_len=3)
    >>> tokenizer(np.array([[1, 0, 5]]))["input_ids"].tolist(), tokenizer.max_tokens()
    ([[3, 4, 6]], 3)
    """
    cls = TOKENIZERS.get(name)
    check_options("tokenizer option", name, options, cls.option_names())
    check_kinds(cls, options)
    return cls(vocab, **options)
