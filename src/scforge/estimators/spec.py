"""What a model is made of, besides its weights: enough to build it again from JSON and a vocabulary."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import nn

from scforge.config._messages import config_error
from scforge.config.schema import ModelConfig
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.estimators.defaults import Recipe
from scforge.models.registry import MODELS, check_model_options, get_model
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.registry import get_tokenizer
from scforge.training.objectives.base import Objective
from scforge.training.objectives.registry import get_objective

__all__ = ["ModelSpec", "named_options"]


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


@dataclass(frozen=True)
class ModelSpec:
    """Names and options of architecture, tokenizer and objective, and the vocabulary.

    Every option is spelled out, so a default that changes in a later version does not change a saved model.
    """

    architecture: str
    model_options: dict[str, Any]
    tokenizer: str
    tokenizer_options: dict[str, Any]
    objective: str
    objective_options: dict[str, Any]
    vocab: GeneVocab

    @classmethod
    def resolve(
        cls,
        recipe: Recipe,
        vocab: GeneVocab,
        *,
        tokenizer: tuple[str, dict[str, Any]],
        objective: tuple[str, dict[str, Any]],
        options: dict[str, Any],
    ) -> ModelSpec:
        """Fill in what the user left open and check that the parts fit."""
        name, tokenizer_options = tokenizer
        if name == recipe.tokenizer:
            tokenizer_options = recipe.tokenizer_options | tokenizer_options
        architecture = recipe.architecture
        check_model_options(architecture, options)
        options = recipe.options | options
        if "max_len" not in tokenizer_options and options.get("max_seq_len") is not None:
            tokenizer_options = tokenizer_options | {"max_len": options["max_seq_len"]}
        made = get_tokenizer(name, vocab, **tokenizer_options)
        parameters = inspect.signature(MODELS.get(architecture)).parameters
        pooling = options.get("pooling", getattr(parameters.get("pooling"), "default", None))
        if pooling == "cls" and not made.append_cls:
            raise OptionError(
                "pooling='cls' needs a CLS token; pass append_cls=True to the tokenizer, or pooling='mean'."
            )
        if "max_seq_len" in parameters:
            longest = made.max_tokens()
            if options.setdefault("max_seq_len", longest) < longest:
                raise OptionError(
                    f"max_seq_len={options['max_seq_len']} is smaller than the {longest} tokens that the tokenizer "
                    f"{name!r} makes of a cell; raise it, or lower the tokenizer's max_len (data.max_genes in YAML)."
                )
        return cls(
            architecture=architecture,
            model_options=options,
            tokenizer=name,
            tokenizer_options=made.config(),
            objective=objective[0],
            objective_options=get_objective(objective[0], **objective[1]).config(),
            vocab=vocab,
        )

    def build_module(self) -> nn.Module:
        """Make the module, with random weights."""
        try:
            config = ModelConfig(architecture=self.architecture, vocab_size=len(self.vocab), **self.model_options)
        except ValidationError as error:
            raise config_error(error, ModelConfig) from None
        return get_model(self.architecture, config)

    def build_tokenizer(self) -> Tokenizer:
        """Make the tokenizer."""
        return get_tokenizer(self.tokenizer, self.vocab, **self.tokenizer_options)

    def build_objective(self) -> Objective:
        """Make the objective."""
        return get_objective(self.objective, **self.objective_options)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the vocabulary, JSON-safe."""
        return {
            "architecture": {"name": self.architecture, **self.model_options},
            "tokenizer": {"name": self.tokenizer, **self.tokenizer_options},
            "objective": {"name": self.objective, **self.objective_options},
        }
