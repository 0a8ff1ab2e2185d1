"""Check that an objective satisfies the rules."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from torch import nn

from scforge._registry import check_options
from scforge.config.schema import ModelConfig
from scforge.data.cells import CellSource, column_of
from scforge.data.vocab import GeneVocab
from scforge.models.registry import MODELS, get_model, option_names
from scforge.testing._rules import apply_rules, class_of, require, saved_config
from scforge.tokenizers.base import TOKENIZERS, Tokenizer
from scforge.training.objectives.base import OBJECTIVES, Objective, TrainingDefaults

Batch = dict[str, torch.Tensor]

N_CELLS, N_GENES = 48, 60
TRAIN_ROWS = np.arange(40)
ROWS = np.array([0, 3, 7, 12, 20, 33, 41, 47])
_SIZES: dict[str, Any] = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "latent_dim": 6, "ffn_dim": 16}
_SIZES |= {"encoder_dim": 16, "encoder_layers": 1, "encoder_heads": 2, "decoder_layers": 1, "dropout": 0.0}


@dataclass(frozen=True)
class Subject:
    """An objective to check, bound to cells and to a small model with its tokenizer."""

    objective: Objective
    module: nn.Module
    tokenizer: Tokenizer
    cells: CellSource
    again: Callable[[], Objective] = field(repr=False)
    """Creates the objective from its options, bound to the same cells and model."""

    def prepare(self, rows: np.ndarray, objective: Objective | None = None, *, epoch: int = 0, seed: int = 0) -> Batch:
        """Return the batch that the objective, or another, prepares of the cells at `rows`."""
        block = self.cells.block(rows, draw=epoch)
        return dict((objective or self.objective).prepare(block, self.tokenizer, epoch=epoch, seed=seed))


def check_objective(
    objective: str | type[Objective] | Objective,
    *,
    architecture: str = "gene_pooling",
    tokenizer: str = "continuous_projection",
    model_options: dict[str, Any] | None = None,
    tokenizer_options: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Check that an objective satisfies the requirements of training, resuming and saving.

    Call this function in the tests of a package that provides an objective. The test cells are 48 simulated cells of
    two groups over 60 genes, with the columns ``"group"`` and ``"batch"`` in ``obs``; 40 of them are training cells.
    The function creates the objective from its options twice, prepares batches of the cells in two orders, with one
    seed and several, after pickling, and computes the loss and its gradients on a small model.

    Parameters
    ----------
    objective
        Registered name, class or instance.
    architecture, tokenizer
        Registered names of an architecture and a tokenizer that the objective works with.
    model_options, tokenizer_options
        Their options. If None, uses small sizes, and the defaults of the tokenizer.
    **options
        Options to create the objective if `objective` is a name or a class.

    Raises
    ------
    AssertionError
        If a rule is broken; the message describes the rule and how it was broken.
    OptionError
        If the name or an option is unknown, options are given with an instance, or the objective does not work with
        this architecture or tokenizer.

    Examples
    --------
    >>> check_objective("joint_embedding")
    >>> check_objective("masked_gene_prediction", architecture="transformer_encoder", tokenizer="rank_value")
    """
    subject = _make_subject(objective, options, architecture, tokenizer, model_options or {}, tokenizer_options or {})
    apply_rules(type(subject.objective).__name__, _RULES, subject)


