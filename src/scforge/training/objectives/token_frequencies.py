"""Token frequencies, and the loss of a model that predicts them for every cell."""

from __future__ import annotations

import numpy as np

from scforge.data.cells import CellSource, choose_rows
from scforge.errors import OptionError
from scforge.tokenizers.base import Tokenizer

_MAX_CELLS = 10_000
"""Maximum number of cells to count, sampled once."""


def token_counts(cells: CellSource, tokenizer: Tokenizer) -> np.ndarray:
    """Count how often each gene occurs as a token, in at most 10,000 cells.

    Parameters
    ----------
    cells
        Cells from :func:`scforge.data.open_cells`; if there are more than 10,000, a sample is used.
    tokenizer
        Tokenizer to apply to the cells.

    Returns
    -------
    The counts, int64, shape (V,), for the V tokens in the vocabulary; zero for special tokens.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> model = scforge.models.Encoder(adata, "transformer_encoder", hidden_dim=8, num_layers=1, num_heads=2)
    >>> counts = scforge.training.token_counts(scforge.data.open_cells(adata, model.vocab), model.tokenizer)
    >>> len(counts) == len(model.tokenizer.vocab)
    True
    """
    rows = choose_rows(len(cells), _MAX_CELLS)
    counts = np.zeros(len(tokenizer.vocab), dtype=np.int64)
    for start in range(0, len(rows), 1024):
        tokens = tokenizer.ragged(cells.block(rows[start : start + 1024]))
        counts += np.bincount(tokens.ids, minlength=len(counts))
    counts[: tokenizer.vocab.n_special] = 0
    return counts


def token_entropy(counts: np.ndarray) -> float:
    """Return the entropy of token frequencies, which is the loss of a model that predicts only these frequencies.

    If p are the token frequencies, this is -sum(p log p).

    Parameters
    ----------
    counts
        Number of occurrences of each token, shape (V,), e.g. from :func:`token_counts`.

    Returns
    -------
    The entropy in nats, the unit of losses.

    Raises
    ------
    OptionError
        If no token was counted.

    Examples
    --------
    >>> import numpy as np
    >>> import scforge
    >>> round(scforge.training.token_entropy(np.array([0, 0, 2, 2])), 4)
    0.6931
    """
    counts = np.asarray(counts)
    if not counts.sum() > 0:
        raise OptionError(
            "is zero for all tokens; pass the occurrences of each token, e.g. from token_counts.",
            argument="counts",
        )
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
