"""What a model is made of, besides its weights: enough to build it again from JSON and a vocabulary."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

from scforge._checks import check_count
from scforge._registry import check_defines
from scforge.config.aliases import config_error
from scforge.config.schema import ModelConfig
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError, listing
from scforge.estimators.defaults import Recipe
from scforge.estimators.tuning import Tuning
from scforge.models.components.gene_vectors import fill_gene_vectors
from scforge.models.components.heads import COUNT_LOSSES, is_truncated
from scforge.models.registry import MODELS, check_model_options, get_model, option_names, own_names
from scforge.tokenizers.base import TOKENIZERS, Tokenizer, get_tokenizer
from scforge.tokenizers.entropy_ranked import serialisation_weights
from scforge.training.objectives.base import Objective, get_objective

logger = logging.getLogger("scforge")

_TAKEN = frozenset(
    ("adata", "architecture", "datamodule", "keep_genes", "n_top_genes", "name", "objective", "registry", "seed")
) | {"tokenizer", "tuning", "vocab", "vocab_size"}
"""What cannot be an option of an architecture, because ``Encoder`` or the description has another use for the name."""
_TOLD = ("input_ids", "attention_mask", "values")
"""What the methods of an architecture are given by name, among other things."""


def named_options(argument: str, value: str | dict[str, Any] | None, default: str) -> tuple[str, dict[str, Any]]:
    """Split ``"name"`` or ``{"name": "name", option: value, ...}`` into name and options.

    Examples
    --------
    >>> named_options("tokenizer", {"name": "rank_value", "max_len": 256}, "continuous_projection")
    ('rank_value', {'max_len': 256})
    """
    if value is None:
        return default, {}
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        return value.get("name", default), {key: option for key, option in value.items() if key != "name"}
    raise OptionError(f"{argument}={value!r} is neither a name nor a dict with 'name' and options.")


def default_options(architecture: str) -> dict[str, Any]:
    """Return the options that an architecture takes where nothing is said, as JSON gives them back.

    Left out are defaults that JSON cannot hold, what ``**kwargs`` takes, and, of an architecture that is not of
    scforge, options of all architectures whose default is another one than that of
    :class:`~scforge.config.ModelConfig`: its ``from_config`` may go by either.

    Examples
    --------
    >>> default_options("gene_pooling")["layer_norm_eps"]
    1e-12
    """
    cls = MODELS.get(architecture)
    of_scforge = cls.__module__.partition(".")[0] == "scforge"
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        field = ModelConfig.model_fields.get(name)
        shared = parameter.default if field is None else field.default
        default = shared if parameter.default is parameter.empty else parameter.default
        if name in _TAKEN or default is parameter.empty or not (of_scforge or shared is default or shared == default):
            continue
        try:
            plain = json.loads(json.dumps(default, allow_nan=False))
        except (TypeError, ValueError):
            continue
        if plain == default:
            options[name] = plain
    return options


@dataclass(frozen=True)
class ModelSpec:
    """Names and options of architecture, tokenizer and objective, the vocabulary, and what a model was fine-tuned for.

    Every option is spelled out, so a default that changes in a later version does not change a saved model. (What
    :func:`default_options` leaves out is not.)
    """

    architecture: str
    model_options: dict[str, Any]
    tokenizer: str
    tokenizer_options: dict[str, Any]
    objective: str
    objective_options: dict[str, Any]
    vocab: GeneVocab
    tuning: Tuning | None = None

    @classmethod
    def resolve(
        cls,
        recipe: Recipe,
        vocab: GeneVocab,
        *,
        tokenizer: tuple[str, dict[str, Any]],
        objective: tuple[str, dict[str, Any]],
        options: dict[str, Any],
    ) -> tuple[ModelSpec, np.ndarray | None]:
        """Fill in what the user left open and check that the parts fit.

        Returns
        -------
        The specification, and the pretrained gene vectors that a new model starts from, float32, shape (V, D), or None.
        """
        name, tokenizer_options = tokenizer
        if name == recipe.tokenizer:
            tokenizer_options = recipe.tokenizer_options | tokenizer_options
        architecture = recipe.architecture
        check_model_options(architecture, options)
        options = recipe.options | own_names(architecture, options)
        if "max_len" not in tokenizer_options and options.get("max_seq_len") is not None:
            tokenizer_options = tokenizer_options | {"max_len": options["max_seq_len"]}
        vocab = _with_special_tokens(vocab, name, tokenizer_options)
        made = get_tokenizer(name, vocab, **tokenizer_options)
        parameters = inspect.signature(MODELS.get(architecture)).parameters
        pooling = options.get("pooling", getattr(parameters.get("pooling"), "default", None))
        has_readout = getattr(MODELS.get(architecture), "predicts_next", False) and all(
            options.get(name, True) for name in ("shift_labels", "causal_encode")
        )
        if pooling == "cls" and not made.append_cls and not has_readout:
            raise OptionError(
                "pooling='cls' needs a CLS token; pass append_cls=True to the tokenizer, or pooling='mean'."
            )
        aim = get_objective(objective[0], **objective[1])
        aim.check(made)
        aim.check_architecture(MODELS.get(architecture))
        options = _with_set_options(architecture, objective[0], options, aim.model_options())
        _check_counts(
            options.get("value_loss", getattr(parameters.get("value_loss"), "default", None)), name, made, aim
        )
        head = None
        if "expression_head" in parameters:
            head = options.get("expression_head", parameters["expression_head"].default)
            _check_expression_head(head, architecture, name, made, objective[0], aim)
        # Some architectures predict bins only where they are asked to.
        n_bins, bins = getattr(made, "n_bins", None), options.get("n_bins")
        asked = head == "bin" or getattr(parameters.get("n_bins"), "default", None) is not None
        if n_bins is not None and bins is None and asked:
            options = options | {"n_bins": n_bins}
        if n_bins is not None and bins is not None:
            check_count("n_bins", bins, "bins")
            if bins != n_bins:
                raise OptionError(
                    f"n_bins={bins} but the tokenizer {name!r} makes {n_bins} bins; leave n_bins out, or give the "
                    "tokenizer as many."
                )
        if "max_seq_len" in parameters:
            longest = aim.max_tokens(made)
            if options.setdefault("max_seq_len", longest) < longest:
                raise OptionError(
                    f"max_seq_len={options['max_seq_len']} is smaller than the {longest} tokens that the tokenizer "
                    f"{name!r} and the objective {objective[0]!r} make of a cell; raise it, or lower the "
                    "tokenizer's max_len (data.max_genes in YAML)."
                )
        # An architecture that tells them apart unless told otherwise has to know how many there are.
        counts_special = "n_special" in parameters and parameters["n_special"].default
        if counts_special and options.setdefault("n_special", vocab.n_special) != vocab.n_special:
            raise OptionError(
                f"n_special={options['n_special']!r} but the vocabulary has {vocab.n_special} special tokens; leave it "
                "out."
            )
        # A saved model says how its gene vectors are shaped, and has them in its weights.
        vectors = None if options.get("gene_vectors") is not None else made.gene_vectors()
        if vectors is not None:
            options = options | {"gene_vectors": _vectors_option(architecture, name, made, vectors)}
        options = options | {n: value for n, value in default_options(architecture).items() if n not in options}
        spec = cls(
            architecture=architecture,
            model_options=options,
            tokenizer=name,
            tokenizer_options=made.config(),
            objective=objective[0],
            objective_options=aim.config(),
            vocab=vocab,
        )
        return spec, vectors

    def build_module(self, gene_vectors: np.ndarray | None = None) -> nn.Module:
        """Make the module, with random weights and these gene vectors, or on the architecture of the fine-tuning."""
        if self.tuning is not None and self.tuning.backbone is not None:
            return self.tuning.build_module(self.tuning.backbone)
        try:
            config = ModelConfig(architecture=self.architecture, vocab_size=len(self.vocab), **self.model_options)
        except ValidationError as error:
            raise config_error(error, ModelConfig) from None
        module = get_model(self.architecture, config)
        check_defines(
            f"architecture={self.architecture!r} is {type(module).__qualname__}", module, ("encode", "forward")
        )
        for name, told in {"encode": _TOLD, "forward": (*_TOLD, "labels")}.items():
            if what := _refused(getattr(module, name), told):
                raise OptionError(
                    f"architecture={self.architecture!r}: {name} of {type(module).__qualname__} {what}; write it as "
                    f"{name}(self, {', '.join(told[:2])}, {', '.join(f'{one}=None' for one in told[2:])}, **kwargs)."
                )
        if gene_vectors is not None:
            fill_gene_vectors(module, torch.from_numpy(gene_vectors))
        if self.vocab.entropies is not None and hasattr(module, "init_gene_weights"):
            weighting = self.tokenizer_options.get("weighting", "complement")
            module.init_gene_weights(torch.from_numpy(serialisation_weights(self.vocab, weighting)))
        return module if self.tuning is None else self.tuning.build_module(module)

    def build_untrained(self, seed: int) -> tuple[nn.Module, Tokenizer]:
        """Make the module of the pretraining with random weights of a seed, and the tokenizer.

        Raises
        ------
        OptionError
            If it starts from gene vectors that are not at hand any more.
        """
        spec = replace(self, tuning=None)
        tokenizer = spec.build_tokenizer()
        vectors = tokenizer.gene_vectors()
        if vectors is None and spec.model_options.get("gene_vectors") is not None:
            raise OptionError("the model started from gene vectors, which a saved model has in its trained form only.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return spec.build_module(vectors).eval(), tokenizer

    def build_tokenizer(self) -> Tokenizer:
        """Make the tokenizer."""
        return get_tokenizer(self.tokenizer, self.vocab, **self.tokenizer_options)

    def build_objective(self) -> Objective:
        """Make what the model is trained for: the objective, or of a fine-tuned model its task."""
        objective = self.build_pretraining()
        return objective if self.tuning is None else self.tuning.build_task(objective)

    def build_pretraining(self) -> Objective:
        """Make the objective of the pretraining."""
        return get_objective(self.objective, **self.objective_options)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the vocabulary, JSON-safe."""
        parts = {
            "architecture": {"name": self.architecture, **self.model_options},
            "tokenizer": {"name": self.tokenizer, **self.tokenizer_options},
            "objective": {"name": self.objective, **self.objective_options},
        }
        return parts if self.tuning is None else {**parts, "tuning": self.tuning.to_json()}