def _make_subject(
    objective: str | type[Objective] | Objective,
    options: dict[str, Any],
    architecture: str,
    tokenizer: str,
    model_options: dict[str, Any],
    tokenizer_options: dict[str, Any],
) -> Subject:
    cls = class_of("objective", objective, options, Objective, OBJECTIVES)  # type: ignore[type-abstract]
    cells = _cells()
    if cls is None:
        instance = cast(Objective, objective)
    else:
        check_options("objective option", cls.__name__, options, cls.option_names())
        instance = cls(**options | cls(**options).options_from(lambda key: column_of(cells.obs, key)))
    tokenizer_class = TOKENIZERS.get(tokenizer)
    vocab = cast(GeneVocab, cells.vocab).with_special_tokens(*tokenizer_class.special_tokens(tokenizer_options))
    cells = replace(cells, vocab=vocab)
    made_tokenizer = tokenizer_class(vocab, **tokenizer_options)
    instance.check(made_tokenizer)
    instance.check_architecture(MODELS.get(architecture))
    accepted = option_names(architecture)
    sizes: dict[str, Any] = {name: value for name, value in _SIZES.items() if accepted is None or name in accepted}
    if "n_bins" in (accepted or ()) and (n_bins := getattr(made_tokenizer, "n_bins", None)) is not None:
        sizes["n_bins"] = n_bins
    if architecture == "gene_pooling":
        sizes["pooling"] = "weighted_sum"  # as in the light encoder
    sizes |= instance.model_options() | model_options
    config = ModelConfig(architecture=architecture, vocab_size=len(vocab), **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = get_model(architecture, config)

    def bound(created: Objective) -> Objective:
        created.learn_from(module)
        created.bind(cells, TRAIN_ROWS)
        return created

    bound(instance).initialize(module, cells.take(TRAIN_ROWS), made_tokenizer)
    return Subject(
        instance, module, made_tokenizer, cells, again=lambda: bound(type(instance)(**saved_config(instance)))
    )


def _cells() -> CellSource:
    generator = np.random.default_rng(0)
    groups = np.arange(N_CELLS) % 2
    mean = np.where((groups[:, None] == 0) == (np.arange(N_GENES) < N_GENES // 2), 3.0, 0.4)
    counts = generator.poisson(mean).astype(np.float32)
    obs = pd.DataFrame(
        {"group": groups.astype(str), "batch": np.where(np.arange(N_CELLS) % 3, "a", "b")}, dtype="category"
    )
    vocab = GeneVocab(
        genes=tuple(f"ENSG{i:011d}" for i in range(N_GENES)),
        medians=np.ones(N_GENES),
        entropies=np.random.default_rng(2).uniform(0.3, 0.9, N_GENES),
    )
    return CellSource(sparse.csr_matrix(counts), counts.sum(axis=1), vocab=vocab, obs=obs)


def _require_same(first: Batch, second: Batch, sentence: str) -> None:
    require(set(first) == set(second), f"{sentence} (keys: {sorted(first)} and {sorted(second)}).")
    for name in first:
        require(_equal(first[name], second[name]), f"{sentence} ({name!r} differs).")


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal; NaN, e.g. for a missing label, equals NaN."""
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())


def _rule_config(subject: Subject) -> None:
    config = saved_config(subject.objective)
    require(subject.again().config() == config, "the objective created from config() has a different config().")


def _rule_class(subject: Subject) -> None:
    objective = subject.objective
    require(
        isinstance(getattr(objective, "defaults", None), TrainingDefaults),
        "defaults is not a scforge.training.TrainingDefaults.",
    )
    require(objective.monitor_mode in ("min", "max"), f"monitor_mode={objective.monitor_mode!r} is not 'min' or 'max'.")


def _rule_batch(subject: Subject) -> None:
    batch = subject.prepare(ROWS)
    for name, tensor in batch.items():
        require(isinstance(tensor, torch.Tensor), f"{name!r} of the batch is not a tensor.")
        require(tensor.ndim > 0, f"{name!r} of the batch is a single number; every tensor needs a dimension.")
        require(
            tensor.dtype in (torch.int64, torch.float32, torch.bool),
            f"{name!r} has dtype {tensor.dtype} instead of int64, float32 or bool.",
        )
        require(not tensor.is_floating_point() or not tensor.isinf().any(), f"{name!r} contains infinite values.")
    n_cells = subject.objective.n_cells(batch)
    require(
        isinstance(n_cells, int) and n_cells > 0, f"n_cells() returns {n_cells!r} for a batch of {len(ROWS)} cells."
    )


def _rule_repeatable(subject: Subject) -> None:
    batch = subject.prepare(ROWS)
    _require_same(batch, subject.prepare(ROWS), "the same seed and epoch give a different batch")
    _require_same(
        batch, subject.prepare(ROWS, subject.again()), "an objective created from config() gives another batch"
    )
    copy = pickle.loads(pickle.dumps(subject.objective))
    _require_same(batch, subject.prepare(ROWS, copy), "a pickled copy gives a different batch")
    _, keys, position, *_ = np.random.get_state()
    state = torch.random.get_rng_state()
    subject.prepare(ROWS, epoch=1, seed=5)
    _, keys_after, position_after, *_ = np.random.get_state()
    unchanged = np.array_equal(keys, keys_after) and position == position_after
    unchanged = unchanged and torch.equal(state, torch.random.get_rng_state())
    require(unchanged, "prepare() draws from the global generator of NumPy or torch; use the seed.")


def _rule_cells(subject: Subject) -> None:
    order = np.random.default_rng(1).permutation(len(ROWS))
    batch, moved = subject.prepare(ROWS), subject.prepare(ROWS[order])
    require(set(batch) == set(moved), "the order of the cells changes the names in the batch.")
    for name, tensor in batch.items():
        if len(tensor) == len(ROWS) == len(moved[name]):
            require(
                _equal(tensor[order], moved[name]),
                f"the order of the cells changes what is prepared of them ({name!r}); random choices may depend on the "
                "seed, the epoch and the cell only.",
            )


def _rule_loss(subject: Subject) -> None:
    module, batch = subject.module, subject.prepare(ROWS)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    module.train()
    module.zero_grad()
    torch.manual_seed(0)
    loss, metrics = subject.objective.loss(module, batch)
    require(
        loss.ndim == 0 and loss.is_floating_point(), f"the loss has shape {tuple(loss.shape)}, not a single number."
    )
    require(loss.isfinite(), f"the loss is {loss.item()}.")
    require(loss.requires_grad, "the loss does not depend on the weights of the model.")
    loss.backward()
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    require(all(gradient.isfinite().all() for gradient in gradients), "a gradient is NaN or infinite.")
    require(any(gradient.any() for gradient in gradients), "all gradients are 0.")
    for name, value in metrics.items():
        require(not value.requires_grad, f"the metric {name!r} is not detached.")
        require(name != "loss", "a metric has the name 'loss', which the loss itself has.")
    _require_same(before, batch, "loss() changes the batch")


def _rule_metrics(subject: Subject) -> None:
    module = subject.module.eval()
    with torch.no_grad():
        loss, metrics = subject.objective.loss(module, subject.prepare(ROWS))
        torch.manual_seed(0)
        first, _ = subject.objective.loss(module, subject.prepare(ROWS))
        torch.manual_seed(0)
        other, _ = subject.again().loss(module, subject.prepare(ROWS))
    require(torch.equal(first, other), "the objective created from config() has a different loss.")
    means = {"loss": loss.double().numpy(), **{name: value.double().numpy() for name, value in metrics.items()}}
    logged = subject.objective.summarize(means)
    require("loss" in logged, "summarize() leaves out the loss.")
    monitor = subject.objective.monitor
    require(monitor in logged, f"monitor={monitor!r} is not among the logged metrics {sorted(logged)}.")
    require(all(isinstance(value, float) for value in logged.values()), "summarize() returns a value that is no float.")


_RULES: dict[str, Callable[[Subject], None]] = {
    "the class has defaults": _rule_class,
    "config() creates an equal objective": _rule_config,
    "a batch has the right types": _rule_batch,
    "batches are reproducible": _rule_repeatable,
    "what is prepared of a cell does not depend on other cells": _rule_cells,
    "the loss is a number with gradients": _rule_loss,
    "the loss is computed without gradients, and its metrics are logged": _rule_metrics,
}
