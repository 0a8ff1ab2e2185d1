"""Benchmarks that run while a model is trained."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from scforge._checks import check_count
from scforge.errors import OptionError, ScforgeError, warn
from scforge.eval.base import Benchmark, Entry, ScoredCells
from scforge.eval.harness import embedding_evaluations
from scforge.training.datamodule import CellDataModule
from scforge.training.predict import embed


class BenchmarkCallback(Callback):
    """Score the embedding of held-out cells, or of other data sets, every few epochs.

    The scores are logged with the losses, in the history and the loggers, as ``<benchmark>_<metric>``. They are
    computed after validation and do not affect training, because the states of the random generators are restored. With
    several processes, one process computes the scores while the others wait.

    Parameters
    ----------
    benchmarks
        Benchmarks to run: registered names, benchmark objects, ``{name: {option: value}}`` where the options may also
        include ``dataset``, ``name`` and ``max_cells``, or :class:`Evaluation` objects.
    every_n_epochs
        Run the benchmarks every n epochs, and in the last epoch.
    datasets
        A mapping from data set name to path, for evaluations that refer to a data set by name.
    labels_key, batch_key
        Columns of ``obs`` for benchmarks without these options. If None, uses the columns of the data module.

    Raises
    ------
    OptionError
        If a benchmark, an option or a data set is unknown.
    MissingFileError
        If the file of a data set does not exist.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()
    >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
    >>> model = scforge.models.Encoder(adata)
    >>> callback = BenchmarkCallback(["cell_type_annotation"], every_n_epochs=5)
    >>> model.train(callbacks=[callback])  # doctest: +SKIP
    >>> model.history["cell_type_annotation_macro_f1"]  # doctest: +SKIP
    """

    def __init__(
        self,
        benchmarks: Entry | Sequence[Entry],
        *,
        every_n_epochs: int = 1,
        datasets: Mapping[str, Any] | None = None,
        labels_key: str | None = None,
        batch_key: str | None = None,
    ) -> None:
        check_count("every_n_epochs", every_n_epochs, "epochs")
        self.evaluations = embedding_evaluations(benchmarks, datasets or {})
        self.every_n_epochs = every_n_epochs
        self._keys = {"labels_key": labels_key, "batch_key": batch_key}
        self._runs: list[tuple[str, Benchmark, ScoredCells]] = []
        self._failed: set[str] = set()

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Open the data sets, create the benchmarks and check the options before training."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, CellDataModule):
            raise OptionError("BenchmarkCallback requires a CellDataModule; pass one to trainer.fit as datamodule.")
        if not len(data.validation_rows):
            raise OptionError("no cells are held out; set validation_size above 0, or remove the benchmarks.")
        keys = {name: key if key is not None else getattr(data, name) for name, key in self._keys.items()}
        opened: dict[tuple[Any, int | None], ScoredCells] = {}
        self._runs, self._failed = [], set()
        for evaluation in self.evaluations:
            benchmark = evaluation.made(keys)
            source = (evaluation.place, evaluation.max_cells)
            if source not in opened:
                opened[source] = (
                    ScoredCells.choose(data.bound, data.validation_rows, evaluation.max_cells)
                    if evaluation.held_out
                    else ScoredCells.open(evaluation.dataset, data.bound.vocab, evaluation.max_cells)
                )
            try:
                benchmark.check(opened[source].obs)
            except ScforgeError as error:
                where = "the held-out cells" if evaluation.held_out else f"the cells of {evaluation.place}"
                error.located(f"the benchmark {evaluation.name!r} cannot score {where}: ")
                raise
            self._runs.append((str(evaluation.name), benchmark, opened[source]))
        # Only the first process embeds cells, or all processes if the module is sharded.
        if not (trainer.is_global_zero or isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)):
            # Checked like everywhere, so that every process stops alike, but nothing more to do here.
            self._runs = []

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Pass the scores to the training plan, which logs them."""
        epoch = trainer.current_epoch + 1
        last = epoch == trainer.max_epochs or trainer.should_stop or trainer.global_step == trainer.max_steps
        if trainer.sanity_checking or not (last or epoch % self.every_n_epochs == 0):
            return
        figures: dict[str, float] = {}
        with isolate_rng():
            # A benchmark that draws from the global generators sees the same numbers each time, after a resume as well.
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            if self._runs:
                figures = self._figures(trainer, pl_module.module)
        # Every process logs the same scores; this is also where the others wait.
        pl_module.figures.update(trainer.strategy.broadcast(figures))

    def _figures(self, trainer: lightning.Trainer, module: nn.Module) -> dict[str, float]:
        data: CellDataModule = trainer.datamodule
        assert data.tokenizer is not None
        figures: dict[str, float] = {}
        embeddings: dict[int, np.ndarray] = {}
        for name, benchmark, scored in self._runs:
            scores = dict.fromkeys(benchmark.metrics, math.nan)
            try:
                if id(scored) not in embeddings:
                    options: dict[str, Any] = {"rows": scored.rows, "objective": data.objective}
                    embeddings[id(scored)] = embed(module, scored.cells, data.tokenizer, **options)
                if trainer.is_global_zero:
                    scores |= benchmark.run(embeddings[id(scored)], scored.obs)
            except ScforgeError as error:
                if name not in self._failed:  # once a training
                    self._failed.add(name)
                    warn(f"the benchmark {name!r} failed during training, so its scores are NaN: {error}")
            figures |= {f"{name}_{metric}": float(score) for metric, score in scores.items()}
        return figures
