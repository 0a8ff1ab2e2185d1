"""What may stand in a configuration file: one pydantic class a section.

A default stands here only where the loop or the data room needs one. Options of an architecture, a tokenizer or an
objective have their defaults in that class's constructor, which receives what the user set (``user_options``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from scforge._checks import check_mask_ratio
from scforge.config._fields import Float, Int, OpenSection, Positive, Section, Share, Text
from scforge.config._places import Places
from scforge.config.aliases import apply_aliases
from scforge.config.data_section import DataConfig, PreprocessingConfig, SamplingConfig, SplitConfig
from scforge.config.finetune_section import FinetuneConfig
from scforge.config.output_section import EvalConfig, OutputConfig
from scforge.config.training_section import OptimizerConfig, SchedulerConfig, TrainingConfig
from scforge.errors import OptionError

__all__ = [
    "Config",
    "DataConfig",
    "EvalConfig",
    "FinetuneConfig",
    "MaskingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OutputConfig",
    "PreprocessingConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "Section",
    "SplitConfig",
    "TokenizerConfig",
    "TrainingConfig",
]


def _mask_ratio(value: Any) -> Any:
    try:
        check_mask_ratio(value)
    except OptionError as error:
        # The message of a configuration names the option and the value itself.
        raise ValueError(str(error).split("=", 1)[1].removeprefix(f"{value!r} ")) from None
    return value


class MaskingConfig(Section):
    """Which tokens are hidden for prediction, and what stands in their place.

    Parameters
    ----------
    mask_ratio
        Share of tokens chosen for prediction, between 0 and 1; a list of shares to draw from for each cell; or a
        schedule ``{start: 0.15, end: 0.5, epochs: 10, shape: linear}`` (or ``cosine``).
    mask_token_prob, random_token_prob
        Probability that a chosen token is replaced by MASK, or by a random gene. The rest stays as it is.

    Examples
    --------
    >>> MaskingConfig(mask_ratio=0.3).mask_token_prob
    0.8
    >>> MaskingConfig(mask_ratio={"start": 0.15, "end": 0.5, "epochs": 10}).mask_ratio["end"]
    0.5
    """

    mask_ratio: Annotated[Any, BeforeValidator(_mask_ratio)] = 0.15
    mask_token_prob: Share = 0.8
    random_token_prob: Annotated[Share, Field(validate_default=True)] = 0.1

    @field_validator("mask_token_prob", "random_token_prob")
    @classmethod
    def _at_most_one(cls, value: float, info: ValidationInfo) -> float:
        other = {"mask_token_prob": "random_token_prob", "random_token_prob": "mask_token_prob"}[str(info.field_name)]
        total = value + info.data.get(other, 0.0)
        if total > 1 + 1e-9:
            raise ValueError(f"and {other}={info.data[other]!r} sum to {total:g}; the two may sum to 1 at most")
        return value


class TokenizerConfig(OpenSection):
    """The tokenizer: its strategy, its own options, and masking.

    Parameters
    ----------
    strategy
        Registered name of the tokenizer. None takes the default of the objective.
    masking
        Masking, for the objectives that mask.
    **options
        Options of the strategy, checked by its constructor.

    Examples
    --------
    >>> config = TokenizerConfig(strategy="rank_value", masking={"mask_ratio": 0.3}, append_eos=True)
    >>> config.masking.mask_ratio, config.user_options()
    (0.3, {'append_eos': True})
    """

    _not_options: ClassVar[frozenset[str]] = frozenset({"strategy", "masking"})

    strategy: Text | None = None
    masking: MaskingConfig = Field(default_factory=MaskingConfig)


class ObjectiveConfig(OpenSection):
    """What training minimises.

    Parameters
    ----------
    name
        Registered name of the objective. None takes the default of the architecture.
    **options
        Options of the objective, checked by its constructor.

    Examples
    --------
    >>> config = ObjectiveConfig(name="joint_embedding", views=8)
    >>> config.name, config.user_options()
    ('joint_embedding', {'views': 8})
    """

    _not_options: ClassVar[frozenset[str]] = frozenset({"name"})

    name: Text | None = None


class ModelConfig(OpenSection):
    """The architecture and its options.

    The fields below are those that most architectures share, with defaults that a model may read. Any other key is an
    option of the architecture, kept as an attribute and checked by its constructor.

    Parameters
    ----------
    architecture
        Registered name of the architecture. None takes the light encoder.
    vocab_size
        Number of token ids, special tokens included. None until the vocabulary is known.
    hidden_dim, num_layers, num_heads
        Width, depth and number of attention heads.
    ffn_dim
        Width inside the feed-forward layers. None leaves it to the architecture.
    dropout
        Dropout probability, in [0, 1).
    max_seq_len
        Largest number of tokens of a cell.
    pooling
        How token states become one cell embedding.
    activation
        Activation function of the feed-forward layers.
    use_expression_values
        Whether expression values enter the embedding.
    layer_norm_eps
        Epsilon of the layer norms.

    Examples
    --------
    >>> config = ModelConfig(architecture="autoregressive_transformer", vocab_size=5000, hidden_dim=64, n_bins=51)
    >>> config.num_layers, config.n_bins, config.user_options()
    (12, 51, {'hidden_dim': 64, 'n_bins': 51})
    """

    _not_options: ClassVar[frozenset[str]] = frozenset({"architecture", "vocab_size"})

    architecture: Text | None = None
    vocab_size: Positive | None = None
    hidden_dim: Positive = 512
    num_layers: Positive = 12
    num_heads: Positive = 8
    ffn_dim: Positive | None = None
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    max_seq_len: Positive = 2048
    pooling: Text = "cls"
    activation: Text = "gelu"
    use_expression_values: bool = True
    layer_norm_eps: Annotated[Float, Field(gt=0)] = 1e-12


class Config(Section):
    """A whole configuration file.

    Parameters
    ----------
    data, tokenizer, objective, model, training, eval, output
        The sections.
    finetune
        Which trained model is fine-tuned; None trains a new one.
    seed
        Seed of everything random.

    Raises
    ------
    pydantic.ValidationError
        If a key is unknown or a value cannot be used. (:func:`load_config` makes it a ``ConfigError`` with the line.)

    Examples
    --------
    >>> config = Config(data={"paths": "cells.h5ad"}, model={"hidden_dim": 64}, training={"max_epochs": 5, "lr": 1e-3})
    >>> config.training.max_epochs, config.training.optimizer.lr, config.model.num_layers
    (5, 0.001, 12)
    >>> config.user_set()["model"]  # what was said, without defaults
    {'hidden_dim': 64}
    """

    data: DataConfig
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    finetune: FinetuneConfig | None = None
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0

    _places: Places = PrivateAttr(default_factory=Places)

    def place_of(self, dotted: str) -> str:
        """Return where an option was set, as the beginning of a message: ``"recipe.yaml, line 3: "``, or nothing.

        Parameters
        ----------
        dotted
            Name of the option, e.g. ``"training.optimizer.lr"``.

        Returns
        -------
        Text, ``""`` if the option was not set in a file.
        """
        return self._places.of(dotted.split("."))

    def name_of(self, dotted: str) -> str | None:
        """Return the name by which an option was set, e.g. ``"training.num_gpus"``; None if it was not, or in Python.

        Parameters
        ----------
        dotted
            Name of the option, e.g. ``"training.devices"``.

        Returns
        -------
        The name, with dots.
        """
        return self._places.name_of(dotted.split("."))

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        plain = {key: value.user_set() if isinstance(value, Section) else value for key, value in raw.items()}
        canonical = apply_aliases(plain)
        # Sections given as objects stay the caller's objects unless an alias moves something between them.
        return raw if canonical == plain else canonical
