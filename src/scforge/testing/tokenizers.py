"""Check that a tokenizer satisfies the rules."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import torch
from scipy import sparse

from scforge._constants import IGNORE_LABEL
from scforge._registry import check_options
from scforge.data.cells import CellBlock, CellSource
from scforge.data.genes import GeneMap
from scforge.data.vocab import GeneVocab
from scforge.testing._rules import apply_rules, class_of, require, saved_config
from scforge.tokenizers.base import TOKENIZERS, TokenBatch, Tokenizer
from scforge.tokenizers.masking import Masking

Batch = dict[str, torch.Tensor]

N_GENES = 60
EQUAL = np.arange(4, 8)
"""Rows of :func:`_small_cells` with the same genes, in which each gene has a count of 1."""

_LABELS = {"labels", "bin_labels", "value_labels", "masked_positions"}

_KINDS = {"input_ids": torch.int64, "attention_mask": torch.bool, "values": torch.float32}


def _small_cells(vocab: GeneVocab) -> CellSource:
    generator = np.random.default_rng(0)
    n_genes = vocab.n_genes
    counts = np.zeros((16, n_genes))
    counts[1, -1], counts[2] = 3, generator.integers(1, 9, n_genes)
    for row in range(3, 16):
        genes = generator.choice(n_genes, min(40, n_genes), replace=False)
        counts[row, genes] = generator.geometric(0.3, len(genes)) * generator.choice([1, 1, 1, 30], len(genes))
    counts[3, :3] = [1, 2**20, 2**31][-n_genes:]
    counts[EQUAL] = counts[EQUAL[0]] > 0
    counts[8] = np.arange(1, n_genes + 1)
    return CellSource(sparse.csr_matrix(counts.astype(np.float32)), counts.sum(axis=1))


def _tokenize(
    tokenizer: Tokenizer, cells: CellSource | CellBlock | sparse.csr_matrix, gene_ids: Any = None, **options: Any
) -> Batch:
    return cast(Batch, tokenizer(_all_cells(cells) if isinstance(cells, CellSource) else cells, gene_ids, **options))


def _taken(tokenizer: Tokenizer) -> np.ndarray:
    """Return a mask of genes that can be tokens, bool, shape (G,), because a tokenizer may omit genes in all cells."""
    n_genes = tokenizer.vocab.n_genes
    # Each gene has the most counts in a cell of two, so that it fits whatever the limit is.
    pairs = 9 * np.eye(n_genes, dtype=np.float32) + np.roll(np.eye(n_genes, dtype=np.float32), 1, axis=1)
    batch = _tokenize(tokenizer, sparse.csr_matrix(pairs))
    return np.array([gene in _decode(tokenizer, batch, gene) for gene in range(n_genes)])


def _all_cells(cells: CellSource) -> CellBlock:
    return cells.block(np.arange(len(cells)))


def _require_same(first: Batch, second: Batch, sentence: str) -> None:
    """Raise an error if two batches are not equal up to padding."""
    require(set(first) == set(second), f"{sentence} (keys: {sorted(first)} and {sorted(second)}).")
    for key in first:
        pair = [batch[key] for batch in (first, second)]
        width = max(tensor.shape[1] for tensor in pair)
        a, b = (torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in pair)
        differs = (a != b).any(dim=1)
        require(not differs.any(), f"{sentence} ({key!r} differs in cell {int(differs.int().argmax())}).")


def _decode(tokenizer: Tokenizer, batch: Batch, row: int) -> np.ndarray:
    """Return the ordered gene indices of the tokens of one cell."""
    ids = batch["input_ids"][row].numpy()
    return ids[ids >= tokenizer.vocab.n_special] - tokenizer.vocab.n_special


def check_tokenizer(tokenizer: str | type[Tokenizer] | Tokenizer, **options: Any) -> None:
    """Check that a tokenizer satisfies the requirements of models, loaders and training.

    Call this function in the tests of a package that provides a tokenizer. The test cells include cells with no gene,
    one gene and all genes, counts up to 2^31, and many equal counts. The function tokenizes them in blocks and
    individually, in other orders, with permuted, renamed, duplicate and unknown columns, in each dtype, after pickling,
    on more threads, truncated, and masked.

    Parameters
    ----------
    tokenizer
        Registered name, class or instance. A name or a class is tested with a small vocabulary that contains symbols,
        medians, entropies and the required special tokens.
    **options
        Options to create the tokenizer if `tokenizer` is a name or a class.

    Raises
    ------
    AssertionError
        If a rule is broken; the message describes the rule and how it was broken.
    OptionError
        If the name or an option is unknown, or options are given with an instance.

    Examples
    --------
    >>> import scforge
    >>> check_tokenizer("continuous_projection", append_eos=True)
    >>> vocab = scforge.data.GeneVocab.from_genes(["CD3D", "LYZ", "MS4A1"])
    >>> check_tokenizer(scforge.tokenizers.get_tokenizer("binned_expression", vocab, n_bins=7))
    """
    instance = _make(tokenizer, options)
    apply_rules(type(instance).__name__, _RULES, instance, _small_cells(instance.vocab))


def _make(tokenizer: str | type[Tokenizer] | Tokenizer, options: dict[str, Any]) -> Tokenizer:
    cls = class_of("tokenizer", tokenizer, options, Tokenizer, TOKENIZERS)  # type: ignore[type-abstract]
    if cls is None:
        return cast(Tokenizer, tokenizer)
    check_options("tokenizer option", cls.__name__, options, cls.option_names())
    vocab = GeneVocab(
        genes=tuple(f"ENSG{i:011d}" for i in range(N_GENES)),
        symbols=tuple(f"SYMBOL{i}" for i in range(N_GENES)),
        medians=np.random.default_rng(1).uniform(0.5, 20.0, N_GENES),
        entropies=np.random.default_rng(2).uniform(0.3, 0.9, N_GENES),
    )
    return cls(vocab.with_special_tokens(*cls.special_tokens(options)), **options)


def _rule_batch(tokenizer: Tokenizer, cells: CellSource) -> None:
    batch = _tokenize(tokenizer, cells)
    keys = set(batch)
    require(set(_KINDS) <= keys, f"the batch lacks {sorted(set(_KINDS) - keys)}.")
    require(not keys & _LABELS, f"the batch contains {sorted(keys & _LABELS)}, which only masking creates.")
    shape = batch["input_ids"].shape
    require(shape[0] == len(cells) and len(shape) == 2, f"the batch of {len(cells)} cells has shape {tuple(shape)}.")
    for key, tensor in batch.items():
        allowed = (_KINDS[key],) if key in _KINDS else (torch.int64, torch.float32)
        require(tensor.dtype in allowed, f"{key!r} has dtype {tensor.dtype} instead of {allowed[0]}.")
        require(
            tensor.shape == shape, f"{key!r} has shape {tuple(tensor.shape)}, but 'input_ids' has shape {tuple(shape)}."
        )
        require(tensor.isfinite().all(), f"{key!r} contains NaN or infinite values.")


def _rule_padding(tokenizer: Tokenizer, cells: CellSource) -> None:
    batch = _tokenize(tokenizer, cells)
    mask, ids = batch["attention_mask"], batch["input_ids"]
    require(not (mask[:, 1:] & ~mask[:, :-1]).any(), "padding comes before a token.")
    require(torch.equal(mask, ids != 0), "attention_mask is not True exactly at the tokens.")
    # Other special tokens may carry a value, such as the depth of the cell.
    blank = [0, *(token for token in (tokenizer.vocab.cls_id, tokenizer.vocab.eos_id) if token is not None)]
    special = torch.isin(ids, torch.tensor(blank))
    for key, tensor in batch.items():
        if key not in _KINDS or key == "values":
            require(not tensor[special].any(), f"{key!r} is not 0 at CLS, EOS and padding.")


def _rule_special_tokens(tokenizer: Tokenizer, cells: CellSource) -> None:
    vocab, batch = tokenizer.vocab, _tokenize(tokenizer, cells)
    ids, lengths = batch["input_ids"], batch["attention_mask"].sum(dim=1)
    require(int(ids.min()) >= 0 and int(ids.max()) < len(vocab), "a token id is not in the vocabulary.")
    require(not (ids == vocab.mask_id).any(), "MASK is among the tokens, but only masking may add it.")
    require(ids.shape[1] == max(1, int(lengths.max())), "the batch is wider than its longest cell.")
    last = ids[torch.arange(len(ids)), (lengths - 1).clamp(min=0)]
    for name, wanted, there in (("CLS", "append_cls", ids[:, 0]), ("EOS", "append_eos", last)):
        token = vocab.cls_id if name == "CLS" else vocab.eos_id
        asked = bool(getattr(tokenizer, wanted))
        n_found = (ids == (-1 if token is None else token)).sum(dim=1)
        position = "before" if name == "CLS" else "after"
        require((n_found == asked).all(), f"{wanted}={asked}, but a cell has {int(n_found.max())} {name} tokens.")
        require(not asked or (there == token).all(), f"{name} is not {position} the genes.")


def _rule_genes(tokenizer: Tokenizer, cells: CellSource) -> None:
    batch = _tokenize(tokenizer, cells)
    dense = cells.counts.toarray() * _taken(tokenizer)
    for row in range(len(cells)):
        genes = _decode(tokenizer, batch, row)
        require(len(np.unique(genes)) == len(genes), f"a gene occurs more than once in the tokens of cell {row}.")
        missing = np.setdiff1d(np.flatnonzero(dense[row]), genes)
        full = len(genes) >= tokenizer.most_genes
        require(
            full or not len(missing), f"an expressed gene is not among the tokens of cell {row}, although it would fit."
        )
    half = np.arange(0, tokenizer.vocab.n_genes, 2)
    part = _tokenize(tokenizer, cells.counts[:, half], np.array(tokenizer.vocab.genes)[half])
    for row in range(len(cells)):
        extra = np.setdiff1d(_decode(tokenizer, part, row), half)
        require(not len(extra), "a gene that is not in the data is among the tokens.")


def _rule_lengths(tokenizer: Tokenizer, cells: CellSource) -> None:
    batch = _tokenize(tokenizer, cells)
    lengths, predicted = batch["attention_mask"].sum(dim=1).numpy(), tokenizer.lengths(cells.n_expressed)
    # A strategy that leaves some genes out can only tell how many tokens there may be.
    wrong = lengths != predicted if _taken(tokenizer).all() else lengths > predicted
    for row in np.flatnonzero(wrong)[:1]:
        require(False, f"lengths() returns {predicted[row]} tokens for cell {row}, which has {lengths[row]} tokens.")
    most, limit = tokenizer.max_tokens(), tokenizer.max_len
    require(most == lengths[2], f"max_tokens() is {most}, but a cell with all genes has {lengths[2]} tokens.")
    require(limit is None or lengths.max() <= limit, f"a cell has {lengths.max()} tokens, but max_len={limit}.")


def _rule_alone(tokenizer: Tokenizer, cells: CellSource) -> None:
    whole = _tokenize(tokenizer, cells)
    for row in range(len(cells)):
        alone = _tokenize(tokenizer, cells.take(np.array([row])))
        cut = {key: tensor[row : row + 1] for key, tensor in whole.items()}
        _require_same(alone, cut, f"cell {row} alone has different tokens than in a block")
    order = np.random.default_rng(2).permutation(len(cells))
    moved = {key: tensor[order] for key, tensor in whole.items()}
    _require_same(_tokenize(tokenizer, cells.block(order)), moved, "the order of the cells changes their tokens")


def _rule_repeatable(tokenizer: Tokenizer, cells: CellSource) -> None:
    first = _tokenize(tokenizer, cells)
    _require_same(first, _tokenize(tokenizer, cells), "a second call returns different tokens")
    copy: Tokenizer = pickle.loads(pickle.dumps(tokenizer))
    _require_same(first, _tokenize(copy, cells), "a pickled copy returns different tokens")
    # Torch is asked first, as numba may change its number when it starts threads.
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        for n_threads in (1, 2):
            numba.set_num_threads(min(n_threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
            torch.set_num_threads(n_threads)
            _require_same(first, _tokenize(tokenizer, cells), f"{n_threads} threads give different tokens")
    finally:
        numba.set_num_threads(numba_threads)
        torch.set_num_threads(torch_threads)


def _rule_truncation(tokenizer: Tokenizer, cells: CellSource) -> None:
    config, vocab = tokenizer.config(), tokenizer.vocab
    most = min(7, vocab.n_genes // 2)
    if "max_len" not in config or most == 0:
        return
    whole = _tokenize(tokenizer, cells)
    n_around = int(whole["attention_mask"][2].sum()) - len(_decode(tokenizer, whole, 2))
    # Where all genes weigh the same, the order of a strategy that weighs them is that of the counts.
    flat = vocab if vocab.medians is None else vocab.with_medians(np.ones(vocab.n_genes))
    flat = flat if vocab.entropies is None else flat.with_entropies(np.full(vocab.n_genes, 0.5))
    short = type(tokenizer)(flat, **{**config, "max_len": most + n_around})
    batch, dense = _tokenize(short, cells), cells.counts.toarray() * _taken(tokenizer)
    n_tokens = int(batch["attention_mask"].sum(dim=1).max())
    require(n_tokens <= most + n_around, f"a cell has {n_tokens} tokens, but max_len={most + n_around}.")
    kept = [_decode(short, batch, row) for row in range(len(cells))]
    long = [row for row in range(len(cells)) if np.count_nonzero(dense[row]) > 2 * most and row not in EQUAL]
    plain = [np.array_equal(np.sort(kept[row]), np.flatnonzero(dense[row])[: len(kept[row])]) for row in long]
    require(not plain or not all(plain), "truncation keeps the genes that come first in the vocabulary.")
    for row in [] if getattr(short, "samples", False) else range(len(cells)):
        dropped = np.delete(dense[row], kept[row]).max(initial=0)
        lowest = dense[row][kept[row]].min(initial=np.inf)
        sentence = (
            f"truncation drops a count of {dropped:g} but keeps {lowest:g}; set samples = True if this is intended."
        )
        require(dropped <= lowest, sentence)


def _rule_columns(tokenizer: Tokenizer, cells: CellSource) -> None:
    vocab, counts = tokenizer.vocab, cells.counts
    names = np.array(vocab.genes, dtype=object)
    expected = _tokenize(tokenizer, counts)
    _require_same(expected, _tokenize(tokenizer, cells), "a matrix gives different tokens than a block")
    _require_same(expected, _tokenize(tokenizer, counts, names), "naming the columns changes the tokens")
    order = np.random.default_rng(3).permutation(vocab.n_genes)
    permuted = _tokenize(tokenizer, counts[:, order], GeneMap.of(names[order], vocab))
    _require_same(expected, permuted, "permuted columns give different tokens")
    other_names = {"version suffixes": names + ".7", "symbols": np.array(vocab.symbols or names, dtype=object)}
    for kind, others in other_names.items():
        # A name may stand for another gene (a shared symbol), or for none (a version behind what is not an Ensembl id).
        others = np.where(vocab.gene_indices(others) == np.arange(vocab.n_genes), others, names)
        _require_same(expected, _tokenize(tokenizer, counts, others), f"{kind} give different tokens")
        repeated = _tokenize(tokenizer, _halves(counts), np.concatenate([others, names]))
        _require_same(expected, repeated, "two columns of the same gene are not summed")


def _rule_foreign_genes(tokenizer: Tokenizer, cells: CellSource) -> None:
    names = [*tokenizer.vocab.genes, "not a gene", "nor this"]
    foreign = np.random.default_rng(4).integers(0, 50, (len(cells), 2)).astype(np.float32)
    wide = _tokenize(tokenizer, sparse.csr_matrix(sparse.hstack([cells.counts, foreign])), names)
    expected = _tokenize(tokenizer, cells.counts, names[:-2], totals=cells.totals + foreign.sum(axis=1))
    _require_same(expected, wide, "genes outside the vocabulary change more than the library size")


def _rule_matrices(tokenizer: Tokenizer, cells: CellSource) -> None:
    counts = cells.counts.copy()
    expected = _tokenize(tokenizer, counts)
    small = counts[4:].minimum(255)
    for matrix, dtypes in ((counts, "float64 int64 uint32"), (small, "uint8 int16 uint16 int32")):
        same = _tokenize(tokenizer, matrix)
        for dtype in dtypes.split():
            _require_same(same, _tokenize(tokenizer, matrix.astype(dtype)), f"counts as {dtype} give different tokens")
    wide, block = _halves(counts), _all_cells(cells)
    # Each count in two entries that do not stand together, one of them often zero.
    messy = sparse.csr_matrix((wide.data, wide.indices % counts.shape[1], wide.indptr), shape=counts.shape)
    given = [messy.data, messy.indices, messy.indptr, block.indptr, block.genes, block.counts, block.totals, block.rows]
    before = [array.copy() for array in given]
    sentence = "explicit zeros, unsorted or repeated indices give different tokens"
    _require_same(expected, _tokenize(tokenizer, messy), sentence)
    _tokenize(tokenizer, block)
    tokenizer.ragged(block)
    # SciPy gives a matrix other arrays where it sums repeated entries in place.
    unchanged = messy.data is given[0] and all(np.array_equal(a, b) for a, b in zip(before, given, strict=True))
    require(unchanged, "the input counts are modified.")


def _halves(counts: sparse.csr_matrix) -> sparse.csr_matrix:
    """Split each column into two columns that sum to it, shape (B, 2G)."""
    low, high = counts.copy(), counts.copy()
    low.data = np.floor(counts.data / 2)
    high.data = counts.data - low.data
    return sparse.csr_matrix(sparse.hstack([low, high]))


def _rule_config(tokenizer: Tokenizer, cells: CellSource) -> None:
    config = saved_config(tokenizer)
    again = type(tokenizer)(tokenizer.vocab, **config)
    require(again.config() == config, "the tokenizer created from config() has a different config().")
    _require_same(
        _tokenize(tokenizer, cells),
        _tokenize(again, cells),
        "the tokenizer created from config() returns different tokens",
    )


def _rule_ragged(tokenizer: Tokenizer, cells: CellSource) -> None:
    batch, ragged = _tokenize(tokenizer, cells), tokenizer.ragged(_all_cells(cells))
    mask = batch["attention_mask"]
    arrays = {"input_ids": ragged.ids, "values": ragged.values, **ragged.extras}
    require(
        set(arrays) == set(batch) - {"attention_mask"},
        f"ragged() has the keys {sorted(arrays)}, which are not the keys of the batch.",
    )
    require(np.array_equal(np.diff(ragged.indptr), mask.sum(dim=1)), "ragged() and the padded batch differ in length.")
    for key, array in arrays.items():
        require(np.array_equal(array, batch[key][mask]), f"ragged() and the padded batch differ in {key!r}.")


def _rule_order(tokenizer: Tokenizer, cells: CellSource) -> None:
    if tokenizer.ordered_by_gene or tokenizer.vocab.n_genes < 8:
        return
    batches = [_tokenize(tokenizer, cells.block(np.arange(len(cells)), draw=draw)) for draw in range(8)]
    orders = [_decode(tokenizer, batch, row) for batch in batches for row in EQUAL.tolist()]
    alike = all(np.array_equal(orders[0], other) for other in orders)
    require(not alike, "genes with equal counts have the same order in every cell; set ordered_by_gene = True.")
    # In this cell the count of a gene is its place in the vocabulary.
    ranks = [np.corrcoef(np.arange(len(genes)), genes)[0, 1] for genes in (_decode(tokenizer, b, 8) for b in batches)]
    require(abs(np.mean(ranks)) < 0.5, "the position of a gene depends only on its count; set ordered_by_gene = True.")


def _rule_masking(tokenizer: Tokenizer, cells: CellSource) -> None:
    batch = _tokenize(tokenizer, cells)
    masking = Masking(tokenizer.vocab, mask_ratio=0.4, mask_token_prob=1.0, random_token_prob=0.0)
    masked = masking(cast(TokenBatch, batch), np.arange(len(cells)), epoch=0, hidden_last=tokenizer.ordered_by_gene)
    hidden = masked["labels"] != IGNORE_LABEL
    has_genes = (batch["input_ids"] >= tokenizer.vocab.n_special).any(dim=1)
    require(torch.equal(hidden.any(dim=1), has_genes), "masking does not mask a token in every cell.")
    for key, tensor in cast(dict[str, torch.Tensor], masked).items():
        blank = tokenizer.vocab.mask_id if key == "input_ids" else 0
        reveals = key not in _LABELS and key != "attention_mask" and (tensor[hidden] != blank).any()
        require(not reveals, f"{key!r} still reveals masked tokens.")


_RULES: dict[str, Callable[[Tokenizer, CellSource], None]] = {
    "a batch has the right keys, dtypes and shapes": _rule_batch,
    "padding follows the tokens of a cell": _rule_padding,
    "special tokens are at the correct positions": _rule_special_tokens,
    "the tokens are reproducible": _rule_repeatable,
    "config() creates an equal tokenizer": _rule_config,
    "the tokens are the genes of the cell": _rule_genes,
    "lengths() and max_tokens() are correct": _rule_lengths,
    "a cell has the same tokens alone and in a block": _rule_alone,
    "columns are matched by name and not by order": _rule_columns,
    "genes outside the vocabulary change only the library size": _rule_foreign_genes,
    "the matrix format has no effect, and the matrix is not changed": _rule_matrices,
    "truncation drops the genes with the lowest counts": _rule_truncation,
    "ragged() is the batch without padding": _rule_ragged,
    "the neighbors of a masked token do not reveal its gene": _rule_order,
    "masking hides masked tokens completely": _rule_masking,
}
