"""Gene embeddings of a model: input embeddings, and contextual embeddings averaged over cells.

Shapes: B cells, S tokens, H hidden, G genes of the vocabulary, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from scforge.data.cells import Cells
from scforge.errors import OptionError, ScforgeError, listing
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.gene_vectors import GeneVectorBag
from scforge.models.registry import MODELS
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective
from scforge.training.predict import run_over


@torch.inference_mode()
def input_gene_embeddings(module: nn.Module, tokenizer: Tokenizer) -> np.ndarray:
    """Return the input embedding of each gene, before positions and values are added, float32, shape (G, H).

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:40, :200].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("rank_value", cells.vocab, use_medians=False)
    >>> module = scforge.models.TransformerEncoder(len(cells.vocab), hidden_dim=8, num_layers=1, num_heads=2)
    >>> input_gene_embeddings(module, tokenizer).shape == (cells.vocab.n_genes, 8)
    True
    """
    vocab = tokenizer.vocab
    if callable(table := getattr(module, "token_table", None)):
        return table()[vocab.n_special :].float().cpu().numpy()
    ids = torch.arange(vocab.n_special, len(vocab), device=next(module.parameters()).device)
    # A component known to embed tokens, or the first table with the size of the vocabulary.
    parts = list(module.modules())
    candidates: list[nn.Module] = [part.gene_embedding for part in parts if isinstance(part, GeneExpressionEmbedding)]
    candidates += [part for part in parts if isinstance(part, GeneVectorBag)]
    tables = [part for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    candidates += [part for part in tables if part.num_embeddings == len(vocab)]
    if not candidates:
        raise OptionError(f"{type(module).__name__} has no GeneExpressionEmbedding with {len(vocab)} tokens.")
    embedding = candidates[0]
    is_bag = isinstance(embedding, nn.EmbeddingBag | GeneVectorBag)
    # A bag sums: bags of one token each.
    vectors = embedding(ids.unsqueeze(1)) if is_bag else embedding(ids.unsqueeze(0))[0]
    return vectors.float().cpu().numpy()


def contextual_gene_embeddings(
    module: nn.Module,
    cells: Cells,
    tokenizer: Tokenizer,
    *,
    objective: Objective | None = None,
    batch_size: int = 256,
    layer: int = -1,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token state of each gene, averaged over the cells that contain the token.

    The means are float32, shape (G, H), with NaN for genes that are not a token in any cell. They are returned with the
    number of cells of each gene, int64, shape (G,).

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:40, :200].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("rank_value", cells.vocab, use_medians=False)
    >>> module = scforge.models.TransformerEncoder(len(cells.vocab), hidden_dim=8, num_layers=1, num_heads=2)
    >>> means, n_cells = contextual_gene_embeddings(module, cells, tokenizer)
    >>> means.shape == (cells.vocab.n_genes, 8), bool(np.isnan(means[n_cells == 0]).all())
    (True, True)
    """
    check_offers(module, "output_hidden_states", "does not return token embeddings", ", or pass contextual=False")
    n_special, n_tokens = tokenizer.vocab.n_special, len(tokenizer.vocab)
    sums: torch.Tensor | None = None
    numbers = torch.zeros(n_tokens, dtype=torch.int64)

    def add(batch: dict[str, torch.Tensor]) -> None:
        nonlocal sums
        output = module(**batch, return_logits=False, output_hidden_states=True)
        states = of_layer(output.hidden_states, layer)
        if states.stride(1) == 0 and states.shape[1] > 1:
            what = f"{type(module).__name__} with these options returns the same embedding for all tokens of a cell"
            raise OptionError(f"{what}; pass contextual=False, or use e.g. architecture='transformer_encoder'.")
        chosen = batch["attention_mask"] & (batch["input_ids"] >= n_special)
        chosen &= states.any(dim=2)  # tokens that had no room have zeros
        ids, of_tokens = batch["input_ids"][chosen].cpu(), states[chosen].double().cpu()
        if sums is None:
            sums = torch.zeros(n_tokens, of_tokens.shape[1], dtype=torch.float64)
        sums.index_add_(0, ids, of_tokens)
        numbers.add_(torch.bincount(ids, minlength=n_tokens))

    visit(module, cells, tokenizer, add, objective=objective, batch_size=batch_size)
    assert sums is not None
    means = (sums / numbers.unsqueeze(1))[n_special:]  # 0 / 0 is NaN
    return means.float().numpy(), numbers[n_special:].numpy()


def visit(module: nn.Module, cells: Cells, tokenizer: Tokenizer, do: Any, **options: Any) -> None:
    """Call `do` on each batch of tokens; `options` are passed to :func:`scforge.training.predict.run_over`."""

    def compute(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        do(batch)
        return torch.zeros(len(batch["input_ids"]), 1)

    run_over(module, cells, tokenizer, compute, **options)


def of_layer(parts: Sequence[torch.Tensor] | None, layer: int) -> torch.Tensor:
    """Return the output of one layer. Raises :class:`~scforge.errors.OptionError` if the layer does not exist."""
    if not parts or not -len(parts) <= layer < len(parts):
        raise OptionError(f"is out of range for {len(parts or ())} layers; -1 is the last layer.", layer=layer)
    return parts[layer]


def check_offers(module: nn.Module, option: str, lack: str, fix: str = "") -> None:
    """Raise an error if ``forward`` of an architecture lacks an option; `lack` describes the missing feature."""
    if _offers(type(module), option):
        return
    offering = []
    for name in MODELS.names():
        with suppress(ScforgeError):  # of a part that cannot be used, which is another matter
            offering += [name] if _offers(MODELS.get(name), option) else []
    raise OptionError(f"{type(module).__name__} {lack}; choose another architecture ({listing(offering)}){fix}.")


def _offers(architecture: type[nn.Module], option: str) -> bool:
    return option in inspect.signature(architecture.forward).parameters