def _check_counts(value_loss: str | None, name: str, tokenizer: Tokenizer, objective: Objective) -> None:
    """Raise if an architecture would take values for counts that are none, or zeros for counts that cannot be zero."""
    if value_loss not in COUNT_LOSSES:
        return
    if not tokenizer.gives_counts:
        raise OptionError(
            f"value_loss={value_loss!r} is for counts, which the tokenizer {name!r} with these options does not give; "
            "pass tokenizer={'name': 'continuous_projection', 'transform': 'counts'}, or value_loss='mse'."
        )
    zeros = {
        "zero_targets": getattr(objective, "zero_targets", 0.0),
        "include_zero_genes": tokenizer.lists_all_genes,
    }
    for option, value in zeros.items():
        if value and is_truncated(value_loss):
            whole = value_loss.removeprefix("zero_truncated_")
            raise OptionError(
                f"value_loss={value_loss!r} is for counts of at least 1, but {option}={value!r} makes targets of 0; "
                f"leave it out, or choose value_loss={whole!r}."
            )


def _check_expression_head(
    head: Any, architecture: str, name: str, tokenizer: Tokenizer, objective: str, aim: Objective
) -> None:
    """Raise if an optional head for expression is missing, or has nothing to learn from."""
    n_bins = getattr(tokenizer, "n_bins", None)
    if head == "bin" and n_bins is None:
        raise OptionError(
            f"expression_head='bin' predicts bins, which the tokenizer {name!r} does not make; choose "
            "tokenizer='binned_expression', or expression_head='value'."
        )
    if head is None and aim.predicts_values:
        fitting = "'value'" if n_bins is None else "'value' or expression_head='bin'"
        raise OptionError(
            f"architecture={architecture!r} without an expression_head predicts no values, which the objective "
            f"{objective!r} is about; pass expression_head={fitting}."
        )


