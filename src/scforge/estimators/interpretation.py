"""What a front class says of genes: embedded, attended to, imputed, and perturbed in silico.

Shapes: N cells, G genes of the vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy import sparse

from scforge._checks import check_bool, check_count, check_seed
from scforge.errors import OptionError, warn
from scforge.estimators.choices import Source, column_genes, gene_numbers, ready, written_over_columns
from scforge.estimators.perturbing import PerturbationMethods
from scforge.insilico.attention import attention_between_genes
from scforge.insilico.gene_embeddings import contextual_gene_embeddings, input_gene_embeddings
from scforge.insilico.imputation import check_predicts, knows_zeros, predict_counted, predict_uncounted
from scforge.training.objectives.base import Objective

if TYPE_CHECKING:
    from scforge.estimators.base import CellModel

__all__ = ["InterpretationMethods"]


class InterpretationMethods(PerturbationMethods):
    """What a front class adds to :class:`~scforge.estimators.base.CellModel` for asking a model about genes."""

    def get_gene_embeddings(
        self,
        adata: Source | None = None,
        *,
        contextual: bool = False,
        layer: int = -1,
        max_cells: int = 10_000,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "X_scforge_genes",
    ) -> pd.DataFrame:
        """Return a vector for each gene that the model knows.

        Parameters
        ----------
        adata
            Cells whose genes are given vectors, and with `contextual` whose tokens these are means of; None for those
            of the training, if the model has them.
        contextual
            False: what the model embeds the token of a gene by. True: the mean state of this token over the cells in
            which it is one, after all layers.
        layer
            With `contextual`, the layer; -1 for the last.
        max_cells
            With `contextual`, cells to take, drawn at random.
        seed
            Seed of that draw.
        batch_size
            Cells a batch.
        key_added
            Key in ``adata.varm``; genes that the model does not know have NaN there. None writes nothing.

        Returns
        -------
        Float32, shape (G, H), index: the genes of the model. With `contextual` NaN for genes that no cell expresses.

        Raises
        ------
        OptionError
            If the architecture has no states of tokens, or an argument cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> vectors = model.get_gene_embeddings()
        >>> vectors.shape == (model.vocab.n_genes, 8)
        True
        >>> adata.varm["X_scforge_genes"].shape
        (300, 8)
        """
        model = cast("CellModel", self)
        check_count("max_cells", max_cells, "cells")
        check_count("batch_size", batch_size, "cells")
        has_cells = adata is not None or model.adata is not None or model._data is not None
        if check_bool("contextual", contextual):
            source = ready(model, adata, "gene embeddings are")
            some = model._open(source).sample(max_cells, seed=check_seed(seed))
            vectors, _ = contextual_gene_embeddings(
                model.backbone,
                some,
                model.tokenizer,
                objective=model.spec.build_objective(),
                batch_size=batch_size,
                layer=layer,
            )
        else:
            source = ready(model, adata, "gene embeddings are", needs_cells=has_cells)
            vectors = input_gene_embeddings(model.backbone, model.tokenizer)
        if key_added is not None and isinstance(source, AnnData):
            columns = column_genes(model, source)
            source.varm[key_added] = np.where((columns >= 0)[:, None], vectors[columns], np.float32(np.nan))
        return pd.DataFrame(vectors, index=pd.Index(model.vocab.genes, dtype=str))

    def get_attention(
        self,
        adata: Source | None = None,
        *,
        layer: int = -1,
        heads: str | int = "mean",
        top_k: int = 20,
        min_cells: int = 3,
        max_cells: int = 1000,
        max_genes: int = 5000,
        seed: int = 0,
        batch_size: int = 32,
        key_added: str | None = "scforge_attention",
    ) -> sparse.csr_matrix:
        """Return how much genes look at each other, as a sparse graph: a mean over cells.

        Attention is no causal network. It says what the model reads where it computes the state of a gene.

        Parameters
        ----------
        adata
            Cells; None for those of the training.
        layer
            Layer; -1 for the last.
        heads
            ``"mean"`` or ``"max"`` over the heads, or the number of one.
        top_k
            Genes to keep for each gene: those it looks at most.
        min_cells
            Cells in which two genes must both be tokens.
        max_cells
            Cells to take, drawn at random.
        max_genes
            Genes to take at most, the most widely expressed; memory grows with its square.
        seed
            Seed of the draw.
        batch_size
            Cells a batch; fewer where they have many tokens, since weights take the square of that.
        key_added
            Key in ``adata.varp`` for the same over ``adata.var_names``. None writes nothing.

        Returns
        -------
        Float32, shape (G, G), in the order of ``model.vocab.genes``: row i, column j is the attention of gene i to gene
        j, a mean over the cells in which both are tokens, without what genes pay to themselves.

        Raises
        ------
        OptionError
            If the architecture has no attention, or an argument cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2}
        >>> model = scforge.models.Encoder(adata, "transformer_encoder", **sizes)
        >>> model.train(1, progress_bar=False)
        >>> graph = model.get_attention(top_k=3)
        >>> graph.shape == (model.vocab.n_genes, model.vocab.n_genes)
        True
        >>> adata.varp["scforge_attention"].shape
        (300, 300)
        """
        model = cast("CellModel", self)
        counts = {"max_cells": max_cells, "batch_size": batch_size, "min_cells": min_cells}
        for name, value in counts.items():
            check_count(name, value, "cells")
        for name, value in {"top_k": top_k, "max_genes": max_genes}.items():
            check_count(name, value, "genes")
        source = ready(model, adata, "attention is")
        some = model._open(source).sample(max_cells, seed=check_seed(seed))
        graph = attention_between_genes(
            model.backbone,
            some,
            model.tokenizer,
            objective=model.spec.build_objective(),
            layer=layer,
            heads=heads,
            top_k=top_k,
            min_cells=min_cells,
            max_genes=max_genes,
            batch_size=batch_size,
        )
        if key_added is not None and isinstance(source, AnnData):
            source.varp[key_added] = written_over_columns(graph, column_genes(model, source), both=True)
        return graph

    def impute(
        self,
        adata: Source | None = None,
        *,
        genes: Sequence[str] | None = None,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "imputed",
    ) -> pd.DataFrame:
        """Predict the expression of genes where a cell has no counts of them, measured or not.

        For models of ``masked_value_prediction`` and ``masked_diffusion``. All counted genes of a cell are seen. Values
        are in the unit of those of the tokenizer: log1p CP10K for ``continuous_projection`` and ``rank_value``, counts
        with ``transform="counts"``, numbers of bins for ``binned_expression``.

        Parameters
        ----------
        adata
            Cells; None for those of the training.
        genes
            Genes to predict; None for all that the model knows.
        seed
            Seed of which genes are asked about together.
        batch_size
            Cells a batch.
        key_added
            Key in ``adata.layers``: the same over ``adata.var_names``, dense, NaN for genes that were not asked for or
            that the model does not know. None writes nothing.

        Returns
        -------
        Float32, shape (N, number of genes), counted genes with their value; four bytes a number.

        Raises
        ------
        OptionError
            If the model predicts no expression.
        GeneMismatchError
            If the model does not know a gene.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "expression_head": "value"}
        >>> objective = {"name": "masked_value_prediction", "zero_targets": 1.0}
        >>> model = scforge.models.Encoder(adata, "transformer_encoder", objective=objective, **sizes)
        >>> model.train(1, progress_bar=False)
        >>> model.impute(genes=["ISG15", "TNFRSF4"]).shape
        (60, 2)
        """
        model = cast("CellModel", self)
        source, objective = _predicting(model, adata, batch_size, seed)
        if not knows_zeros(objective, model.tokenizer):
            has_option = "zero_targets" in objective.option_names()
            advice = (
                "train with objective={'name': 'masked_value_prediction', 'zero_targets': 1.0} to tell both apart."
                if has_option
                else "get_normalized_expression, whose decoder learned from the zeros, too, tells both apart."
            )
            warn(
                f"the model never saw a gene that is off among those it predicted{' (zero_targets=0)' * has_option}, "
                f"so it predicts the value that a gene has where it is expressed; {advice}"
            )
        wanted = model.vocab.genes if genes is None else genes
        numbers = gene_numbers(model, wanted, source=source)
        values = predict_uncounted(
            model.backbone,
            model._open(source),
            model.tokenizer,
            objective,
            numbers,
            seed=seed,
            batch_size=batch_size,
        )
        index = pd.RangeIndex(len(values))
        if isinstance(source, AnnData):
            index = source.obs_names
            if key_added is not None:
                place = np.full(model.vocab.n_genes + 1, -1)  # the last one: columns without a gene
                place[numbers] = np.arange(len(numbers))
                columns = place[column_genes(model, source)]
                source.layers[key_added] = np.where(columns >= 0, values[:, columns], np.float32(np.nan))
        return pd.DataFrame(values, index=index, columns=model.vocab.decode(numbers + model.vocab.n_special))

    def denoise(
        self,
        adata: Source | None = None,
        *,
        n_folds: int = 5,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "denoised",
    ) -> sparse.csr_matrix:
        """Predict the expression of counted genes from the other genes of the cell.

        For models of ``masked_value_prediction`` and ``masked_diffusion``. The genes are dealt into folds; those of
        each are hidden in turn and predicted from the rest, so that no value is predicted from itself. Units are those
        of :meth:`impute`; bins that are quantiles of a cell are those of its visible genes.

        Parameters
        ----------
        adata
            Cells; None for those of the training.
        n_folds
            Number of folds.
        seed
            Seed of which genes are in which fold.
        batch_size
            Cells a batch.
        key_added
            Key in ``adata.layers``: the same over ``adata.var_names``. None writes nothing.

        Returns
        -------
        Float32, shape (N, G), in the order of ``model.vocab.genes``, with an entry for each count.

        Raises
        ------
        OptionError
            If the model predicts no expression, or an argument cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "expression_head": "value"}
        >>> model = scforge.models.Encoder(adata, "transformer_encoder", objective="masked_value_prediction", **sizes)
        >>> model.train(1, progress_bar=False)
        >>> denoised = model.denoise()
        >>> denoised.shape == (60, model.vocab.n_genes)
        True
        """
        model = cast("CellModel", self)
        check_count("n_folds", n_folds, "folds", least=2)
        source, objective = _predicting(model, adata, batch_size, seed)
        values = predict_counted(
            model.backbone,
            model._open(source),
            model.tokenizer,
            objective,
            n_folds=n_folds,
            seed=seed,
            batch_size=batch_size,
        )
        if key_added is not None and isinstance(source, AnnData):
            source.layers[key_added] = written_over_columns(values, column_genes(model, source), both=False)
        return values


def _predicting(model: CellModel, adata: Source | None, batch_size: int, seed: int) -> tuple[Source, Objective]:
    """Return cells, and the objective of a model that predicts expression."""
    check_count("batch_size", batch_size, "cells")
    check_seed(seed)
    source, objective = ready(model, adata, "what it predicts is"), model.spec.build_pretraining()
    check_predicts(objective)
    if model.backbone is not model.module:
        raise OptionError(
            "the model was fine-tuned, which what predicts its expression has not followed; call the model that it was "
            "made of."
        )
    return source, objective
