"""The front class for every registered architecture: AnnData in, AnnData out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning
import torch

from scforge._checks import check_seed
from scforge._constants import QUERY_KEY
from scforge._registry import check_options
from scforge.data.cells import column_of
from scforge.data.vocab import GeneVocab, listed_names
from scforge.errors import OptionError, warn
from scforge.estimators.base import FROM_DATA, CellModel
from scforge.estimators.defaults import recipe_for
from scforge.estimators.foreign_methods import ForeignMethods
from scforge.estimators.generation import GenerationMethods
from scforge.estimators.interpretation import InterpretationMethods
from scforge.estimators.reference import ReferenceMethods
from scforge.estimators.sharing import SharingMethods
from scforge.estimators.spec import ModelSpec, named_options
from scforge.estimators.task_methods import TaskMethods
from scforge.estimators.training_run import run_training
from scforge.estimators.tuning import Tuning
from scforge.estimators.vocabulary import n_top_genes_of, needed_statistics, vocab_of_adata, vocab_of_cells
from scforge.models.components.gene_vectors import check_filled
from scforge.tokenizers.base import TOKENIZERS, Tokenizer
from scforge.training.checkpoint import SavingError
from scforge.training.datamodule import CellDataModule
from scforge.training.objectives.base import OBJECTIVES, Objective, get_objective
from scforge.training.plan import NotFiniteError, TrainingPlan

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["Encoder"]

_OF_DATA_AND_PLAN = (
    *("datamodule", "max_tokens_per_batch", "validation_size", "num_threads"),
    *("optimizer", "lr", "weight_decay", "schedule", "warmup_steps", "layer_lr_decay"),
)
"""Arguments of ``train`` that are used up when batches and the plan are made."""

_OF_OTHERS = {
    "plan_kwargs": "pass its options, e.g. lr=1e-3, to train itself",
    "use_gpu": "pass accelerator='gpu' or accelerator='cpu'",
    "learning_rate": "pass lr",
    "train_size": "pass validation_size=1 - train_size",
    "seed": "it is that of the model, Encoder(adata, seed=...)",
    "datasplitter_kwargs": "pass validation_size, or datamodule=CellDataModule(...)",
    "shuffle": "cells come in a new order in each epoch, leave it out",
    "shuffle_set_split": "cells are held out at random, by the seed of the model; leave it out",
    "enable_checkpointing": "pass checkpoint_dir=FOLDER to save states and the best epochs",
    "use_distributed_sampler": "each process reads cells of its own anyway, leave it out",
    "num_sanity_val_steps": "there are none, leave it out",
}
"""Arguments that users of scvi-tools, and of Lightning, try, and what to do here."""


class Encoder(
    TaskMethods, ReferenceMethods, InterpretationMethods, GenerationMethods, SharingMethods, ForeignMethods, CellModel
):
    """Train an architecture on single cells and embed cells with it.

    Parameters
    ----------
    adata
        AnnData that :meth:`setup_anndata` was called on.
    architecture
        Name of a registered architecture (``scforge.models.list_models()``). None takes the light encoder:
        ``gene_pooling`` over 2,000 highly variable genes with the ``neighbor_denoising`` objective, which on data of a
        laptop's size is better and much faster than a transformer trained from scratch, and integrates the batches of
        ``setup_anndata(batch_key=...)``.
    tokenizer
        Name of a registered tokenizer, or a dict with ``name`` and its options. None takes what suits the
        architecture (``rank_value`` for a transformer). Special tokens that it needs are added to the vocabulary; gene
        vectors that it brings (``gene_embedding``) become the gene embedding of the module.
    objective
        Name of a registered objective, or a dict with ``name`` and its options. None takes what suits the
        architecture (``masked_gene_prediction`` for a transformer).
    vocab
        Genes the model knows: ``"from_data"`` (genes detected in at least 3 cells), the name of a shipped vocabulary
        such as ``"human_protein_coding"``, or a :class:`scforge.data.GeneVocab`.
    n_top_genes
        Keep only this many highly variable genes of them; 0 keeps all. None takes what suits the architecture, save
        that of a list of genes (``GeneVocab.from_genes``) all are kept.
    keep_genes
        Names of genes that are among them however they vary, e.g. ``["GCG", "INS"]``; they count among `n_top_genes`.
    seed
        Seed of weights, splits, orders, masks and views.
    registry
        Registry of a saved model, in place of `adata`; used by :meth:`load`.
    datamodule
        A :class:`scforge.training.CellDataModule`, in place of `adata`: a model of cells that stay on disk. Its
        vocabulary is the default; genes are chosen from a sample of 100,000 training cells.
    tuning
        What the model is fine-tuned for; used by :meth:`finetune` and :meth:`load`.
    **options
        Options of the architecture, e.g. ``hidden_dim``.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()
    >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
    >>> model = scforge.models.Encoder(adata)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> model.get_latent_representation().shape
    (2700, 32)
    >>> adata.obsm["X_scforge"].shape
    (2700, 32)

    Notes
    -----
    The data are read by gene name each time, so that new data may have other genes in another order. What the model
    was built with (vocabulary, tokenizer, highly variable genes, medians, entropies) is never computed again.
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        architecture: str | None = None,
        tokenizer: str | dict[str, Any] | None = None,
        objective: str | dict[str, Any] | None = None,
        *,
        vocab: str | GeneVocab = FROM_DATA,
        n_top_genes: int | None = None,
        keep_genes: Sequence[str] = (),
        seed: int = 0,
        registry: dict[str, Any] | None = None,
        datamodule: CellDataModule | None = None,
        tuning: Tuning | None = None,
        **options: Any,
    ) -> None:
        super().__init__(adata, registry=registry, datamodule=datamodule)
        self.seed = check_seed(seed)
        if isinstance(tokenizer, Tokenizer):
            raise OptionError(_parts_of(tokenizer))
        recipe = recipe_for(architecture, options)
        names = named_options("tokenizer", tokenizer, recipe.tokenizer)
        self._spec, vectors = ModelSpec.resolve(
            recipe,
            self._choose_vocab(
                vocab,
                n_top_genes_of(vocab, recipe.n_top_genes) if n_top_genes is None else n_top_genes or None,
                needed=needed_statistics(*names),
                keep_genes=listed_names("keep_genes", keep_genes),
            ),
            tokenizer=names,
            objective=self._with_found_options(*named_options("objective", objective, recipe.objective)),
            options=options,
        )
        if tuning is not None:
            self._spec = replace(self._spec, tuning=tuning)
        self._tokenizer = self._spec.build_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.module = self._spec.build_module(vectors).eval()
        self.init_params_ = self._get_init_params(locals())

    def train(
        self,
        max_epochs: int | None = None,
        *,
        datamodule: CellDataModule | None = None,
        batch_size: int | str | None = None,
        max_tokens_per_batch: int | None = None,
        optimizer: str = "adamw",
        lr: float | None = None,
        weight_decay: float | None = None,
        schedule: str | None = None,
        warmup_steps: int | None = None,
        max_steps: int = -1,
        validation_size: float | None = None,
        early_stopping: bool = True,
        early_stopping_patience: int = 10,
        accelerator: str = "auto",
        devices: int | str | list[int] = 1,
        strategy: str = "auto",
        num_nodes: int = 1,
        precision: str | None = None,
        gradient_clip_val: float = 1.0,
        accumulate_grad_batches: int = 1,
        gradient_checkpointing: bool | None = None,
        layer_lr_decay: float | None = None,
        gradual_unfreezing: int | None = None,
        compile: bool = False,
        ema_decay: float | None = None,
        num_threads: int | None = None,
        progress_bar: bool = True,
        logger: Any = None,
        log_every_n_steps: int = 10,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every_n_steps: int | None = None,
        keep_last: int = 1,
        save_top_k: int = 1,
        resume: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        callbacks: Sequence[Any] = (),
        **trainer_options: Any,
    ) -> None:
        """Train, or train on: a second call continues from the weights of the first.

        The module ends with the weights of the epoch of this call with the lowest validation loss. Ctrl-C stops after
        the current step and keeps the best weights so far; a second one also interrupts what calls this method.

        Parameters
        ----------
        max_epochs
            Most epochs; None chooses by objective and number of cells.
        datamodule
            Cells to train on in place of those that the model was made with; it brings what says how batches are made
            (`batch_size`, `max_tokens_per_batch`, `validation_size`, `num_threads`).
        batch_size
            Cells a step and process; ``"auto"`` takes the most that fit into memory.
        max_tokens_per_batch
            A batch holds as many cells of like length as fit into so many tokens, padding included.
        optimizer
            ``"adamw"``, ``"adam"``, ``"sgd"``, or ``"muon"`` for the matrices of the hidden layers (AdamW for the
            rest).
        lr, weight_decay, schedule
            None takes the objective's defaults, as for `batch_size`. `schedule` is one of ``"cosine_warmup"``,
            ``"cosine"``, ``"linear_warmup"``, ``"linear"``, ``"one_cycle"``, ``"constant"``.
        warmup_steps
            Steps until the peak of the learning rate; None takes a share of all steps.
        max_steps
            Most optimizer steps; -1 for no limit.
        validation_size
            Share of cells held out, drawn with the model's seed, so the same cells in every call; None holds out 0.1.
        early_stopping, early_stopping_patience
            Stop when the validation loss has not improved for so many epochs after the warm-up of the learning rate.
        accelerator, devices, num_nodes
            As in :class:`lightning.Trainer`.
        strategy
            ``"ddp"`` (a whole model in each process), ``"fsdp"`` (a share of it), or ``"auto"`` (DDP for several).
        precision
            As in :class:`lightning.Trainer`, or ``"auto"``: 16-bit brain floats where a short measurement shows that
            they are faster. None computes in 32 bits. Query models need 32-bit weights: no ``"bf16-true"``.
        gradient_clip_val
            Largest norm of the gradient; 0 does not clip.
        accumulate_grad_batches
            Batches whose gradients are averaged for a step.
        gradient_checkpointing
            Compute activations again in the backward pass, which takes less memory and more time; None does as the
            model was made.
        layer_lr_decay
            Learning rate of a layer over that of the layer above it, e.g. 0.8; None trains all alike.
        gradual_unfreezing
            Train the top layer first, and one more below it every so many epochs; None trains all from the start.
        compile
            Compile the layers with torch.compile.
        ema_decay
            Validate and keep an exponential moving average of the weights, e.g. 0.999; None does not.
        num_threads
            Threads that prepare batches while the model computes; 0 for none, None chooses.
        progress_bar
            Show a bar (in a log file: a line an epoch).
        logger
            Lightning loggers, e.g. of :func:`scforge.training.make_loggers`; None for none.
        log_every_n_steps
            Steps between two rows of the loggers.
        checkpoint_dir
            Folder for states to go on with (``step=NNNNNNNN``) and for the best epochs (``epoch=NN``); all are model
            folders. States are saved at the end of each epoch, and when the process is asked to end (SIGTERM).
        checkpoint_every_n_steps
            Save a state after so many steps, too.
        keep_last, save_top_k
            How many states, and how many of the best epochs to keep there; ``save_top_k=-1`` keeps all.
        resume
            ``"auto"`` goes on with the last state in `checkpoint_dir`, if there is one, or the folder of a state. The
            model has to be made as before; the outcome is that of a training that was never interrupted.
        overwrite
            Replace what another training has left in `checkpoint_dir`.
        callbacks
            Further Lightning callbacks, e.g. :class:`scforge.eval.BenchmarkCallback`.
        **trainer_options
            Further options of :class:`lightning.Trainer`.

        Raises
        ------
        OptionError
            If an argument cannot be used, or a training is not the one to go on with.
        TrainingError
            If the loss is not a number, or a state cannot be saved (the model has the best weights so far then), or
            memory runs out.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, batch_size=16, progress_bar=False)
        >>> model.n_epochs_, len(model.history_["validation_loss"])
        (1, 1)
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "trainer_options")}
        if "enable_progress_bar" in trainer_options:  # as scvi-tools and its autotune call it
            given["progress_bar"] = trainer_options.pop("enable_progress_bar")
        unknown = set(trainer_options) - (set(inspect.signature(lightning.Trainer).parameters) - set(_OF_OTHERS))
        own = [name for name in inspect.signature(Encoder.train).parameters if name not in ("self", "trainer_options")]
        check_options("training option", "train", sorted(unknown), own, _OF_OTHERS)
        check_filled(self.module)
        objective = self._spec.build_objective()
        if isinstance(batch_size, str) and batch_size != "auto":
            raise OptionError(f"batch_size={batch_size!r} is neither a number of cells nor 'auto'.")
        data = self._training_data(
            datamodule,
            objective,
            validation_size=validation_size,
            batch_size=None if batch_size == "auto" else batch_size,
            max_tokens_per_batch=max_tokens_per_batch,
            num_threads=num_threads,
        )
        plan = TrainingPlan(
            self.module,
            objective,
            optimizer=optimizer,
            lr=lr,
            weight_decay=weight_decay,
            schedule=schedule,
            warmup_steps=warmup_steps,
            layer_lr_decay=layer_lr_decay,
        )
        of_run = {name: value for name, value in given.items() if name not in _OF_DATA_AND_PLAN}
        try:
            run_training(self, data, plan, **of_run, **trainer_options)
        except (NotFiniteError, SavingError):
            self._calibrate(data, after_failure=True)  # for the best weights so far, which the model is left with
            raise
        self._calibrate(data)
        if self._obsm_key == QUERY_KEY:
            warn(
                f"The encoder was trained on the query, so its embedding (obsm[{QUERY_KEY!r}]) is not comparable with "
                "the one that the reference model wrote; embed the reference again with this model: "
                "query_model.get_latent_representation(reference)."
            )

    def _choose_vocab(self, vocab: str | GeneVocab, n_top_genes: int | None, **options: Any) -> GeneVocab:
        if self._data is not None:
            return vocab_of_cells(self._data, vocab, n_top_genes, **options)
        if self.adata is not None:
            return vocab_of_adata(self.adata, self._setup, vocab, n_top_genes, **options)
        if not isinstance(vocab, GeneVocab):
            raise OptionError(f"vocab={vocab!r} needs adata; pass a GeneVocab.")
        return vocab

    def _with_found_options(self, objective: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Add the options of an objective that are found in the cells of the model."""

        def column(key: str) -> pd.Series:
            if self._data is not None:
                return self._data.cells.column(key)
            if self.adata is None:
                raise OptionError(
                    f"the objective learns from the column {key!r} of obs, so it needs adata; pass it, or name the "
                    "classes among the options of the objective."
                )
            return column_of(self.adata.obs, key)

        options = self._batches_of_setup(objective) | options
        return objective, options | get_objective(objective, **options).options_from(column)

    def _batches_of_setup(self, objective: str) -> dict[str, Any]:
        """Return the option `batch_key` of an objective that takes that of the set-up, or of the data module."""
        key = self._setup.get("batch_key") if self._data is None else self._data.batch_key
        return {} if key is None or not OBJECTIVES.get(objective).takes_batch_key else {"batch_key": key}

    def _training_data(self, given: CellDataModule | None, objective: Objective, **options: Any) -> CellDataModule:
        """Return the data module to train on, with batches for this model."""
        data = self._data if given is None else given
        is_other = given is not None and given is not self._data
        options = {name: value for name, value in options.items() if value is not None}
        if data is None:
            if self.adata is None:
                raise OptionError(
                    "the model was loaded without adata; call Encoder.load(dir_path, adata), or train(datamodule=...)."
                )
            columns: dict[str, Any] = {key: self._setup.get(key) for key in ("batch_key", "labels_key")}
            columns |= self._rows_of_split(options)
            data = CellDataModule(self._open(self.adata), seed=self.seed, **columns, **options)
        elif options:
            name, value = next(iter(options.items()))
            raise OptionError(f"{name}={value!r} is up to the data module; give it to CellDataModule.")
        elif self.adata is None:
            self._data = data
        if is_other:
            self._learn_from_others(data)
        objective.learn_from(self.module)
        data.bind(self._tokenizer, objective, first_epoch=self.n_epochs_, cells=self._open(data.cells))
        return data


def _parts_of(tokenizer: Tokenizer) -> str:
    """Say how a model gets the vocabulary and the options of a tokenizer."""
    name = TOKENIZERS.name_of(type(tokenizer)) or "its registered name"
    return (
        f"tokenizer is a {type(tokenizer).__name__}, but a model makes its own from a name and options; call "
        f'Encoder(adata, vocab=tokenizer.vocab, tokenizer={{"name": "{name}", **tokenizer.config()}}).'
    )
