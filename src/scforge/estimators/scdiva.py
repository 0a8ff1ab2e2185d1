"""The ScDiVa model class: latent posteriors, decoded expression and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from torch import nn

from scforge._checks import check_bool, check_key, check_known, check_positive
from scforge._constants import AUTO_KEY, TARGET_SUM
from scforge._registry import check_options
from scforge.errors import NotTrainedWarning, OptionError, warn
from scforge.estimators.encoder import Encoder, positions
from scforge.estimators.genes import expression_table, gene_numbers
from scforge.estimators.setup import ready_cells, write_embedding
from scforge.estimators.tasks import options_of
from scforge.finetuning.base import Predictor
from scforge.finetuning.mapping import FineTunedModule, QueryMapping
from scforge.finetuning.tasks.annotation import Annotation
from scforge.training.objectives.base import OBJECTIVES
from scforge.training.predict import run_over

if TYPE_CHECKING:
    from scforge.estimators.setup import Source
    from scforge.finetuning.base import Task
    from scforge.training.objectives.base import Objective

_ARCHITECTURE = "scdiva"

_EXPRESSION = "scforge_normalized"

_UNCERTAINTY = "scforge_uncertainty"


def batch_numbers(objective: Objective, transform_batch: str | Sequence[str] | None) -> list[int] | None:
    """Return the codes of named batches, or None if `transform_batch` is None."""
    if transform_batch is None:
        return None
    known = getattr(objective, "batches", None) or []
    names = [transform_batch] if pd.api.types.is_scalar(transform_batch) else list(transform_batch)
    if not names:
        raise OptionError(
            "contains no batch; pass the name of a batch, or None for all batches.", transform_batch=transform_batch
        )
    fix = "" if known else "call setup_anndata(adata, batch_key=...) before creating the model"
    for name in names:
        check_known("transform_batch", str(name), known, "the model", fix=fix, error=OptionError)
    return [known.index(str(name)) for name in names]


class _OwnHead(nn.Module):
    """Wrapper of an architecture's uncalibrated annotation head, with the interface of a fine-tuned module."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.classify = encoder.classify
        self.temperature = torch.tensor(1.0)

    def forward(self, embeddings: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return class logits, shape (B, T)."""
        return self.classify(embeddings)


class ScDiVa(Encoder):
    """Embed cells as distributions, annotate them, and correct batch effects in expression, with one transformer.

    This is the model class for :class:`~scforge.models.ScDiVaModel`. It has all methods of
    :class:`~scforge.models.Encoder`, and additional methods of a variational model. The embedding of a cell is the mean
    of its posterior.

    Parameters
    ----------
    adata
        AnnData that :meth:`setup_anndata` was called on. The decoder is conditioned on its ``batch_key``, so that
        expression can be predicted as if all cells were from one batch.
    architecture
        ``"scdiva"``.
    tokenizer
        See :class:`~scforge.models.Encoder`. If None, genes are ordered by value and entropy (``"entropy_ranked"``).
    objective
        Name of the objective, or a dict with ``name`` and options, e.g. ``beta``. ``"variational"`` (used if None)
        trains reconstruction and, if `supervised`, classification. ``"masked_diffusion"`` predicts masked genes and
        values, so the model can :meth:`generate` and :meth:`impute`.
    supervised
        Whether to learn the labels of ``labels_key`` in addition to the reconstruction, for
        ``predict(task="annotation")`` without fine-tuning. The embedding then contains label information.
    **options
        Other arguments of :class:`~scforge.models.Encoder`, e.g. ``vocab``, ``n_top_genes`` and ``seed``, and options
        of the architecture, e.g. ``mode="vector"``, ``latent_dim`` or ``max_tokens``.

    Raises
    ------
    OptionError
        If `supervised` is true but there are no labels, or an option is invalid.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()
    >>> scforge.models.ScDiVa.setup_anndata(adata, labels_key="cell_type")
    >>> small = {"n_top_genes": 500, "hidden_dim": 16, "num_layers": 1, "num_heads": 2, "latent_dim": 4}
    >>> model = scforge.models.ScDiVa(adata, supervised=True, **small)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> mean, variance = model.get_latent_representation(return_dist=True)
    >>> mean.shape, variance.shape
    ((2700, 4), (2700, 4))
    >>> list(model.predict(adata))
    ['label', 'confidence', 'entropy']
    >>> model.get_normalized_expression(gene_list=["LYZ", "CD74"]).shape
    (2700, 2)

    Notes
    -----
    The confidence of labels predicted without fine-tuning is not calibrated; ``finetune("annotation")`` calibrates it.
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        architecture: str | None = _ARCHITECTURE,
        tokenizer: str | dict[str, Any] | None = None,
        objective: str | dict[str, Any] | None = None,
        *,
        supervised: bool = False,
        **options: Any,
    ) -> None:
        if architecture not in (None, _ARCHITECTURE):
            raise OptionError("does not work with ScDiVa; omit it, or use Encoder.", architecture=architecture)
        self._supervised = check_bool("supervised", supervised)  # read when the objective is created
        super().__init__(adata, _ARCHITECTURE, tokenizer, objective, **options)

    def get_latent_representation(  # type: ignore[override]  # a pair with return_dist
        self,
        adata: Source | None = None,
        *,
        key_added: str | None = AUTO_KEY,
        batch_size: int = 256,
        indices: Sequence[int] | np.ndarray | None = None,
        correction: float = 0.0,
        return_dist: bool = False,
        uncertainty_key: str | None = _UNCERTAINTY,
        **of_others: Any,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Embed cells as the means of their posteriors, and write the embedding into ``adata.obsm``.

        Parameters
        ----------
        adata, key_added, batch_size, indices, correction, **of_others
            See :meth:`Encoder.get_latent_representation`.
        return_dist
            Whether to also return the variances, and write `uncertainty_key`. Variances cannot be corrected, so this
            requires ``correction=0``.
        uncertainty_key
            With `return_dist`, the obs column for the mean variance of each cell (float32). A value near 1, the
            variance of the prior, means that the cell was uninformative. Use it to compare cells with one model, not to
            compare models. If None, nothing is written.

        Returns
        -------
        The means in the order of ``adata.obs_names``, float32, shape (n_obs, latent_dim); with `return_dist`, the means
        and the variances.

        Raises
        ------
        OptionError
            If variances are requested from a model that was not trained to predict them, or together with `correction`.
        GeneMismatchError
            If `adata` contains too few genes of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.ScDiVa.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "latent_dim": 4}
        >>> model = scforge.models.ScDiVa(adata, **sizes)
        >>> model.train(1, progress_bar=False)
        >>> mean, variance = model.get_latent_representation(return_dist=True)
        >>> mean.shape, variance.shape, "scforge_uncertainty" in adata.obs
        ((60, 4), (60, 4), True)
        """
        check_key("key_added", key_added)
        if of_others or not check_bool("return_dist", return_dist):
            if self.spec.tuning is None and not self._trains_latent:
                warn(
                    f"the objective {self.spec.objective!r} does not train the latent space, so the embedding is "
                    "random.",
                    NotTrainedWarning,
                )
            how: dict[str, Any] = {"key_added": key_added, "batch_size": batch_size, "indices": indices}
            how["correction"] = correction
            return super().get_latent_representation(adata, **how, **of_others)  # raises if there are of_others
        if correction:
            raise OptionError(
                "cannot be combined with return_dist=True, because variances are not corrected; omit one of the two.",
                correction=correction,
            )
        self._check_variational()
        source, cells = ready_cells(self, adata, "its embedding is")
        module: Any = self.fitted.backbone
        head = getattr(self.module, "head", None)
        mapping = head if isinstance(head, QueryMapping) else None

        def posterior(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            found = module.infer(**(batch if mapping is None else mapping.scaled(batch)))
            return torch.cat([found["mu"].float(), found["logvar"].float().exp()], dim=1)

        both = run_over(module, cells, self.tokenizer, posterior, objective=self.objective, batch_size=batch_size)
        mean, variance = (np.ascontiguousarray(half) for half in np.split(both, 2, axis=1))
        if mapping is not None:
            mean = mapping.move(torch.from_numpy(mean).to(mapping.center)).cpu().numpy()
        if indices is not None:
            rows = positions(indices, len(mean))
            return mean[rows], variance[rows]
        if isinstance(source, AnnData):
            if key_added is not None:
                write_embedding(self.fitted, source, key_added, mean, cells)
            if uncertainty_key is not None:
                source.obs[uncertainty_key] = variance.mean(axis=1)
        return mean, variance

    def predict(
        self,
        adata: Source | None = None,
        *,
        task: str | None = None,
        key_added: str | None = None,
        batch_size: int = 256,
        **options: Any,
    ) -> pd.DataFrame | AnnData:
        """Predict with the heads of the model, or with the task head after fine-tuning.

        Parameters
        ----------
        adata
            Cells, see :meth:`get_latent_representation`.
        task
            ``"annotation"`` predicts the labels that the model learned (`supervised`), and writes them like the
            annotation task. ``"batch_integration"`` returns expression without batch effects, see
            :meth:`get_normalized_expression`. If None, uses annotation, or the task of a fine-tuned model.
        key_added, batch_size
            See :meth:`Encoder.predict`.
        **options
            For annotation, e.g. ``threshold`` and ``majority_voting``. For batch_integration, ``transform_batch``,
            ``gene_list`` and ``library_size``.

        Returns
        -------
        A data frame with one row per cell.

        Raises
        ------
        OptionError
            If the model learned no labels and was not fine-tuned, or an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.ScDiVa.setup_anndata(adata, labels_key="cell_type")
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "latent_dim": 4}
        >>> model = scforge.models.ScDiVa(adata, supervised=True, **sizes)
        >>> model.train(1, progress_bar=False)
        >>> model.predict()["label"].nunique() >= 1, "scforge_cell_type" in adata.obs
        (True, True)
        """
        check_key("key_added", key_added)
        tuning = self.spec.tuning
        if task == "batch_integration":
            known = ["transform_batch", "gene_list", "library_size"]
            check_options("option of predict", task, options, known)
            key = _EXPRESSION if key_added is None else key_added
            return self.get_normalized_expression(adata, key_added=key, batch_size=batch_size, **options)
        if tuning is not None:
            if task not in (None, tuning.task):
                raise OptionError(f", but the model was fine-tuned for {tuning.task!r}; omit task.", task=task)
            return super().predict(adata, key_added=key_added, batch_size=batch_size, **options)
        if task not in (None, "annotation"):
            raise OptionError("is unknown; choose 'annotation' or 'batch_integration'.", task=task)
        own_task = self.own_task
        if own_task is None:
            raise OptionError(
                "the model learned no labels to predict; create the model with supervised=True, or fine-tune the model."
            )
        check_options("option of predict", "annotation", options, options_of(own_task.predict))
        source, cells = ready_cells(self, adata, "its predictions are")
        classifier = FineTunedModule(self.fitted.backbone, _OwnHead(self.fitted.backbone))
        predictor = Predictor(classifier, self.tokenizer, self.fitted.pretraining, cells, batch_size)
        adata = source if isinstance(source, AnnData) else None
        return own_task.predict(predictor, adata, key_added=key_added, **options)

    def get_normalized_expression(
        self,
        adata: Source | None = None,
        *,
        transform_batch: str | Sequence[str] | None = None,
        gene_list: Sequence[str] | None = None,
        library_size: float | str = "log1p",
        key_added: str | None = _EXPRESSION,
        batch_size: int = 256,
    ) -> pd.DataFrame:
        """Return the expression of each cell, decoded from its embedding.

        The expression contains no counting noise and, if the model was created with a ``batch_key``, no batch effects.

        Parameters
        ----------
        adata
            Cells, see :meth:`get_latent_representation`.
        transform_batch
            The batch for which all cells are decoded, or several batches to average over. If None, averages over all
            batches of the model.
        gene_list
            Genes to return. If None, returns all genes of the model.
        library_size
            ``"log1p"`` returns log1p of counts per 10,000. If a number, returns counts per this number, without
            logarithm.
        key_added
            Key in ``adata.layers`` under which to store the values, aligned to ``adata.var_names``, as a dense array
            with NaN for genes that are not in `gene_list` or not in the model. If None, nothing is written.
        batch_size
            Number of cells per batch.

        Returns
        -------
        A data frame of nonnegative values, float32, shape (N, number of genes), which requires four bytes per value.

        Raises
        ------
        OptionError
            If the decoder was not trained, a batch is unknown, or an argument is invalid.
        GeneMismatchError
            If a gene is not in the vocabulary of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.ScDiVa.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "latent_dim": 4}
        >>> model = scforge.models.ScDiVa(adata, **sizes)
        >>> model.train(1, progress_bar=False)
        >>> model.get_normalized_expression(gene_list=["ISG15", "TNFRSF4"]).shape
        (60, 2)
        """
        check_key("key_added", key_added)
        if not getattr(self.fitted.pretraining, "reconstruction_weight", 0.0):
            raise OptionError(
                f"the objective {self.spec.objective!r} does not train a decoder; create the model with a positive "
                "reconstruction_weight."
            )
        self._check_follows("predicted expression")
        scale = None
        if library_size != "log1p":
            scale = check_positive("library_size", library_size, hint="pass e.g. 1e4, or 'log1p'") / TARGET_SUM
        numbers = gene_numbers(self, self.vocab.genes if gene_list is None else gene_list, source=adata)
        batches = batch_numbers(self.fitted.pretraining, transform_batch)
        source, cells = ready_cells(self, adata, "the expression that it decodes is")
        module: Any = self.fitted.backbone
        columns = torch.from_numpy(numbers.astype(np.int64)).to(self.device)

        def decoded(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            latent = module.infer(**batch)["mu"]
            if batches is None:
                values = module.decode(latent)
            else:
                codes = (torch.full((len(latent),), number, device=latent.device) for number in batches)
                values = torch.stack([module.decode(latent, of_cells) for of_cells in codes]).mean(dim=0)
            values = values.float()[:, columns].clamp(min=0)
            return values if scale is None else values.expm1() * scale

        values = run_over(module, cells, self.tokenizer, decoded, objective=self.objective, batch_size=batch_size)
        return expression_table(self, source, cells, values, numbers, key_added)

    @property
    def own_task(self) -> Task | None:
        """The annotation task if the model learned labels in pretraining, or None."""
        objective: Any = self.fitted.pretraining
        key, classes = getattr(objective, "labels_key", None), getattr(objective, "labels", None)
        if self.spec.tuning is not None or key is None or not classes:
            return None
        return Annotation(labels_key=key, classes=classes) if getattr(objective, "classification_weight", 0.0) else None

    @property
    def _trains_latent(self) -> bool:
        """Whether pretraining trains the latent space; masked diffusion does so only with a reconstruction term."""
        objective = self.fitted.pretraining
        return bool(getattr(objective, "reconstruction_weight", 1.0)) or not objective.denoises_values

    def _check_variational(self) -> None:
        """Raise an :class:`~scforge.errors.OptionError` if the variances of the model were not trained."""
        trained = (
            self.spec.model_options["variational"] and hasattr(self.fitted.pretraining, "beta") and self._trains_latent
        )
        if not trained:
            raise OptionError(
                f", but {self.spec.objective!r} does not train variances in this model; omit return_dist.",
                return_dist=True,
            )
        self._check_follows("return_dist=True")

    def _check_follows(self, what: str) -> None:
        """Raise an OptionError if fine-tuning did not also train all heads of the architecture."""
        tuning = self.spec.tuning
        if tuning is not None and tuning.task != "adaptation":
            raise OptionError(
                f"{what} is not available, because the model was fine-tuned for {tuning.task!r} without its decoder; "
                "use its base model."
            )

    def _with_found_options(self, objective: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Add the ``labels_key`` of the setup if supervised, and the options derived from the cells."""
        if self._supervised:
            if "labels_key" not in OBJECTIVES.get(objective).option_names():
                raise OptionError(
                    f", but the objective {objective!r} does not learn labels; change one of the two.", supervised=True
                )
            options = {"labels_key": self.registry_["setup_args"].get("labels_key"), **options}
            if options["labels_key"] is None:
                raise OptionError("requires labels; call setup_anndata with labels_key.", supervised=True)
        return super()._with_found_options(objective, options)
