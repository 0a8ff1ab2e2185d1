"""Expression predicted by a model for genes without counts, and for counted genes after masking.

Shapes: B cells, S tokens, W tokens including the masked ones at the end, G genes of the vocabulary, R requested genes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from scipy import sparse
from torch import nn

from scforge.data.cells import CellBlock, Cells
from scforge.errors import OptionError
from scforge.models._utils import evaluating
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.binned_expression import BinnedExpressionTokenizer
from scforge.training.objectives.base import Objective

_MIN_HIDDEN = 32
_NO_LIMIT = 2**31

_Batch = dict[str, torch.Tensor]


def check_predicts(objective: Objective) -> None:
    """Raise :class:`~scforge.errors.OptionError` if this objective does not predict the expression of masked genes."""
    if not (objective.predicts_values or objective.denoises_values):
        raise OptionError(
            f"a model trained with {type(objective).__name__} does not predict the expression of masked genes; use "
            "objective='masked_value_prediction' with architecture='masked_autoencoder', or 'masked_diffusion' with "
            "'scdiva'."
        )


def knows_zeros(objective: Objective, tokenizer: Tokenizer) -> bool:
    """Return whether a model with this objective is also trained to predict genes without counts."""
    return bool(getattr(objective, "zero_targets", 0.0)) or tokenizer.lists_all_genes


def predict_uncounted(
    module: nn.Module,
    cells: Cells,
    tokenizer: Tokenizer,
    objective: Objective,
    genes: np.ndarray,
    *,
    batch_size: int = 256,
    seed: int = 0,
) -> np.ndarray:
    """Predict the expression of genes without counts from all genes with counts in the cell.

    The requested genes are masked tokens, as in training. They are predicted in parts, with about the same ratio of
    masked to visible genes as in training; the seed determines the parts.

    Returns
    -------
    Expression, float32, shape (number of cells, R), in the unit of the tokenizer values: unchanged for genes with
    counts, predicted (at least 0) for other genes.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:40, :200].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"encoder_dim": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_heads": 2}
    >>> module = scforge.models.MaskedAutoencoder(len(cells.vocab), **sizes)
    >>> objective = scforge.training.MaskedValuePrediction()
    >>> predict_uncounted(module, cells, tokenizer, objective, np.array([0, 7])).shape
    (40, 2)
    """
    size = _hidden_at_once(module, cells, tokenizer, objective)
    parts = np.array_split(np.random.default_rng(seed).permutation(genes), max(1, -(-len(genes) // size)))
    result = np.empty((len(cells), len(genes)), dtype=np.float32)
    for rows, block, tokens in _batches(cells, tokenizer, objective, batch_size):
        counted = _counted(block, tokenizer)
        observed = torch.zeros(counted.shape, dtype=torch.float32)
        cell, column = torch.nonzero(_are_genes(tokens, tokenizer), as_tuple=True)
        observed[cell, tokens["input_ids"][cell, column] - tokenizer.vocab.n_special] = tokens["values"][cell, column]
        values = observed
        for part in parts:
            asked = torch.zeros_like(counted)
            asked[:, part] = True
            # A gene with counts that was truncated is masked like a gene without counts.
            asked &= ~(counted & (observed > 0))
            values = torch.where(asked, _predict(module, tokens, asked, tokenizer, objective), values)
        result[rows] = values[:, genes].numpy()
    return result


def predict_counted(
    module: nn.Module,
    cells: Cells,
    tokenizer: Tokenizer,
    objective: Objective,
    *,
    n_folds: int = 5,
    batch_size: int = 256,
    seed: int = 0,
) -> sparse.csr_matrix:
    """Predict the expression of counted genes, each from the other genes.

    The genes are divided into folds. Genes of one fold are masked and predicted from the other folds, so no value is
    predicted from itself. If a model supports only few tokens, a fold is masked in parts. (The masked counts remain in
    the library size by which the other values are scaled. Quantile bins of a cell are computed from the visible genes.)

    Returns
    -------
    Sparse expression, float32, shape (number of cells, G), in the unit of the tokenizer values, with an entry for each
    count.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:40, :200].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"encoder_dim": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_heads": 2}
    >>> module = scforge.models.MaskedAutoencoder(len(cells.vocab), **sizes)
    >>> objective = scforge.training.MaskedValuePrediction()
    >>> values = predict_counted(module, cells, tokenizer, objective, n_folds=2)
    >>> values.shape == (40, cells.vocab.n_genes)
    True
    """
    rng, n_genes = np.random.default_rng(seed), tokenizer.vocab.n_genes
    fold_of = torch.from_numpy(rng.permutation(n_genes) % n_folds)
    most = _room_for_hidden(module, objective)
    # Quantiles over all genes of the cell would leak the counts of the masked ones.
    relative = isinstance(tokenizer, BinnedExpressionTokenizer) and tokenizer.edges is None
    parts = []
    for _, block, tokens in _batches(cells, tokenizer, objective, batch_size):
        counted = _counted(block, tokenizer)
        values = torch.zeros(counted.shape, dtype=torch.float32)
        for fold in range(n_folds):
            of_fold = counted & (fold_of == fold)
            shown = _tokens(_without(block, fold_of.numpy() == fold), tokenizer, objective) if relative else tokens
            part_of = (of_fold.cumsum(dim=1) - 1) // most
            for number in range(-(-int(of_fold.sum(dim=1).max()) // most)):
                hidden = of_fold & (part_of == number)
                values = torch.where(hidden, _predict(module, shown, hidden, tokenizer, objective), values)
        # Genes ascend within a cell.
        entries = (values.numpy()[counted.numpy()], block.genes, block.indptr)
        parts.append(sparse.csr_matrix(entries, shape=(len(block), n_genes)))
    return sparse.vstack(parts, format="csr")


def hide_genes(tokens: _Batch, hidden: torch.Tensor, tokenizer: Tokenizer) -> tuple[_Batch, torch.Tensor]:
    """Remove genes from cells, and append them as masked tokens, as in ``masked_value_prediction``.

    Parameters
    ----------
    tokens
        One batch from the tokenizer.
    hidden
        Mask of the genes to hide in each cell, including genes without counts, bool, shape (B, G).
    tokenizer
        The tokenizer.

    Returns
    -------
    The batch with ``masked_positions`` (tensors of shape (B, W)), and the vocabulary gene index of each masked token
    (int64, shape (B, W)), with -1 elsewhere.
    """
    n_special, n_front = tokenizer.vocab.n_special, int(tokenizer.append_cls)
    ids, mask = tokens["input_ids"], tokens["attention_mask"] != 0
    n_cells, n_tokens = ids.shape
    of_gene = _are_genes(tokens, tokenizer)
    gone = of_gene & hidden.gather(1, (ids - n_special).clamp(min=0))
    n_hidden = hidden.sum(dim=1)
    added = torch.zeros(n_cells, int(n_hidden.max()), dtype=torch.int64)
    cell, gene = torch.nonzero(hidden, as_tuple=True)
    within = torch.arange(len(cell)) - (n_hidden.cumsum(0) - n_hidden)[cell]
    added[cell, within] = gene + n_special
    # Visible tokens, masked genes, tokens after the genes of a cell such as EOS, padding.
    positions = torch.arange(n_tokens).expand(n_cells, -1)
    last_gene = (
        torch.where(of_gene, positions, -1).amax(dim=1, keepdim=True) if n_tokens else positions.new_zeros(n_cells, 1)
    )
    behind = ~of_gene & (positions > last_gene) & (positions >= n_front)
    kind = torch.where(behind, 2, 0).masked_fill(~mask | gone, 3)
    kind = torch.cat([kind, torch.where(added > 0, 1, 3)], dim=1)
    order = torch.argsort(kind, dim=1, stable=True)[:, : int((kind < 3).sum(dim=1).max())]
    batch = {}
    for name, tensor in tokens.items():
        more = added if name == "input_ids" else torch.zeros(added.shape, dtype=tensor.dtype)
        batch[name] = torch.cat([tensor, more], dim=1).gather(1, order)
    kind = kind.gather(1, order)
    batch["attention_mask"] = kind < 3
    batch["masked_positions"] = kind == 1
    for name in set(batch) - {"attention_mask", "masked_positions"}:
        batch[name] = batch[name].masked_fill(kind == 3, 0)
    return batch, torch.where(kind == 1, batch["input_ids"] - n_special, -1)


def _predict(
    module: nn.Module, tokens: _Batch, hidden: torch.Tensor, tokenizer: Tokenizer, objective: Objective
) -> torch.Tensor:
    """Return the predicted values of masked genes, float32, shape (B, G), 0 elsewhere."""
    values = torch.zeros(hidden.shape, dtype=torch.float32)
    if not hidden.any():
        return values
    batch, genes = hide_genes(tokens, hidden, tokenizer)
    if objective.denoises_values:
        batch["masked_values"] = batch.pop("masked_positions")  # which gene it is stays known
    device = next(module.parameters()).device
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    with evaluating(module), torch.inference_mode():
        raw = _token_values(module, on_device).float().cpu()
    cell, column = torch.nonzero(genes >= 0, as_tuple=True)
    values[cell, genes[cell, column]] = raw[cell, column].clamp(min=0)
    return values


def _token_values(module: nn.Module, batch: _Batch) -> torch.Tensor:
    """Return the value that the module predicts for each token, (B, W); for bins, the expected value."""
    head = getattr(module, "expression_head", None)
    if "masked_values" in batch:
        raw = cast(Any, module).predict_values(**batch)
    elif head is not None:
        # Its forward would also compute the logits of all genes.
        raw = head(module(**batch, return_logits=False, output_hidden_states=True).hidden_states[-1])
    else:
        raw = module(**batch, return_logits=True).logits
    if raw is not None and raw.ndim == 3 and head is not None:
        bins = torch.arange(raw.shape[2], dtype=torch.float32, device=raw.device)
        return raw.float().softmax(dim=2) @ bins
    if raw is None or raw.ndim != 2:
        raise OptionError(f"{type(module).__name__} cannot predict expression; use architecture='masked_autoencoder'.")
    return raw


def _batches(
    cells: Cells, tokenizer: Tokenizer, objective: Objective, batch_size: int
) -> Iterator[tuple[slice, CellBlock, _Batch]]:
    """Yield cells and their tokens."""
    for start in range(0, len(cells), batch_size):
        rows = slice(start, min(start + batch_size, len(cells)))
        block = cells.block(np.arange(rows.start, rows.stop))
        yield rows, block, _tokens(block, tokenizer, objective)


def _tokens(block: CellBlock, tokenizer: Tokenizer, objective: Objective) -> _Batch:
    rows = np.zeros(len(block), dtype=np.int64)
    return dict(cast(_Batch, objective.arrange(tokenizer(block), tokenizer, rows, epoch=0, seed=0)))


def _without(block: CellBlock, genes: np.ndarray) -> CellBlock:
    """Return cells without the counts of `genes`, bool, shape (G,); the totals do not change."""
    stays = ~genes[block.genes]
    indptr = np.concatenate([[0], np.cumsum(stays)])[block.indptr].astype(block.indptr.dtype)
    return replace(block, indptr=indptr, genes=block.genes[stays], counts=block.counts[stays])


def _are_genes(tokens: _Batch, tokenizer: Tokenizer) -> torch.Tensor:
    return (tokens["attention_mask"] != 0) & (tokens["input_ids"] >= tokenizer.vocab.n_special)


def _counted(block: CellBlock, tokenizer: Tokenizer) -> torch.Tensor:
    """Return which genes have counts, bool, shape (B, G)."""
    counted = torch.zeros(len(block), tokenizer.vocab.n_genes, dtype=torch.bool)
    cell = np.repeat(np.arange(len(block)), np.diff(block.indptr))
    counted[torch.from_numpy(cell), torch.from_numpy(block.genes.astype(np.int64))] = True
    return counted


def _room_for_hidden(module: nn.Module, objective: Objective) -> int:
    """Return the maximum number of genes per cell that can be masked at a time."""
    room = getattr(module, "attended_tokens", None) if objective.denoises_values else None
    return _NO_LIMIT if room is None else max(1, room // 2)  # the others are visible


def _hidden_at_once(module: nn.Module, cells: Cells, tokenizer: Tokenizer, objective: Objective) -> int:
    """Return the number of genes to predict at a time: as many as in training for a cell of mean length."""
    ratio: Any = getattr(objective, "mask_ratio", 0.5)
    share = np.mean([ratio["start"], ratio["end"]]) if isinstance(ratio, dict) else float(np.mean(ratio))
    lengths = tokenizer.lengths(cells.n_expressed.astype(np.int64))
    for_each = share
    if not tokenizer.lists_all_genes:  # masked genes are added to those of the cell, which all stay visible
        for_each *= (1 + getattr(objective, "zero_targets", 0.0)) / (1 - share)
    size = min(max(_MIN_HIDDEN, int(for_each * lengths.mean())), _room_for_hidden(module, objective))
    embedding = getattr(module, "embedding", None)
    if getattr(module, "expression_head", None) is None or embedding is None:
        return size
    room = int(embedding.max_seq_len) - int(lengths.max())
    if room < 1:
        full = f"the {int(lengths.max())} tokens of a cell"
        raise OptionError(f"leaves no room for more than {full}; raise it.", max_seq_len=embedding.max_seq_len)
    return min(size, room)
