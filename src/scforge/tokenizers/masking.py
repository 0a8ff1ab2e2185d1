"""Masking: the only place where labels are made.

Shapes: B cells, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numba
import numpy as np
import torch

from scforge._checks import check_mask_ratio
from scforge._constants import IGNORE_LABEL, MASK_ID, N_SPECIAL
from scforge.data.random import cell_keys, uniform
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers.batch import TokenBatch

__all__ = ["Masking"]

_STREAM = 0x6D61736B  # "mask": its random numbers are others than those of the views
_RATIO_STREAM = 0x72617469


class Masking:
    """Choose tokens to predict, and hide them, in the way of BERT (Devlin et al. 2019).

    Of the gene tokens of a cell a share `mask_ratio` is chosen (at least one). A chosen token becomes MASK with
    `mask_token_prob`, another random gene with `random_token_prob`, and else stays. Its value, its bin and whatever
    else the tokenizer tells of it are hidden in every case, so that a target cannot be read off them. Special tokens
    are never chosen nor drawn.

    What is chosen depends on the seed, the epoch and the cell alone.

    Parameters
    ----------
    vocab
        The vocabulary of the tokens, or its size where it has the usual special tokens.
    mask_ratio
        Share of gene tokens to choose, in (0, 1). A list: each cell draws one of them anew in each epoch. A dict such
        as ``{"start": 0.15, "end": 0.5, "epochs": 10}``: the share goes from start to end over so many epochs, evenly,
        or with ``"shape": "cosine"`` slowly at both ends; validation uses that of the first epoch.
    mask_token_prob, random_token_prob
        Probabilities of the two replacements; together at most 1.
    seed
        Seed of the choice.
    """

    def __init__(
        self,
        vocab: GeneVocab | int,
        *,
        mask_ratio: float | Sequence[float] | Mapping[str, Any] = 0.15,
        mask_token_prob: float = 0.8,
        random_token_prob: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_mask_ratio(mask_ratio)
        for name, value in {"mask_token_prob": mask_token_prob, "random_token_prob": random_token_prob}.items():
            if not 0 <= value <= 1:
                raise OptionError(f"{name}={value} is not a probability.")
        if mask_token_prob + random_token_prob > 1 + 1e-9:
            raise OptionError(
                f"mask_token_prob={mask_token_prob} and random_token_prob={random_token_prob} sum to more than 1."
            )
        if isinstance(vocab, GeneVocab):
            self.vocab_size, self.mask_id, self.n_special = len(vocab), vocab.mask_id, vocab.n_special
        else:
            self.vocab_size, self.mask_id, self.n_special = int(vocab), MASK_ID, N_SPECIAL
        self.mask_ratio = mask_ratio
        self.mask_token_prob = float(mask_token_prob)
        self.random_token_prob = float(random_token_prob)
        self.seed = int(seed)

    def __call__(self, batch: TokenBatch, rows: np.ndarray, *, epoch: int, hidden_last: bool = False) -> TokenBatch:
        """Return a new batch with hidden tokens, labels and `masked_positions`.

        Parameters
        ----------
        batch
            Tokens that nothing is hidden of; not changed.
        rows
            Identity of each cell, shape (B,).
        epoch
            Each epoch hides other tokens.
        hidden_last
            Put the chosen tokens behind the others, in random order. Needed where the order of the tokens tells
            something of which genes they are: a gene hidden between two others could be read off its neighbours.
        """
        ids = batch["input_ids"].numpy().copy()
        labels = np.full(ids.shape, IGNORE_LABEL, dtype=np.int64)
        chosen = np.zeros(ids.shape, dtype=np.bool_)
        order = np.empty(ids.shape if hidden_last else (0, 0), dtype=np.int64)
        _mask(
            ids,
            labels,
            chosen,
            order,
            cell_keys(rows, seed=self.seed, epoch=epoch, stream=_STREAM),
            self.ratios(rows, epoch=epoch),
            self.mask_token_prob,
            self.random_token_prob,
            self.mask_id,
            self.n_special,
            self.vocab_size,
        )
        masked: dict[str, torch.Tensor] = {}
        where = torch.from_numpy(chosen)
        for name, tensor in cast(dict[str, torch.Tensor], batch).items():
            if name not in ("input_ids", "attention_mask"):
                masked[name] = tensor.masked_fill(where, 0)
        masked["value_labels"] = batch["values"].masked_fill(~where, 0)
        if "bin_ids" in batch:
            masked["bin_labels"] = batch["bin_ids"].masked_fill(~where, IGNORE_LABEL)
        masked |= {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels), "masked_positions": where}
        if hidden_last:
            moved = torch.from_numpy(order)
            masked = {name: tensor.gather(1, moved) for name, tensor in masked.items()}
        return cast(TokenBatch, {**masked, "attention_mask": batch["attention_mask"]})

    def ratios(self, rows: np.ndarray, *, epoch: int) -> np.ndarray:
        """Return the share of tokens to choose of each cell, float64, shape (B,)."""
        if isinstance(self.mask_ratio, Mapping):
            plan = self.mask_ratio
            done = min(epoch / plan["epochs"], 1.0)
            if plan.get("shape", "linear") == "cosine":
                done = (1 - np.cos(np.pi * done)) / 2
            return np.full(len(rows), plan["start"] + (plan["end"] - plan["start"]) * done)
        if isinstance(self.mask_ratio, Sequence):
            keys = cell_keys(rows, seed=self.seed, epoch=epoch, stream=_RATIO_STREAM)
            return np.asarray(self.mask_ratio, dtype=np.float64)[keys % np.uint64(len(self.mask_ratio))]
        return np.full(len(rows), float(self.mask_ratio))


@numba.njit(cache=True, nogil=True)
def _mask(ids, labels, chosen, order, keys, ratios, mask_prob, random_prob, mask_id, n_special, vocab_size):
    for cell in range(len(ids)):
        slots = np.flatnonzero(ids[cell] >= n_special)
        genes = slots.copy()
        n_chosen = min(max(1, int(len(genes) * ratios[cell] + 0.5)), len(genes))
        key = keys[cell]
        draw = np.uint64(0)
        # The first steps of a Fisher-Yates shuffle: exactly n_chosen positions, each set equally likely.
        for step in range(n_chosen):
            other = step + int(uniform(key, draw) * (len(genes) - step))
            genes[step], genes[other] = genes[other], genes[step]
            position = genes[step]
            labels[cell, position] = ids[cell, position]
            chosen[cell, position] = True
            kind = uniform(key, draw + np.uint64(1))
            if kind < mask_prob:
                ids[cell, position] = mask_id
            elif kind < mask_prob + random_prob:
                ids[cell, position] = n_special + int(uniform(key, draw + np.uint64(2)) * (vocab_size - n_special))
            draw += np.uint64(3)
        if order.size:
            order[cell] = np.arange(ids.shape[1])
            order[cell, slots] = np.concatenate((np.sort(genes[n_chosen:]), genes[:n_chosen]))
