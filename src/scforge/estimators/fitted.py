"""A fitted model: a module with everything that applies, describes, saves and restores it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

from scforge._checks import check_share
from scforge._columns import texts_of
from scforge._constants import OBSM_KEY, QUERY_KEY
from scforge._io import atomic_folder, marked, sha256_of
from scforge._text import code, markdown
from scforge._version import __version__
from scforge.data.cells import Cells, CellSource, choose_chunks
from scforge.data.readers import write_h5ad
from scforge.errors import DataError, NotTrainedWarning, OptionError, TrainingError, suggest, warn
from scforge.estimators.card import TEMPLATE, CardFacts, Origin, card_data, in_epochs, shown
from scforge.estimators.serialize import (
    ADATA,
    BASE,
    CONFIG,
    CORRECTION,
    LABELED,
    LANDMARKS,
    VOCAB,
    WEIGHTS,
    StoredModel,
    load_weights,
    part_of,
    sealed,
)
from scforge.estimators.spec import ModelSpec, defaults_for
from scforge.finetuning.base import TASKS, Predictor, Task
from scforge.finetuning.held_out import CellFingerprints, HeldOutRegistry, fingerprints
from scforge.finetuning.mapping import FineTunedModule, QueryMapping, fit_mapping
from scforge.finetuning.new_cells import LabeledCells, NewCells
from scforge.finetuning.reference import write_reference
from scforge.hub.finding import REFERENCE, origin_of
from scforge.models._utils import count_parameters, undrawn
from scforge.models.components.gene_vectors import check_filled
from scforge.models.registry import MODELS
from scforge.tokenizers.base import TOKENIZERS, get_tokenizer
from scforge.training.correction import N_CELLS, BatchCorrection
from scforge.training.objectives.base import OBJECTIVES, Objective
from scforge.training.predict import embed

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import nn

    from scforge.finetuning.splits import Split

_N_LANDMARKS = 2_000
"""Maximum number of training cells whose embeddings are saved with a model."""

_FOLLOWS = frozenset(("max_seq_len", "n_batches", "n_special"))
"""Options of an architecture that follow from tokenizer, batches and vocabulary."""

type _Tensors = dict[str, torch.Tensor]


class _History(dict[str, pd.DataFrame]):
    """The scores of the epochs by name; for a name of scvi-tools, the error lists the names."""

    def __missing__(self, name: str) -> pd.DataFrame:
        advice = suggest(name, self) if self else "; train the model first"
        raise OptionError(f"history has no {name!r}{advice}.")


class FittedModel:
    """A module with everything that applies, describes, saves and restores it.

    The model classes hold one each, open cells for it, and write its results.

    Parameters
    ----------
    spec
        Complete specification.
    seed
        Random seed for the initial weights, splits, cell orders, masks and views.
    setup
        Arguments of ``setup_anndata`` for the training cells.
    gene_vectors
        Gene vectors for the embedding of the module.
    draws
        Whether to draw the initial weights. If False, they have to be loaded.

    Attributes
    ----------
    front
        Name of the model class.
    tokenizer, objective, module
        As described by the specification. The objective of a fine-tuned model is its task.
    history
        Scores of the epochs, one data frame per name.
    n_epochs, is_trained, stopped
        Number of epochs, whether the model was trained, and whether Ctrl-C stopped the last training run.
    landmarks
        Embeddings of sampled training cells, shape (S, D), onto which queries are mapped.
    correction
        Correction of the embedding for the batches of the training cells.
    labeled
        Training cells of a fine-tuned classifier, in the embedding of its base model if that maps queries.
    seen
        The cells used for fine-tuning, and those that were held out.
    base
        The model before fine-tuning.
    origin, facts
        Location of the weights, and facts for the model card.
    trained_in
        Folders of training runs.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> model = scforge.models.Encoder(adata, hidden_dim=8)
    >>> model.fitted.module is model.module, model.fitted.n_epochs
    (True, 0)
    """

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        *,
        setup: dict[str, Any] | None = None,
        gene_vectors: np.ndarray | None = None,
        draws: bool = True,
    ) -> None:
        self.spec, self.seed, self.front, self.setup = spec, seed, "Encoder", setup or {}
        self.tokenizer = get_tokenizer(spec.tokenizer, spec.vocab, **spec.tokenizer_options)
        self.objective = spec.build_objective()
        with nullcontext() if draws else undrawn(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA devices too
            self.module: nn.Module = spec.build_module(gene_vectors).eval()
        self.history: dict[str, pd.DataFrame] = _History()
        self.n_epochs, self.is_trained, self.stopped = 0, False, False
        self.landmarks: torch.Tensor | None = None
        self.correction: BatchCorrection | None = None
        self.labeled: LabeledCells | None = None
        self.seen: HeldOutRegistry | None = None
        self.base: FittedModel | None = None
        self.origin: Origin | None = None
        self.facts = CardFacts()
        self.trained_in: set[str] = set()

    @classmethod
    def of_folder(cls, folder: str | os.PathLike[str], stored: StoredModel) -> Self:
        """Restore a model from the content of its folder."""
        content, spec, weights, is_checked = stored
        # A constructor that computes with its weights has to draw them.
        how: dict[str, Any] = {"seed": content["seed"], "setup": content["setup"], "draws": not is_checked}
        model = cls(spec, **how)
        load_weights(model.module, weights, source=str(folder), known_finite=is_checked)
        model.landmarks = weights.get(LANDMARKS)
        model.restore(content, folder, weights)
        if spec.tuning is not None and (of_base := part_of(weights, BASE)):
            model.base = base = cls(replace(spec, tuning=None), **how)
            load_weights(base.module, of_base, source=str(folder))
            base.landmarks, base.is_trained, base.n_epochs = of_base.get(LANDMARKS), True, spec.tuning.base["n_epochs"]
            batches = content.get("corrected_batches")
            base.correction = BatchCorrection.of_tensors(part_of(of_base, CORRECTION), batches, source=str(folder))
        model.is_trained = content["is_trained"]
        name, revision = origin_of(Path(folder))
        model.origin = replace(model.origin_at(folder), name=name, revision=revision)
        return model

    def restore(self, content: Mapping[str, Any], folder: str | os.PathLike[str], tensors: _Tensors) -> None:
        """Restore the correction and the training record from the content of a folder of a model or an adapter."""
        batches = content.get("corrected_batches")
        self.correction = BatchCorrection.of_tensors(part_of(tensors, CORRECTION), batches, source=str(folder))
        if labeled := part_of(tensors, LABELED):
            n_classes = len(getattr(self.objective, "classes", None) or ())
            self.labeled = LabeledCells.of_tensors(labeled, n_classes=n_classes, source=str(folder))
        if self.spec.tuning is not None:
            self.seen = HeldOutRegistry.load(folder, self.spec.tuning.split.get("cells"))
        self.extend_history(content["history"])
        self.n_epochs = content["n_epochs"]
        self.facts = CardFacts.from_json(content.get("card"), source=str(folder))

    @property
    def pretraining(self) -> Objective:
        """The pretraining objective."""
        pretraining = self.objective.pretraining if isinstance(self.objective, Task) else None
        return self.objective if pretraining is None else pretraining

    @property
    def backbone(self) -> nn.Module:
        """The architecture module, without the head of a fine-tuned model."""
        return self.module.encoder if isinstance(self.module, FineTunedModule) else self.module

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    @property
    def is_query(self) -> bool:
        """Whether the model was created by ``load_query_data``."""
        return self.spec.tuning is not None and bool(self.spec.tuning.base.get("reference"))

    @property
    def obsm_key(self) -> str:
        """Key of the embedding in obsm, which differs if training moved a query model out of its reference space."""
        tuning = self.spec.tuning
        adapted = tuning is not None and self.is_query and tuning.freeze is not True
        return QUERY_KEY if adapted and self.n_epochs else OBSM_KEY

    @property
    def corrected_key(self) -> str | None:
        """The column of the batches that the embedding is corrected for; that of the setup, or of the task."""
        tuning = self.spec.tuning
        if tuning is None:
            return self.setup.get("batch_key")
        is_reference = tuning.task == "integration" and tuning.task_options.get("n_reference") is None
        return tuning.task_options["batch_key"] if is_reference else None

    @property
    def learned(self) -> CellFingerprints | None:
        """Fingerprints of all cells whose labels the model learned from; None if there are no such cells."""
        if self.seen is None:
            return None
        learned: CellFingerprints = self.seen.learned
        if isinstance(self.objective, Task) and self.objective.learns_labels:
            learned = learned.union(self.seen.trained)
        return learned if len(learned) else None

    @property
    def mapping_base(self) -> FittedModel | None:
        """The model before fine-tuning, if new cells can be mapped onto its training cells."""
        base, tuning = self.base, self.spec.tuning
        if base is None or tuning is None or base.spec.tuning is not None or base.landmarks is None:
            return None
        return base if base.n_epochs == tuning.base.get("n_epochs") else None  # it may have been trained further

    def split_of(self, cells: Cells) -> Split | None:
        """Return the split of the fine-tuning, or None if these are not its cells."""
        return None if self.seen is None else self.seen.split_of(fingerprints(cells))

    def parts_of(self, cells: Cells) -> np.ndarray | None:
        """Return the part of the fine-tuning split of each cell, as text, shape (N,); None without fine-tuning."""
        return None if self.seen is None else self.seen.parts_of(CellFingerprints.of(cells))

    def check_ready(self, what: str) -> None:
        """Raise an OptionError if gene vectors are missing, and warn if `what` is random without training."""
        check_filled(self.module)
        if not self.is_trained:
            warn(f"The model is not trained; {what} random.", NotTrainedWarning)

    def embed(self, cells: Cells, *, batch_size: int = 256, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the embedding of each cell, or of the cells in `rows`, float32, shape (N, D)."""
        return embed(self.module, cells, self.tokenizer, objective=self.objective, batch_size=batch_size, rows=rows)

    def correction_for(self, correction: float) -> BatchCorrection | None:
        """Return the correction, or None if `correction` is 0. Raises an OptionError if the model has no correction."""
        if not check_share("correction", correction):
            return None
        if self.correction is None:
            reason = (
                "models that were trained on at least two batches (batch_key in setup_anndata) have one"
                if self.spec.tuning is None
                else "fine-tuning changes the embedding that its base model corrects"
            )
            raise OptionError(f", but the model has no correction: {reason}; pass correction=0.", correction=correction)
        return self.correction

    def codes_to_correct(
        self, cells: Cells, correction: float, *, batch_key: str | None = None, rows: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Return codes of the batches of all cells or those in `rows`, int64, or None if `correction` is 0.

        `batch_key` is the column of the cells, if it differs from that of the training cells.
        """
        fitted = self.correction_for(correction)
        if fitted is None:
            return None
        if self.is_query:
            codes = np.full(len(cells), -1, dtype=np.int64)  # the mapping has moved them
        else:
            # Other cells may have their batches in another column, but a task has its own.
            key = batch_key if self.spec.tuning is None else None
            codes = fitted.codes(cells, key or self.corrected_key, rows)
        return codes if rows is None else codes[rows]

    def corrected(self, embeddings: np.ndarray, codes: np.ndarray | None, correction: float) -> np.ndarray:
        """Return corrected embeddings of cells with the batches `codes`, or the same without codes."""
        if codes is None or self.correction is None:
            return embeddings
        return self.correction.apply(embeddings, codes, correction)

    def embed_training_cells(self, cells: Cells, rows: np.ndarray, batch_size: int) -> None:
        """Embed samples of the training cells: those onto which queries are mapped, and those of several batches."""
        tuning = self.spec.tuning
        is_changed = tuning is None or (tuning.task == "adaptation" and tuning.freeze is not True)
        if is_changed and self.pretraining.maps_queries:
            sampled = cells.sample(_N_LANDMARKS, rows=rows, seed=self.seed)
            self.landmarks = torch.from_numpy(self.embed(sampled, batch_size=batch_size))
        if (key := self.corrected_key) is None:
            return
        try:
            batches = texts_of(cells.column(key), key=key, argument="batch_key")
        except DataError:  # a store without the column
            return
        chosen = choose_chunks(len(cells), N_CELLS, cells.chunk_size, rows=rows, groups=np.asarray(batches.codes)[rows])
        sampled = cells.sample(N_CELLS, rows=chosen)
        sampled = sampled.take(sampled.content_order())  # clusters depend on the order
        embeddings = self.embed(sampled, batch_size=batch_size)
        self.correction = BatchCorrection.fit(embeddings, sampled, key, seed=self.seed)

    def predictor(self, cells: Cells, batch_size: int) -> Predictor:
        """Return the model applied to cells."""

        def correct(embeddings: np.ndarray, rows: np.ndarray, correction: float) -> np.ndarray:
            return self.corrected(embeddings, self.codes_to_correct(cells, correction, rows=rows), correction)

        predictor = Predictor(self.module, self.tokenizer, self.objective, cells, batch_size)
        is_fitted = self.correction is not None and not self.is_query
        return replace(predictor, correct=correct) if is_fitted else predictor

    def mapping_of(self, query: Cells, rows: np.ndarray | None = None) -> QueryMapping:
        """Fit the mapping of query cells (in `rows`) onto the training cells."""
        how: dict[str, Any] = {"rows": rows, "seed": self.seed}
        landmarks: Any = self.landmarks
        return fit_mapping(self.backbone, landmarks.numpy(), query, self.tokenizer, self.objective, **how)

    def predictor_of_query(self, cells: Cells, batch_size: int, parts: np.ndarray | None) -> Predictor:
        """Return the model applied to cells, of which those whose part of the split is "new" are mapped."""
        predictor, labeled = self.predictor(cells, batch_size), self.labeled
        task: Any = self.objective
        base: Any = self.mapping_base
        tuning: Any = self.spec.tuning
        is_new = np.zeros(len(cells), dtype=bool) if parts is None else parts == "new"
        if not is_new.any() or not task.maps_new_cells:
            return predictor
        if labeled is None or (labeled.in_base and base is None):
            warn(
                "The fine-tuned head alone predicts cells that are not from the fine-tuning data, because the model "
                "has no labeled cells, or its base model was trained after fine-tuning or is not complete; fine-tune "
                "again to map these cells."
            )
            return predictor
        rows, module, space = np.flatnonzero(is_new), self.module, predictor
        shift = {"n_new": len(rows), "gene_overlap": cells.overlap, "counts_kept": cells.counts_kept}
        if labeled.in_base:
            mapping = base.mapping_of(cells, rows)
            space = replace(base.predictor(cells, batch_size), module=FineTunedModule(base.backbone, mapping))
            factors = mapping.only_factors(tuning.n_latent).to(self.device)
            module = FineTunedModule(self.backbone, self.module.head, factors)
            shift["gene_factor"] = mapping.typical_factor()
        embeddings = space.embedding(rows)
        shift["share_far"] = labeled.share_far(embeddings)
        probabilities = labeled.probabilities(embeddings, len(task.known_classes))
        return replace(predictor, new=NewCells(is_new, module, probabilities, labeled.temperature, shift))

    def provenance(self) -> dict[str, Any]:
        """Return a description of the model to store with its results, as scalars that h5ad files can store."""
        spec = self.spec
        return {
            "scforge_version": __version__,
            "architecture": spec.architecture,
            "tokenizer": spec.tokenizer,
            "objective": spec.objective,
            **({} if spec.tuning is None else {"task": spec.tuning.task}),
            "n_epochs": self.n_epochs,
            "is_trained": bool(self.is_trained),
            "vocab_hash": spec.vocab.hash,
        }

    def provenance_of(self, cells: Cells, n_latent: int, *, correction: float = 0.0) -> dict[str, Any]:
        """Return the settings of an embedding as scalars that h5ad files can store."""
        kept = {"gene_overlap": cells.overlap, "counts_kept": cells.counts_kept}
        return {**self.provenance(), "n_latent": n_latent, **kept, "correction": float(correction)}

    def described(self, n_cells: int | None, chosen: Callable[..., Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
        """Return a summary of the model: a heading, and a mapping from name to property.

        `chosen` returns the options to show, given all options, their class, and defaults in addition to its own.
        """
        spec, tuning, checkpoint = self.spec, self.spec.tuning, self.facts.checkpoint
        trained = f"trained for {in_epochs(self.n_epochs)}" if self.is_trained else "not trained"
        n_all, n_trained = count_parameters(self.module, trainable_only=False), count_parameters(self.module)
        frozen = "" if n_all == n_trained else f", {n_trained:,} of them trained"
        origin = None if checkpoint is None else f"weights of {checkpoint.replace('`', '')}"
        if tuning is not None and self.is_query:
            what = "mapped onto a" if tuning.freeze is True else "query model of a"
            origin = f"{what} reference trained for {in_epochs(tuning.base['n_epochs'])}"
            frozen = frozen if self.n_epochs else ""
        if origin is not None:
            trained = f"{origin}, then {trained}" if self.n_epochs else origin
        defaults = defaults_for(spec.architecture, spec.model_options)
        tokenizer = chosen(spec.tokenizer_options, TOKENIZERS.get(spec.tokenizer), defaults.tokenizer_options)
        facts = {
            "data": f"{'without adata' if n_cells is None else f'{n_cells} cells'}, {spec.vocab}",
            "tokenizer": _with_options(spec.tokenizer, tokenizer),
            "objective": _with_options(spec.objective, chosen(spec.objective_options, OBJECTIVES.get(spec.objective))),
            "options": shown(chosen(spec.model_options, MODELS.get(spec.architecture), defaults.options)),
        }
        if tuning is not None:
            facts["task"] = _with_options(tuning.task, chosen(tuning.task_options, TASKS.get(tuning.task)))
            facts["lora"] = shown(tuning.lora or {})
        return f"{self.front}({spec.architecture}, {n_all:,} parameters{frozen}, {trained})", facts

    def extend_history(self, figures: dict[str, list[float]]) -> None:
        """Append the scores of epochs to the history, with one data frame per name, as in scvi-tools."""
        history = _History(self.history)  # a copy of the model keeps its own
        for name, values in figures.items():
            scores = [*(history[name][name] if name in history else ()), *values]
            history[name] = pd.DataFrame({name: scores}).rename_axis("epoch")
        self.history = history

    def history_lists(self) -> dict[str, list[float]]:
        """Return the scores of the epochs by name."""
        return {name: frame[name].tolist() for name, frame in self.history.items()}

    @property
    def current_origin(self) -> Origin | None:
        """The location of the model, or None if it has no location or was trained since."""
        return self.origin if self.origin is not None and self.origin.n_epochs == self.n_epochs else None

    def origin_at(self, folder: str | os.PathLike[str]) -> Origin:
        """Return the location of the model with `folder` as its folder."""
        return replace(self.current_origin or Origin(), folder=Path(folder).resolve(), n_epochs=self.n_epochs)

    @property
    def card_facts(self) -> CardFacts:
        """The facts for the card of the current model, including facts about its base model."""
        facts = self.facts
        if facts.n_epochs != self.n_epochs:
            facts = replace(facts, table="", scores=())
        if self.base is None:
            return facts
        base = self.base.current_origin
        if base is not None and base.name is not None and not (facts.base is not None and facts.base.is_given):
            facts = replace(facts, base=Origin(base.name, base.revision))
        return replace(facts, checkpoint=facts.checkpoint or self.base.card_facts.checkpoint)

    def card(self, *, name: str | None = None, is_adapter: bool = False, reference: CellSource | None = None) -> str:
        """Return the text of ``README.md``.

        Parameters
        ----------
        name
            Name to load the model by. If None, the card refers to its own folder.
        is_adapter
            Whether the folder contains only adapters.
        reference
            Labeled cells in the folder.
        """
        from huggingface_hub import ModelCard

        spec, facts, n_epochs, is_trained = self.spec, self.card_facts, self.n_epochs, bool(self.is_trained)
        tuning, base = spec.tuning, facts.base
        before = n_epochs if tuning is None else tuning.base.get("n_epochs", 0)
        trained = (
            f"{in_epochs(before)} of the objective {code(spec.objective)} on the architecture {code(spec.architecture)}"
        )
        if facts.checkpoint is not None or (tuning is None and is_trained and not n_epochs):
            source = markdown((facts.checkpoint or "by an unknown author").replace("`", ""))
            trained = f"Trained elsewhere ({source})" + (f", then {trained}" if before else "")
        if tuning is not None:
            lora = "" if tuning.lora is None else f", with low-rank adapters (r={tuning.lora['r']})"
            revision = f" at {code(base.revision)}" if base is not None and base.revision else ""
            of = "" if base is None else f" ({code(base.name)}{revision})"
            trained += f"{of}, then {in_epochs(n_epochs)} of the task {code(tuning.task)}{lora}"
        losses = {key: frame[key].iloc[-1] for key, frame in self.history.items() if len(frame) and "loss" in key}
        card = ModelCard.from_template(
            card_data(spec, facts, name, is_adapter=is_adapter),
            template_path=str(TEMPLATE),
            markdown=markdown,
            code=code,
            title=spec.architecture if name is None else name.rpartition("/")[2],
            version=__version__,
            losses=shown(losses, "{:.4g}"),
            shown=shown,
            spec=spec,
            facts=facts,
            name=name,
            parameters=count_parameters(self.module, trainable_only=is_adapter),
            trained=trained,
            is_adapter=is_adapter,
            is_trained=is_trained,
            reference=reference,
        )
        return marked(f"{card.content}\n")

    def tensors(self) -> _Tensors:
        """Return the weights and the other tensors to save."""
        found = dict(self.module.state_dict())
        if self.landmarks is not None:
            found[LANDMARKS] = self.landmarks
        found |= self.own_tensors()
        if self.labeled is not None and self.labeled.in_base and (base := self.mapping_base) is not None:
            found |= {f"{BASE}{name}": value for name, value in base.tensors().items()}
        return found

    def own_tensors(self) -> _Tensors:
        """Return the tensors of the correction and of labeled cells, which adapters have, too."""
        found: _Tensors = {}
        for prefix, part in {CORRECTION: self.correction, LABELED: self.labeled}.items():
            found |= {} if part is None else {f"{prefix}{name}": value for name, value in part.tensors().items()}
        return found

    def content(self) -> dict[str, Any]:
        """Return a JSON-safe description of the model."""
        facts = self.card_facts.to_json()
        base = self.mapping_base if self.labeled is not None and self.labeled.in_base else None
        correction = self.correction if base is None else base.correction
        return {
            "class": self.front,
            **self.spec.to_json(),
            "setup": dict(self.setup),
            "seed": self.seed,
            "is_trained": self.is_trained,
            "n_epochs": self.n_epochs,
            "history": self.history_lists(),
            **({} if correction is None else {"corrected_batches": correction.batches}),
            **({"card": facts} if facts else {}),
        }

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        weights: _Tensors | None = None,
        card: str | None = None,
        reference: CellSource | None = None,
        adata: AnnData | None = None,
        extra: Callable[[Path], None] | None = None,
        overwrite: bool = True,
    ) -> None:
        """Write a model folder completely or not at all.

        Parameters
        ----------
        path
            Folder to create.
        weights
            The weights. If None, uses those of the model.
        card
            Text of ``README.md``. If None, it is generated.
        reference
            Labeled cells, written into the folder if given.
        adata
            Cells, written into the folder if given.
        extra
            A function that writes more files into the folder.
        overwrite
            Whether to replace a model in an existing folder.
        """
        weights = self.tensors() if weights is None else weights
        for name, _ in self.module.named_parameters():
            if name in weights and not weights[name].isfinite().all():  # loading would refuse it
                raise TrainingError(
                    f"the model has NaN or infinite weights in {name!r} and is not saved; train it again with a lower "
                    "lr, or load an earlier checkpoint."
                )
        card = self.card(reference=reference) if card is None else card
        content = self.content()
        with atomic_folder(path, overwrite=overwrite) as folder:
            tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            self.spec.vocab.save(folder / VOCAB)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if self.seen is not None:
                self.seen.save(folder)
            if adata is not None:
                write_h5ad(folder / ADATA, adata)
            if reference is not None:
                write_reference(reference, folder)
            names = (WEIGHTS, VOCAB, ADATA, REFERENCE)
            sums = {name: sha256_of(folder / name) for name in names if (folder / name).exists()}
            (folder / CONFIG).write_text(sealed({**content, "sha256": sums}), encoding="utf-8")
            if extra is not None:
                extra(folder)


def changed_options(
    options: Mapping[str, Any], owner: type, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options that differ from `defaults` and the defaults of the constructor of `owner`."""
    known = {name: parameter.default for name, parameter in inspect.signature(owner).parameters.items()}
    known |= defaults or {}
    return {name: value for name, value in options.items() if name not in _FOLLOWS and known.get(name, ...) != value}


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    return f"{name} ({shown(options)})" if options else name
