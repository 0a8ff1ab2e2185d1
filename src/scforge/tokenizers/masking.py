"""Masking: the only place where labels are made.

Shapes: B cells, S tokens.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from scforge._constants import IGNORE_LABEL, MASK_ID, N_SPECIAL
from scforge.data.random import cell_keys, uniform
from scforge.errors import OptionError
from scforge.tokenizers.batch import TokenBatch

__all__ = ["Masking"]

_STREAM = 0x6D61736B  # "mask": its random numbers are others than those of the views


class Masking:
    """Choose tokens to predict, and hide them, in the way of BERT (Devlin et al. 2019).

    Of the gene tokens of a cell a share `mask_ratio` is chosen (at least one). A chosen token becomes MASK with
    `mask_token_prob`, another random gene with `random_token_prob`, and else stays. The value of a chosen token is
    hidden in every case, so that a target cannot be read off it. Special tokens are never chosen nor drawn.

    What is chosen depends on the seed, the epoch and the cell alone.

    Parameters
    ----------
    vocab_size
        Number of tokens, special tokens included.
    mask_ratio
        Share of gene tokens to choose, in (0, 1).
    mask_token_prob, random_token_prob
        Probabilities of the two replacements; together at most 1.
    seed
        Seed of the choice.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        mask_ratio: float = 0.15,
        mask_token_prob: float = 0.8,
        random_token_prob: float = 0.1,
        seed: int = 0,
    ) -> None:
        if not 0 < mask_ratio < 1:
            raise OptionError(f"mask_ratio={mask_ratio} is not between 0 and 1.")
        for name, value in {"mask_token_prob": mask_token_prob, "random_token_prob": random_token_prob}.items():
            if not 0 <= value <= 1:
                raise OptionError(f"{name}={value} is not a probability.")
        if mask_token_prob + random_token_prob > 1 + 1e-9:
            raise OptionError(
                f"mask_token_prob={mask_token_prob} and random_token_prob={random_token_prob} sum to more than 1."
            )
        self.vocab_size = int(vocab_size)
        self.mask_ratio = float(mask_ratio)
        self.mask_token_prob = float(mask_token_prob)
        self.random_token_prob = float(random_token_prob)
        self.seed = int(seed)

    def __call__(self, batch: TokenBatch, rows: np.ndarray, *, epoch: int, hidden_last: bool = False) -> TokenBatch:
        """Return a new batch with hidden tokens, `labels` and `masked_positions`.

        Parameters
        ----------
        batch
            Tokens that nothing is hidden of; not changed.
        rows
            Identity of each cell, shape (B,).
        epoch
            Each epoch hides other tokens.
        hidden_last
            Put the chosen tokens behind the others, in random order. Needed where tokens stand in the order of the
            vocabulary: there a gene hidden between two others could be read off its neighbours.
        """
        ids = batch["input_ids"].numpy().copy()
        values = batch["values"].numpy().copy()
        labels, chosen = _mask(
            ids,
            values,
            cell_keys(rows, seed=self.seed, epoch=epoch, stream=_STREAM),
            self.mask_ratio,
            self.mask_token_prob,
            self.random_token_prob,
            self.vocab_size,
            hidden_last,
        )
        return TokenBatch(
            input_ids=torch.from_numpy(ids),
            attention_mask=batch["attention_mask"],
            values=torch.from_numpy(values),
            labels=torch.from_numpy(labels),
            masked_positions=torch.from_numpy(chosen),
        )


@numba.njit(cache=True)
def _mask(ids, values, keys, ratio, mask_prob, random_prob, vocab_size, hidden_last):
    n_cells, n_tokens = ids.shape
    labels = np.full((n_cells, n_tokens), IGNORE_LABEL, dtype=np.int64)
    chosen = np.zeros((n_cells, n_tokens), dtype=np.bool_)
    for cell in range(n_cells):
        slots = np.flatnonzero(ids[cell] >= N_SPECIAL)
        genes = slots.copy()
        if len(genes) == 0:
            continue
        n_chosen = max(1, int(len(genes) * ratio + 0.5))
        key = keys[cell]
        draw = np.uint64(0)
        # The first steps of a Fisher-Yates shuffle: exactly n_chosen positions, each set equally likely.
        for step in range(n_chosen):
            other = step + int(uniform(key, draw) * (len(genes) - step))
            genes[step], genes[other] = genes[other], genes[step]
            position = genes[step]
            labels[cell, position] = ids[cell, position]
            chosen[cell, position] = True
            values[cell, position] = 0.0
            kind = uniform(key, draw + np.uint64(1))
            if kind < mask_prob:
                ids[cell, position] = MASK_ID
            elif kind < mask_prob + random_prob:
                gene = int(uniform(key, draw + np.uint64(2)) * (vocab_size - N_SPECIAL))
                ids[cell, position] = N_SPECIAL + gene
            draw += np.uint64(3)
        if hidden_last:
            order = np.concatenate((np.sort(genes[n_chosen:]), genes[:n_chosen]))
            ids[cell, slots] = ids[cell, order]
            values[cell, slots] = values[cell, order]
            labels[cell, slots] = labels[cell, order]
            chosen[cell, slots] = chosen[cell, order]
    return labels, chosen
