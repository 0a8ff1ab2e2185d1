"""What may stand in a configuration file: one pydantic class a section.

A default stands here only where the loop or the data room needs one. Options of an architecture, a tokenizer or an
objective have their defaults in that class's constructor, which receives what the user set (``user_options``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from scforge._checks import check_mask_ratio
from scforge.config.aliases import apply_aliases
from scforge.errors import OptionError

__all__ = [
    "Config",
    "DataConfig",
    "MaskingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OutputConfig",
    "PreprocessingConfig",
    "SchedulerConfig",
    "Section",
    "TokenizerConfig",
    "TrainingConfig",
]


def _no_bool(value: Any) -> Any:
    # Python counts True as 1, so ``batch_size: yes`` would train with batches of one cell.
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return value


def _mask_ratio(value: Any) -> Any:
    try:
        check_mask_ratio(value)
    except OptionError as error:
        # The message of a configuration names the option and the value itself.
        raise ValueError(str(error).split("=", 1)[1].removeprefix(f"{value!r} ")) from None
    return value


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_Int = Annotated[int, BeforeValidator(_no_bool)]
_Positive = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
_Float = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
_Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
_Text = Annotated[str, Field(min_length=1)]
_Path = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and assignments are checked like a file."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, raw: Any) -> Any:
        # A section whose keys are all commented out is None in YAML.
        return {} if raw is None else raw

    def user_set(self) -> dict[str, Any]:
        """Return what the user set, nested sections as dictionaries, in the order of the schema."""
        content: dict[str, Any] = {}
        for name, value in self:
            if isinstance(value, Section):
                inner = value.user_set()
                if inner or name in self.model_fields_set:
                    content[name] = inner
            elif name in self.model_fields_set:
                content[name] = value
        return content


class _OpenSection(Section):
    """A section that also holds the options of the class it names; that class's constructor checks them."""

    model_config = ConfigDict(extra="allow")
    _not_options: ClassVar[frozenset[str]] = frozenset()

    def user_options(self) -> dict[str, Any]:
        """Return the options that the user set, for the constructor of the named class."""
        return {key: value for key, value in self.user_set().items() if key not in self._not_options}


class PreprocessingConfig(Section):
    """Choice of genes before tokenising. Counts stay raw: each tokenizer normalises by library size itself.

    Parameters
    ----------
    hvg_selection
        Number of highly variable genes to keep; 0 keeps all. None takes what suits the architecture.
    """

    hvg_selection: Annotated[_Int, Field(ge=0)] | None = None


class DataConfig(Section):
    """Where the cells come from, and which genes count.

    Parameters
    ----------
    source
        Kind of source: ``"local"`` for h5ad files.
    paths
        One or more files. A single path may be given as text.
    gene_vocab
        ``"from_data"``, a shipped vocabulary such as ``"human_protein_coding"``, or a vocabulary file.
    max_genes
        Genes kept per cell, the most expressed. None takes the tokenizer's default. Also accepted as
        ``tokenizer.max_genes``.
    layer
        Key in ``adata.layers`` with raw counts. None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names. None reads ``adata.var_names``.
    batch_key, labels_key
        Columns of ``adata.obs`` with the batch and the label of each cell.
    preprocessing
        Choice of genes.
    """

    source: Literal["local"] = "local"
    paths: Annotated[list[_Path], Field(min_length=1)]
    gene_vocab: _Path = "from_data"
    max_genes: _Positive | None = None
    layer: _Text | None = None
    gene_key: _Text | None = None
    batch_key: _Text | None = None
    labels_key: _Text | None = None
    preprocessing: PreprocessingConfig = Field(default_factory=PreprocessingConfig)

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | os.PathLike) else value


class MaskingConfig(Section):
    """Which tokens are hidden for prediction, and what stands in their place.

    Parameters
    ----------
    mask_ratio
        Share of tokens chosen for prediction, between 0 and 1; a list of shares to draw from for each cell; or a
        schedule ``{start: 0.15, end: 0.5, epochs: 10, shape: linear}`` (or ``cosine``).
    mask_token_prob, random_token_prob
        Probability that a chosen token is replaced by MASK, or by a random gene. The rest stays as it is.
    """

    mask_ratio: Annotated[Any, BeforeValidator(_mask_ratio)] = 0.15
    mask_token_prob: _Share = 0.8
    random_token_prob: Annotated[_Share, Field(validate_default=True)] = 0.1

    @field_validator("mask_token_prob", "random_token_prob")
    @classmethod
    def _at_most_one(cls, value: float, info: ValidationInfo) -> float:
        other = {"mask_token_prob": "random_token_prob", "random_token_prob": "mask_token_prob"}[str(info.field_name)]
        total = value + info.data.get(other, 0.0)
        if total > 1 + 1e-9:
            raise ValueError(f"and {other}={info.data[other]!r} sum to {total:g}; the two may sum to 1 at most")
        return value


