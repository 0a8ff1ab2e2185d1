"""Masking of tokens, the only step that creates labels.

Shapes: B cells, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numba
import numpy as np
import torch

from scforge._checks import check_mask_ratio, check_seed, check_share
from scforge._constants import IGNORE_LABEL, MASK_ID, N_SPECIAL
from scforge.data.sampling import cell_keys, uniform
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers.base import TokenBatch

_STREAM = 0x6D61736B  # "mask": its random numbers are others than those of the views
_RATIO_STREAM = 0x72617469

_LABELS_OF = {"values": ("value_labels", 0), "bin_ids": ("bin_labels", IGNORE_LABEL)}
"""A mapping from tokenizer output to the name of its labels, and the label value at unmasked positions."""


class Masking:
    """Select tokens to predict and mask them, as in BERT (Devlin et al. 2019).

    A fraction `mask_ratio` of the gene tokens of a cell is chosen (at least one). A chosen token is replaced by MASK
    with probability `mask_token_prob`, by a random gene with probability `random_token_prob`, and is unchanged
    otherwise. Its value, bin and other properties are always masked, so they do not reveal the target. Special tokens
    are never chosen or inserted.

    The choice depends only on the seed, the epoch and the cell.

    Parameters
    ----------
    vocab
        The vocabulary of the tokens, or its size if it contains the usual special tokens.
    mask_ratio
        Fraction of gene tokens to choose, in (0, 1). With a list, one of its values is sampled for each cell in each
        epoch. With a dict such as ``{"start": 0.15, "end": 0.5, "epochs": 10}``, the fraction changes from start to end
        over this number of epochs, linearly or, with ``"shape": "cosine"``, along a cosine. Validation uses the
        fraction of the first epoch.
    mask_token_prob, random_token_prob
        Probabilities of the two replacements; their sum is at most 1.
    seed
        Random seed.

    Raises
    ------
    OptionError
        If a fraction or the seed is invalid, or the two probabilities sum to more than 1.

    Examples
    --------
    >>> import numpy as np
    >>> from scforge.data import GeneVocab
    >>> from scforge.tokenizers import get_tokenizer
    >>> vocab = GeneVocab.from_genes([f"G{i}" for i in range(20)])
    >>> batch = get_tokenizer("continuous_projection", vocab)(np.ones((2, 20)))
    >>> masked = Masking(vocab, mask_ratio=0.25)(batch, np.array([0, 1]), epoch=0)
    >>> masked["masked_positions"].sum(dim=1).tolist(), bool((masked["values"][masked["masked_positions"]] == 0).all())
    ([5, 5], True)
    >>> vocab.decode(masked["labels"][0][masked["masked_positions"][0]])
    ['G0', 'G2', 'G7', 'G14', 'G15']
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
        self.mask_token_prob = check_share("mask_token_prob", mask_token_prob)
        self.random_token_prob = check_share("random_token_prob", random_token_prob)
        if mask_token_prob + random_token_prob > 1 + 1e-9:
            raise OptionError(
                f"and random_token_prob={random_token_prob} sum to more than 1; lower one of the two.",
                mask_token_prob=mask_token_prob,
            )
        if isinstance(vocab, GeneVocab):
            self.vocab_size, self.mask_id, self.n_special = len(vocab), vocab.mask_id, vocab.n_special
        else:
            self.vocab_size, self.mask_id, self.n_special = int(vocab), MASK_ID, N_SPECIAL
        self.mask_ratio = mask_ratio
        self.seed = check_seed(seed)

    def __call__(self, batch: TokenBatch, rows: np.ndarray, *, epoch: int, hidden_last: bool = False) -> TokenBatch:
        """Return a new batch with masked tokens, labels and `masked_positions`.

        Parameters
        ----------
        batch
            Unmasked tokens, which are not modified.
        rows
            Identity of each cell, shape (B,).
        epoch
            The epoch; each epoch masks different tokens.
        hidden_last
            Whether to put the chosen tokens after the other tokens, in random order. This is required if the order of
            the tokens is informative, because a masked gene could otherwise be inferred from its neighbors.

        Returns
        -------
        The batch with ``labels`` and ``masked_positions``, and with ``value_labels`` and ``bin_labels`` if it contains
        values and bins.
        """
        tokens = batch["input_ids"].numpy()
        ids, labels = np.empty_like(tokens), np.empty_like(tokens)
        chosen = np.empty(tokens.shape, dtype=np.bool_)
        order = np.empty(tokens.shape, dtype=np.int32)
        keys, ratios = cell_keys(rows, seed=self.seed, epoch=epoch, stream=_STREAM), self.ratios(rows, epoch=epoch)
        _mask(
            tokens, ids, labels, chosen, order, keys, ratios, self.mask_token_prob, self.random_token_prob,
            self.mask_id, self.n_special, self.vocab_size, hidden_last,
        )  # fmt: skip
        masked = {"input_ids": ids, "labels": labels, "masked_positions": chosen}
        for name, tensor in cast(dict[str, torch.Tensor], batch).items():
            if name not in ("input_ids", "attention_mask"):
                array = tensor.numpy()
                masked[name] = np.empty_like(array)
                target, ignore = _LABELS_OF.get(name, (None, 0))
                hidden = np.empty_like(array if target is not None else array[:0])
                _hide(array, order, chosen, ignore, masked[name], hidden)
                if target is not None:
                    masked[target] = hidden
        tensors = {name: torch.from_numpy(array) for name, array in masked.items()}
        return cast(TokenBatch, {**tensors, "attention_mask": batch["attention_mask"]})

    def ratios(self, rows: np.ndarray, *, epoch: int) -> np.ndarray:
        """Return the fraction of tokens to choose in each cell, float64, shape (B,).

        Parameters
        ----------
        rows
            Identity of each cell, shape (B,).
        epoch
            The epoch, on which lists and schedules of fractions depend.

        Returns
        -------
        Fractions between 0 and 1.
        """
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
def _mask(
    tokens, ids, labels, chosen, order, keys, ratios, mask_prob, random_prob, mask_id, n_special, vocab_size, last
):  # fmt: skip
    n_tokens = tokens.shape[1]
    slots = np.empty(n_tokens, dtype=np.int32)
    drawn = np.empty(n_tokens, dtype=np.int32)
    hidden = np.zeros(n_tokens, dtype=np.bool_)
    for cell in range(len(tokens)):
        n_slots = 0
        for position in range(n_tokens):
            ids[cell, position] = tokens[cell, position]
            labels[cell, position] = IGNORE_LABEL
            chosen[cell, position] = False
            order[cell, position] = position
            if tokens[cell, position] >= n_special:
                slots[n_slots] = drawn[n_slots] = position
                n_slots += 1
        n_chosen = min(max(1, int(n_slots * ratios[cell] + 0.5)), n_slots)
        key = keys[cell]
        # The first steps of a Fisher-Yates shuffle: exactly n_chosen positions, each set equally likely.
        for step in range(n_chosen):
            other = step + int(uniform(key, np.uint64(3 * step)) * (n_slots - step))
            drawn[step], drawn[other] = drawn[other], drawn[step]
            hidden[drawn[step]] = True
        if last:
            free = 0
            for slot in range(n_slots):
                position = slots[slot]
                if not hidden[position]:
                    order[cell, slots[free]] = position
                    ids[cell, slots[free]] = tokens[cell, position]
                    free += 1
            for step in range(n_chosen):
                order[cell, slots[free + step]] = drawn[step]
        for step in range(n_chosen):
            hidden[drawn[step]] = False
            position = slots[n_slots - n_chosen + step] if last else drawn[step]
            gene = tokens[cell, drawn[step]]
            labels[cell, position] = gene
            chosen[cell, position] = True
            kind = uniform(key, np.uint64(3 * step + 1))
            if kind < mask_prob:
                ids[cell, position] = mask_id
            elif kind < mask_prob + random_prob:
                draw = uniform(key, np.uint64(3 * step + 2))
                ids[cell, position] = n_special + int(draw * (vocab_size - n_special))
            else:
                ids[cell, position] = gene


@numba.njit(cache=True, nogil=True)
def _hide(array, order, chosen, ignore, visible, hidden):
    """Split an array into visible entries and, if requested, masked entries."""
    n_tokens = array.shape[1]
    wanted = len(hidden) > 0
    for cell in range(len(array)):
        for position in range(n_tokens):
            value = array[cell, order[cell, position]]
            visible[cell, position] = 0 if chosen[cell, position] else value
            if wanted:
                hidden[cell, position] = value if chosen[cell, position] else ignore