def _with_set_options(
    architecture: str, objective: str, options: dict[str, Any], set_: dict[str, Any]
) -> dict[str, Any]:
    """Add the options that an objective sets of an architecture."""
    check_model_options(architecture, set_)
    for option, value in set_.items():
        if options.get(option, value) != value:
            raise OptionError(
                f"{option}={options[option]!r} but the objective {objective!r} needs {value!r}; leave it out."
            )
    return options | set_


def _with_special_tokens(vocab: GeneVocab, tokenizer: str, options: dict[str, Any]) -> GeneVocab:
    """Add the special tokens that a tokenizer with these options needs."""
    needed = TOKENIZERS.get(tokenizer).special_tokens(options)
    added = [token for token in needed if vocab.token_id(token) is None]
    if added:
        logger.info("The tokenizer %s adds the special tokens %s to the vocabulary.", tokenizer, listing(added))
    return vocab.with_special_tokens(*added) if added else vocab


def _vectors_option(architecture: str, name: str, tokenizer: Tokenizer, vectors: np.ndarray) -> dict[str, Any]:
    """Return the option `gene_vectors` of an architecture for the vectors of a tokenizer."""
    known = option_names(architecture)
    if known is not None and "gene_vectors" not in known:
        raise OptionError(
            f"architecture={architecture!r} cannot use the gene vectors of the tokenizer {name!r}, because it has no "
            "option 'gene_vectors'; choose another architecture or tokenizer."
        )
    without = int(np.isnan(vectors).any(axis=1).sum())
    return {"dim": vectors.shape[1], "learned": without, "frozen": bool(getattr(tokenizer, "freeze", True))}


def _refused(method: Callable[..., Any], told: Sequence[str]) -> str:
    """Say what of its arguments a method of a module would not take; empty if it takes all."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # of a callable that tells nothing of itself
        return ""
    kinds = {one.kind for one in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return "takes no **kwargs"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    lacking = [
        name
        for name, one in parameters.items()
        if one.default is one.empty
        and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        and (name not in told or one.kind not in named)
    ]
    return f"needs {listing(lacking)}, which it may not be given" if lacking else ""
