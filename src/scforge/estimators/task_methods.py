"""Fine-tuning, predicting and evaluating: what a front class adds to :class:`~scforge.estimators.base.CellModel`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from anndata import AnnData

from scforge._checks import check_bool, check_count, check_seed
from scforge._constants import QUERY_KEY, UNS_KEY
from scforge._registry import check_options
from scforge.data.cells import Cells
from scforge.data.vocab import GeneVocab
from scforge.errors import NotTrainedWarning, OptionError, first_line, warn
from scforge.estimators.adapter_files import AdapterMethods
from scforge.estimators.evaluating_subjects import OPTIONS, evaluate_models
from scforge.estimators.finetuning_run import finetune
from scforge.estimators.held_out import HeldOutMethods
from scforge.finetuning.base import EvaluationContext, Predictor, Task
from scforge.training.devices import is_sharded

if TYPE_CHECKING:
    from scforge.estimators.encoder import Encoder
    from scforge.eval.base import Entry
    from scforge.eval.report import Report
    from scforge.training.datamodule import CellDataModule

__all__ = ["TaskMethods"]

_NAME = "scforge"
_LEFT_OUT = ("self", "predictor", "adata", "key_added", "context")


class TaskMethods(HeldOutMethods, AdapterMethods):
    """Methods around tasks."""

    _base: Encoder | None = None

    def finetune(
        self: Any,
        task: str | Mapping[str, Any],
        adata: AnnData | str | os.PathLike[str] | None = None,
        *,
        labels_key: str | None = None,
        batch_key: str | None = None,
        validation_size: float = 0.1,
        test_size: float = 0.1,
        split_by: str | None = None,
        split_key: str | None = None,
        freeze: bool | int = False,
        lora: bool | Mapping[str, Any] = False,
        head: Mapping[str, Any] | None = None,
        max_epochs: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Encoder:
        """Train a copy of the model, with a head for a task.

        Parameters
        ----------
        task
            Name of a registered task (``scforge.finetuning.list_tasks()``), or a dict with ``name`` and its options.
        adata
            Cells to learn from, as for :meth:`get_latent_representation`; None for those of the training.
        labels_key, batch_key
            Columns of obs; None for those of ``setup_anndata``.
        validation_size, test_size
            Shares of the cells that choose the best epoch, and that the model never sees until :meth:`evaluate`.
        split_by
            Column of obs with groups, such as donors, that are held out as a whole; None splits by cell, each class
            keeping its share.
        split_key
            Column of obs that says ``"train"``, ``"validation"`` or ``"test"``, in place of a random split.
        freeze
            True trains the head alone, a number leaves the embeddings and so many layers as they are.
        lora
            True, or a dict of ``r``, ``alpha``, ``dropout``, ``targets`` and ``use_dora``: train low-rank adapters in
            place of the weights, see :func:`scforge.finetuning.lora_options`.
        head
            Options of the head, ``hidden_dim`` and ``dropout``.
        max_epochs
            Most epochs; None chooses by task and number of cells.
        seed
            Seed of split, head and order; None for that of the model.
        **options
            Options of the task, and of :meth:`train`, e.g. ``lr``, ``layer_lr_decay``, ``gradual_unfreezing``,
            ``precision``, ``checkpoint_dir``.

        Returns
        -------
        The fine-tuned model; this one stays as it is.

        Raises
        ------
        OptionError
            If an argument cannot be used.
        DataError
            If the columns cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> annotator.spec.tuning.task, model.spec.tuning is None
        ('annotation', True)
        """
        if not self.is_trained_:
            warn("The model is not trained; fine-tuning begins with random weights.", NotTrainedWarning)
        tuned = finetune(
            self,
            task,
            adata,
            labels_key=labels_key,
            batch_key=batch_key,
            validation_size=validation_size,
            test_size=test_size,
            split_by=split_by,
            split_key=split_key,
            freeze=freeze,
            lora=lora,
            head=head,
            seed=seed,
            options=options,
        )
        tuned.train(max_epochs, **options)
        return tuned

    def predict(
        self: Any,
        adata: AnnData | Cells | str | os.PathLike[str] | None = None,
        *,
        key_added: str | None = None,
        batch_size: int = 256,
        **options: Any,
    ) -> Any:
        """Predict with a fine-tuned model, and write the outcome into `adata`.

        Parameters
        ----------
        adata
            Cells, as for :meth:`get_latent_representation`; None for those of the fine-tuning.
        key_added
            Where to write, in place of the usual names.
        batch_size
            Cells a batch.
        **options
            Options of the task, e.g. ``threshold`` and ``majority_voting`` of ``"annotation"``.

        Returns
        -------
        What the task predicts, most often a data frame with one row a cell.

        Raises
        ------
        OptionError
            If the model was not fine-tuned, or an argument cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> list(annotator.predict(threshold=0.2))
        ['label', 'confidence', 'entropy']
        >>> bool(adata.obs["scforge_cell_type"].notna().all())
        True
        """
        task = self._task("predict")
        if key_added is None and self._obsm_key == QUERY_KEY:
            key_added = QUERY_KEY
        check_options("option of predict", self.spec.tuning.task, options, _options_of(task.predict))
        source = self._source(adata)
        predictor = self._predictor(self._open(source), batch_size)
        return task.predict(predictor, source if isinstance(source, AnnData) else None, key_added=key_added, **options)

    def evaluate(
        self: Any,
        adata: AnnData | Cells | str | os.PathLike[str] | None = None,
        *,
        benchmarks: Entry | Sequence[Entry] | None = None,
        baselines: bool | Sequence[int | str] = True,
        base: Encoder | None = None,
        key_added: str = "metrics",
        batch_size: int = 256,
        seed: int = 0,
        **options: Any,
    ) -> pd.DataFrame | Report:
        """Score the model beside baselines: the predictions of a fine-tuned one, or the embedding.

        Without `benchmarks` a fine-tuned model is scored by its task, beside baselines that learned from the same
        cells. With them, and of a model without a task, the embedding is scored, beside those of baselines on the same
        cells (:func:`~scforge.estimators.evaluate_embeddings`). ``gene_network`` scores the gene embeddings, and
        ``generation`` cells that the model generates.

        Parameters
        ----------
        adata
            Cells with the answer; None for those of the training, of a fine-tuned model those that the fine-tuning held
            out (``test_size``). Of the cells of the fine-tuning only these are scored, also where the cells are given.
        benchmarks
            Names (:func:`scforge.eval.list_benchmarks`), ``{name: {option: value}}`` or benchmarks that score the
            embedding. None scores the task; where there is none, ``cell_type_probe``, ``scib`` and ``geometry``.
        baselines
            Compute baselines; those of a task need the cells of the fine-tuning. For embeddings they may be named, e.g.
            ``["pca", "scvi"]``.
        base
            The model before fine-tuning, for the baseline of its frozen embedding; None takes the one that
            :meth:`finetune` was called on, where that is in memory.
        key_added
            Key in ``adata.uns["scforge"]`` for the table; further tables get ``<key_added>_<table>``.
        batch_size
            Cells a batch.
        seed
            Seed of what is random in baselines of a task.
        **options
            For benchmarks: ``labels_key``, ``batch_key``, ``groups_key``, ``seeds``, ``intervals``, ``untrained``,
            ``obsm_keys``, ``title`` and ``progress_bar``; ``network`` and ``gene_key`` for ``gene_network``
            (:func:`~scforge.estimators.evaluate_models`).

        Returns
        -------
        For a task one row a method, ``"scforge"`` first, one column a figure. For embeddings the
        :class:`~scforge.eval.Report`.

        Raises
        ------
        OptionError
            If there are no held-out cells, or an option is unknown.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> table = annotator.evaluate()
        >>> table.index[0], "accuracy" in table
        ('scforge', True)
        """
        if benchmarks is not None or self.spec.tuning is None:
            check_options("option of evaluate", "the embedding", options, OPTIONS)
            if seed != 0 or base is not None:
                given = f"seed={seed!r}" if seed != 0 else "base"
                raise OptionError(f"{given} is for the task of a fine-tuned model; give benchmarks seeds=(0, 1, 2).")
            source = self._source(adata)
            if not isinstance(source, AnnData):
                raise OptionError("adata must be an AnnData where an embedding is scored; read the cells first.")
            return evaluate_models(
                {_NAME: self},
                source,
                benchmarks=benchmarks,
                baselines=baselines,
                batch_size=batch_size,
                key_added=key_added,
                **options,
            )
        check_options("option of evaluate", f"the task {self.spec.tuning.task!r}", options, [])
        task = self._task("evaluate")
        task.check_evaluate()
        beside = check_bool("baselines", baselines)
        check_seed(seed)
        own = self.adata if self._data is None else self._data.cells
        source = self._source(adata)
        cells = self._open(source)
        rows, split = self._rows_to_score(cells, within=source is own)
        if split is not None:
            own = source  # the cells of the fine-tuning, maybe in another object
        elif own is not None and source is not own:
            split = self._known_split()
        base = self._base if base is None else base
        train = None
        if own is not None and split is not None:
            train = self._predictor(self._open(own), batch_size)
        elif beside:
            warn("The cells of the fine-tuning are not at hand, so there are no baselines; load the model with them.")
        # Baselines see all genes that the cells to score and those of the fine-tuning were opened over.
        genes = None if isinstance(source, AnnData | str | os.PathLike) else source.vocab
        whole = None if train is None else self._over_all_genes(own, genes)
        context = EvaluationContext(
            predictor=self._predictor(cells, batch_size),
            rows=rows,
            train=train,
            train_rows=None if split is None or train is None else split.train,
            base=None if base is None else base._predictor(base._open(source), batch_size),
            base_train=None if base is None or train is None else base._predictor(base._open(own), batch_size),
            cells=cells if whole is None else whole if source is own else self._over_all_genes(source, whole.vocab),
            train_cells=whole,
            baselines=beside and train is not None,
            seed=seed,
        )
        evaluated = task.evaluate(context)
        if isinstance(source, AnnData):
            tables = {f"{key_added}_{name}": table for name, table in evaluated.tables.items()}
            source.uns[UNS_KEY] = {**source.uns.get(UNS_KEY, {}), key_added: evaluated.metrics, **tables}
        return evaluated.metrics

    def _own_task(self) -> Task | None:
        """Return the task that the model predicts without fine-tuning, by heads of its architecture; None for none."""
        return None

    def _task(self: Any, method: str) -> Task:
        """Return the task, or raise if there is none."""
        if self.spec.tuning is None:
            raise OptionError(f'the model has no task, so it cannot {method}; call model.finetune("annotation") first.')
        if not self.is_trained_ and method != "finetune":
            warn("The model is not trained; its predictions are random.", NotTrainedWarning)
        task = self.spec.build_objective()
        assert isinstance(task, Task)
        return task

    def _predictor(self: Any, cells: Cells, batch_size: int) -> Predictor:
        check_count("batch_size", batch_size, "cells")
        return Predictor(self.module, self.tokenizer, self.spec.build_objective(), cells, batch_size)

    def _over_all_genes(self: Any, source: Any, vocab: GeneVocab | None) -> Cells:
        """Open cells over these genes (None: all of an AnnData, else those of the model), for baselines."""
        if vocab is not None:
            return self._open(source, vocab=vocab, min_overlap=0.0)
        return self._open(source, vocab=None) if isinstance(source, AnnData) else self._open(source)

    def _calibrate(self: Any, data: CellDataModule, *, after_failure: bool = False) -> None:
        """Let the task adapt its head to validation cells; after a failure, what fails here is no more than told."""
        if self.spec.tuning is None or not len(data.validation_rows) or not self.is_trained_:
            return
        if is_sharded(self.module):  # the first process alone has the whole model
            return
        task = self.spec.build_objective()
        task.bind(data.bound, data.train_rows)
        predictor = Predictor(self.module, self.tokenizer, task, data.bound)
        try:
            with torch.random.fork_rng(devices=[]):
                task.calibrate(predictor, data.validation_rows)
        except Exception as error:
            if not after_failure:
                raise
            said = f"the confidence of the model could not be calibrated: {first_line(error)}"
            warn(said)


def _options_of(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name not in _LEFT_OUT]