class TokenizerConfig(_OpenSection):
    """The tokenizer: its strategy, its own options, and masking.

    Parameters
    ----------
    strategy
        Registered name of the tokenizer. None takes the default of the objective.
    masking
        Masking, for the objectives that mask.
    **options
        Options of the strategy, checked by its constructor.
    """

    _not_options: ClassVar[frozenset[str]] = frozenset({"strategy", "masking"})

    strategy: _Text | None = None
    masking: MaskingConfig = Field(default_factory=MaskingConfig)


class ObjectiveConfig(_OpenSection):
    """What training minimises.

    Parameters
    ----------
    name
        Registered name of the objective. None takes the default of the architecture.
    **options
        Options of the objective, checked by its constructor.
    """

    _not_options: ClassVar[frozenset[str]] = frozenset({"name"})

    name: _Text | None = None


class ModelConfig(_OpenSection):
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

    architecture: _Text | None = None
    vocab_size: _Positive | None = None
    hidden_dim: _Positive = 512
    num_layers: _Positive = 12
    num_heads: _Positive = 8
    ffn_dim: _Positive | None = None
    dropout: Annotated[_Float, Field(ge=0, lt=1)] = 0.1
    max_seq_len: _Positive = 2048
    pooling: _Text = "cls"
    activation: _Text = "gelu"
    use_expression_values: bool = True
    layer_norm_eps: Annotated[_Float, Field(gt=0)] = 1e-12


class OptimizerConfig(Section):
    """The optimizer; None takes the default of the training plan.

    Parameters
    ----------
    name
        ``"adamw"``.
    lr
        Highest learning rate.
    weight_decay
        Weight decay.
    """

    name: Literal["adamw"] = "adamw"
    lr: Annotated[_Float, Field(gt=0)] | None = None
    weight_decay: Annotated[_Float, Field(ge=0)] | None = None


class SchedulerConfig(Section):
    """The course of the learning rate; None takes the default of the training plan.

    Parameters
    ----------
    name
        Name of the schedule.
    warmup_steps
        Optimizer steps until the highest learning rate.
    """

    name: Literal["cosine_warmup", "linear_warmup", "one_cycle", "constant"] | None = None
    warmup_steps: Annotated[_Int, Field(ge=0)] | None = None


class TrainingConfig(Section):
    """The training run; None takes the default of the training plan.

    Parameters
    ----------
    batch_size
        Cells per step and device.
    max_epochs, max_steps
        Where training ends, whichever comes first.
    validation_size
        Share of cells held out for validation, in [0, 1).
    early_stopping
        Stop when the validation loss no longer falls.
    early_stopping_patience
        Epochs without an improvement until then.
    precision
        Precision of the arithmetic, as Lightning names it.
    accelerator, devices
        Hardware: kind, and number of devices (or ``"auto"``, or a list of indices as text, ``"0,1"``).
    gradient_clip_val
        Largest norm of the gradient; 0 does not clip.
    optimizer, scheduler
        Optimizer and course of the learning rate.
    """

    batch_size: _Positive | None = None
    max_epochs: _Positive | None = None
    max_steps: _Positive | None = None
    validation_size: Annotated[_Float, Field(ge=0, lt=1)] = 0.1
    early_stopping: bool = True
    early_stopping_patience: _Positive | None = None
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"] | None = None
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Any = 1
    gradient_clip_val: Annotated[_Float, Field(ge=0)] = 1.0
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)

    @field_validator("devices")
    @classmethod
    def _devices(cls, value: Any) -> int | str:
        # One validator instead of ``int | str``, which reports a mistake twice, once for each type.
        if isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == -1):
            return value
        if isinstance(value, str) and (value == "auto" or all(part.strip().isdecimal() for part in value.split(","))):
            return value
        raise ValueError("is neither a number of devices, nor -1 for all, nor 'auto', nor indices such as '0,1'")


class OutputConfig(Section):
    """What is written, and where; None writes nothing.

    Parameters
    ----------
    log_dir
        Folder of the training log.
    checkpoint_dir
        Folder of checkpoints and of the trained model.
    save_top_k
        Checkpoints to keep, those with the lowest validation loss; -1 keeps all.
    embedding
        h5ad file to write with the data and ``obsm["X_scforge"]``.
    """

    log_dir: _Path | None = None
    checkpoint_dir: _Path | None = None
    save_top_k: Annotated[_Int, Field(ge=-1)] = 1
    embedding: _Path | None = None

    @field_validator("embedding")
    @classmethod
    def _h5ad(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".h5ad"):
            raise ValueError("is not the name of an h5ad file; let it end in '.h5ad'")
        return value


class Config(Section):
    """A whole configuration file.

    Parameters
    ----------
    data, tokenizer, objective, model, training, output
        The sections.
    seed
        Seed of everything random.
    """

    data: DataConfig
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)
    seed: Annotated[_Int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        plain = {key: value.user_set() if isinstance(value, Section) else value for key, value in raw.items()}
        canonical = apply_aliases(plain)
        # Sections given as objects stay the caller's objects unless an alias moves something between them.
        return raw if canonical == plain else canonical
