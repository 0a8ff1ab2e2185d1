"""Masked diffusion: mask a random fraction of the genes and values of a cell, and predict both.

Shapes: B cells, S tokens, G genes of the vocabulary, E expressed genes of a cell.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numba
import numpy as np
import torch
from torch import nn

from scforge._checks import check_bool, check_choice, check_count, check_positive
from scforge._constants import IGNORE_LABEL, TARGET_SUM
from scforge.data.cells import CellBlock, CellSource, choose_rows
from scforge.data.sampling import cell_keys, uniform
from scforge.errors import OptionError, TrainingError, warn
from scforge.tokenizers._expression import log1p_cp10k
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives._conditioning import TellsBatches
from scforge.training.objectives._views import downsampled
from scforge.training.objectives.base import (
    TrainingDefaults,
    mismatch,
    output_of,
    refuse_zero_genes,
    register_objective,
)
from scforge.training.objectives.variational import (
    active_units,
    check_thinning,
    dense_profiles,
    mean_moments,
    start_at_means,
    whole_profiles,
)

_STREAM = 0x64696666  # "diff": separate random numbers from those of masks and views
_SAMPLED_CELLS = 10_000
_MAX_GENES = 1200
"""Default number of genes per cell if the architecture sets no limit."""


@register_objective("masked_diffusion")
class MaskedDiffusion(TellsBatches):
    """Cross entropy of masked genes and squared error of masked values, at all masking fractions.

    The objective is the absorbing-state diffusion of discrete tokens (Austin et al. 2021; Sahoo et al. 2024) over the
    genes of a cell and their values, as in ScDiVa (arXiv:2602.03477). We derived the formulas. Each cell has a time t
    in [0, 1). Of its S tokens, n = floor(t S) + 1 are masked, so each n from 1 to S is equally likely::

        loss = mean over cells of (mean cross entropy of masked genes
                                   + value_weight * mean squared error of masked values)
               + reconstruction_weight * reconstruction + beta * kl

    The mean cross entropy is the likelihood bound of a cell, per token. In the bound, tokens are masked independently
    with probability t, and the sum over tokens has the weight 1 / t. All states with n masked tokens together therefore
    have the weight 1 / n, the integral of (S over n) t^(n - 1) (1 - t)^(S - n). The sum over n tokens times 1 / n is
    their mean. Times are stratified: t_i = (u + i / B) mod 1 over the B cells of a batch, so each batch covers all
    fractions. The last two terms are the same as in :class:`~scforge.training.Variational`. These terms train the
    embedding, which is computed from the visible part of a cell and decoded to the whole cell.

    Requires an architecture that takes ``loss_weights``, such as ``scdiva``. The trained models can generate cells and
    impute genes.

    Parameters
    ----------
    corrupt
        ``"separate"``: genes and values are masked independently, so the model also learns to predict values of known
        genes. ``"both"``: the gene and the value of a token are masked together. In half of the cells, resampled in
        each epoch, only values are masked, because generation and imputation predict values of known genes. (Genes
        therefore have half the weight.)
    thinning
        Range of the fraction of counts that the model receives for each cell, sampled log-uniformly in each epoch. The
        targets are computed from all counts. If None, keeps all counts.
    max_genes
        Maximum number of genes per cell; the first genes in the order of the tokenizer are kept. If None, uses as many
        genes as the architecture attends to.
    value_weight
        Weight of the values.
    reconstruction_weight
        Weight of the reconstruction; 0 leaves the latent variable untrained.
    beta
        Weight of the KL divergence of the latent distribution.
    token_prior
        Whether to initialize the gene prediction at the token frequencies of the training cells.
    batch_key, batches
        Column of ``obs`` with the batch of each cell, on which the latent decoder is conditioned, and the names of the
        batches in the order of their codes; see :class:`~scforge.training.Variational`. They have no effect with
        ``reconstruction_weight=0``.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> objective = {"name": "masked_diffusion", "max_genes": 50}
    >>> sizes = dict(hidden_dim=8, num_layers=1, num_heads=2, latent_dim=4)
    >>> model = scforge.models.Encoder(adata, "scdiva", objective=objective, **sizes)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> "validation_loss" in model.history
    True
    """

    generates = True
    denoises_values: ClassVar[bool] = True
    defaults = TrainingDefaults(batch_size=64, lr=1e-3, weight_decay=0.01, schedule="cosine_warmup", max_epochs=30)

    def __init__(
        self,
        *,
        corrupt: str = "separate",
        thinning: Sequence[float] | None = (0.1, 1.0),
        max_genes: int | None = None,
        value_weight: float = 1.0,
        reconstruction_weight: float = 1.0,
        beta: float = 1e-4,
        token_prior: bool = True,
        batch_key: str | None = None,
        batches: Sequence[str] | None = None,
    ) -> None:
        self.corrupt = check_choice("corrupt", corrupt, ["separate", "both"])
        self.thinning = check_thinning(thinning)
        self.max_genes = None if max_genes is None else check_count("max_genes", max_genes, "genes")
        self.value_weight = check_positive("value_weight", value_weight, or_zero=True)
        self.reconstruction_weight = check_positive("reconstruction_weight", reconstruction_weight, or_zero=True)
        self.beta = check_positive("beta", beta, or_zero=True)
        self.token_prior = check_bool("token_prior", token_prior)
        self._set_batches(batch_key, batches)
        self._attended: int | None = None

    @property
    def most_genes(self) -> int:
        """Return the maximum number of genes per cell in the batches."""
        return (self._attended or _MAX_GENES) if self.max_genes is None else self.max_genes

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise an error if genes without counts are tokens, or values are not log1p CP10K."""
        refuse_zero_genes("masked_diffusion", tokenizer)
        if tokenizer.append_cls or tokenizer.append_eos:
            raise OptionError(
                "'masked_diffusion' accepts only gene tokens; pass append_cls=False and append_eos=False to the "
                "tokenizer."
            )
        unit = (getattr(tokenizer, "transform", "log1p_cp10k"), getattr(tokenizer, "target_sum", TARGET_SUM))
        if unit != ("log1p_cp10k", TARGET_SUM) or getattr(tokenizer, "n_bins", None) is not None:
            raise OptionError(
                f"'masked_diffusion' predicts log1p CP10K values, but {type(tokenizer).__name__} with these options "
                "does not provide them; choose tokenizer='entropy_ranked'."
            )

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:
        """Raise an error if the architecture does not predict masked genes and masked values with cell weights."""
        named = set(inspect.signature(architecture.forward).parameters)
        if not {"loss_weights", "masked_values", "target"} <= named:
            why = "does not accept loss_weights, masked_values and target as arguments of forward"
            raise mismatch("masked_diffusion", architecture, why, "the architecture 'scdiva'")

    def model_options(self) -> dict[str, Any]:
        """Request a value head, and return the number of batches."""
        return {"denoising": True, **super().model_options()}

    def learn_from(self, module: nn.Module) -> None:
        """Read the number of tokens that the architecture attends to."""
        self._attended = getattr(module, "attended_tokens", None)

    def max_tokens(self, tokenizer: Tokenizer) -> int:
        """Return the maximum number of tokens per cell."""
        return min(tokenizer.max_tokens(), self.most_genes)

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Set the module's cell lengths, gene frequencies and mean value."""
        counts, lengths, whole, values = np.zeros(len(tokenizer.vocab)), [], [], []
        rows = choose_rows(len(cells), _SAMPLED_CELLS)
        for start in range(0, len(rows), 1024):
            tokens = tokenizer(cells.block(rows[start : start + 1024]))
            whole.append(tokens["attention_mask"].sum(dim=1).numpy())
            there = tokens["attention_mask"][:, : self.most_genes]
            lengths.append(there.sum(dim=1).numpy())
            counts += np.bincount(tokens["input_ids"][:, : self.most_genes][there], minlength=len(counts))
            values.append(tokens["values"][:, : self.most_genes][there].numpy())
        whole_lengths = np.concatenate(whole)
        if (is_cut := whole_lengths > self.most_genes).any():
            limit = "max_genes" if self.max_genes is not None or self._attended is None else "max_tokens"
            warn(
                f"{limit}={self.most_genes} truncates {is_cut.mean():.0%} of the cells (median of all cells: "
                f"{np.median(whole_lengths):.0f} genes), so 'masked_diffusion' learns only the first "
                f"{self.most_genes} genes in the order of the tokenizer, and generated cells have at most "
                f"{self.most_genes} genes; increase {limit} to use complete cells."
            )
        of_module = cast(Any, module)
        if hasattr(module, "init_lengths"):
            quantiles = np.quantile(np.concatenate(lengths), np.linspace(0, 1, 101))
            of_module.init_lengths(torch.from_numpy(quantiles).float())
        if self.token_prior and hasattr(module, "init_token_prior"):
            of_module.init_token_prior(torch.from_numpy(counts))
        if hasattr(module, "init_value_prior") and len(all_values := np.concatenate(values)):
            of_module.init_value_prior(float(all_values.mean()))
        if self.reconstruction_weight:
            start_at_means(module, cells)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenize, sample a time for each cell, and mask genes and values."""
        n_special, mask_id = tokenizer.vocab.n_special, tokenizer.vocab.mask_id
        tokens = tokenizer(block)
        ids = tokens["input_ids"][:, : self.most_genes].numpy()
        values = tokens["values"][:, : self.most_genes].numpy()
        visible = downsampled(block, self.thinning, epoch=epoch, seed=seed)
        # The log1p CP10K values in the visible part of each cell, shape (B, G); 0 elsewhere.
        seen = np.zeros((len(block), tokenizer.vocab.n_genes), dtype=np.float32)
        seen[np.repeat(np.arange(len(block)), np.diff(visible.indptr)), visible.genes] = log1p_cp10k(visible)
        keys = cell_keys(block.rows, seed=seed, epoch=epoch, stream=_STREAM)
        times = diffusion_times(keys)
        lengths = (ids >= n_special).sum(axis=1)
        n_hidden = np.minimum((times * lengths).astype(np.int64) + 1, lengths)
        order = np.zeros(ids.shape, dtype=np.int64)
        states = np.zeros(ids.shape, dtype=np.int8)
        sizes = np.empty(len(ids), dtype=np.int64)
        _hide(ids, lengths, seen, keys, n_hidden, self.corrupt == "both", n_special, order, states, sizes)
        width = max(1, int(sizes.max(initial=0)))
        order, states = order[:, :width], states[:, :width]
        there = np.arange(width) < sizes[:, None]
        genes = np.where(there, np.take_along_axis(ids, order, axis=1), 0)
        rows = np.arange(len(ids))[:, None]
        shown = np.where(there, seen[rows, np.maximum(genes - n_special, 0)], 0).astype(np.float32)
        no_gene, no_value = there & (states & 1 > 0), there & (states & 2 > 0)
        arrays = {
            "input_ids": np.where(no_gene, mask_id, genes),
            "attention_mask": there,
            "values": np.where(no_value, np.float32(0), shown),
            "labels": np.where(no_gene, genes, IGNORE_LABEL),
            "value_labels": np.where(no_value, np.take_along_axis(values, order, axis=1), np.float32(0)),
            "masked_positions": no_gene,
            "masked_values": no_value,
            "loss_weights": np.ones(len(ids), dtype=np.float32),
        }
        batch = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        if not self.reconstruction_weight:
            return batch
        if (of_cells := self.batches_of(block)) is not None:
            batch["batch"] = of_cells
        return {**batch, **whole_profiles(block)}

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; log its parts, and the moments for counting active units."""
        tokens = {name: tensor for name, tensor in batch.items() if not name.startswith("profile_")}
        if self.reconstruction_weight:
            n_genes = cast(int, module.num_genes)
            tokens["target"] = dense_profiles(batch, n_genes)
        output = output_of(module, tokens)
        parts = output.losses
        if not parts or not {"identity", "value"} <= set(parts):
            raise TrainingError(
                f"{type(module).__name__} returned no losses for masked genes and values; create the model with "
                "denoising=True."
            )
        weights = {
            "identity": 1.0,
            "value": self.value_weight,
            "reconstruction": self.reconstruction_weight,
            "kl": self.beta,
        }
        loss = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
        figures = {name: part.detach() for name, part in parts.items()}
        return loss, figures | (mean_moments(output.embeddings) if self.reconstruction_weight else {})

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the means and the number of active units."""
        means = dict(means)
        units = active_units(means) if "latent_mean" in means else {}
        return {**super().summarize(means), **units}


def diffusion_times(keys: np.ndarray) -> np.ndarray:
    """Return the time of each cell of a batch, float64 in [0, 1), shape (B,).

    Times are stratified over the batch: ``(u + i / B) mod 1``, where i is the rank of the cell by its random key, and u
    is sampled once for the batch. Times therefore depend on the cells in a batch, but not on their order.

    Parameters
    ----------
    keys
        Random keys of the cells, uint64, shape (B,).
    """
    places = np.empty(len(keys), dtype=np.int64)
    places[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    of_batch = np.bitwise_xor.reduce(keys) if len(keys) else np.uint64(0)
    return (uniform(np.uint64(of_batch), np.uint64(0)) + places / max(1, len(keys))) % 1.0


@numba.njit(cache=True, nogil=True)
def _hide(ids, lengths, seen, keys, n_hidden, both, n_special, order, states, sizes):
    """Sample which part of each token is masked (1 the gene, 2 the value, 3 both), and the order of the tokens.

    Unmasked tokens come first, in their order, then masked tokens in random order, so positions are not informative.
    Genes that thinning removed are left out unless they are masked.
    """
    drawn = np.empty(ids.shape[1], dtype=np.int64)
    hidden = np.empty(ids.shape[1], dtype=np.int8)
    for cell in range(len(ids)):
        key, length, number = keys[cell], lengths[cell], n_hidden[cell]
        hidden[:length] = 0
        position = np.uint64(1)
        whole = 3
        if both:
            whole = 3 if uniform(key, position) < 0.5 else 2
            position += np.uint64(1)
        for kind in range(1 if both else 2):
            for i in range(length):
                drawn[i] = i
            for step in range(number):
                # The first steps of a Fisher-Yates shuffle: each set of tokens is equally likely.
                other = step + int(uniform(key, position) * (length - step))
                drawn[step], drawn[other] = drawn[other], drawn[step]
                position += np.uint64(1)
                hidden[drawn[step]] |= whole if both else 1 + kind
        size = 0
        for i in range(length):
            if hidden[i] == 0 and seen[cell, ids[cell, i] - n_special] > 0:
                order[cell, size] = i
                size += 1
        first = size
        for i in range(length):
            if hidden[i] > 0:
                # An insertion at a random place makes all orders equally likely.
                other = first + int(uniform(key, position) * (size - first + 1))
                position += np.uint64(1)
                order[cell, size] = order[cell, other]
                order[cell, other] = i
                size += 1
        for p in range(size):
            states[cell, p] = hidden[order[cell, p]]
        sizes[cell] = size
