"""The sections and options of a configuration, with their defaults."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from scforge._checks import check_mask_ratio
from scforge.config.aliases import Places, apply_aliases
from scforge.errors import SECRET, OptionError

_CENSUS = "cellxgene_census"

TASK_ALIASES = {
    "batch_integration": "integration",
    "cell_type_annotation": "annotation",
    "perturbation_prediction": "perturbation",
}
"""A mapping from task alias to registered name."""

EVALUATIONS = {"perturbbench": "perturbation"}
"""A mapping from evaluation to its task."""

_BENCHMARK = {"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1, "maxProperties": 1}]}


def _number(value: Any) -> Any:
    # Python counts True as 1, so ``batch_size: yes`` would train with batches of one cell.
    if isinstance(value, bool):
        raise ValueError("is not a number")
    if isinstance(value, numbers.Integral):  # pydantic knows no integers of NumPy
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | os.PathLike) else value


def _needs(other: str, fix: str, *options: str) -> Any:
    """Return a validator of options that have no effect if another option is None."""

    def validate(cls: Any, value: Any, info: ValidationInfo) -> Any:
        if value not in (None, []) and info.data.get(other, "") is None:
            raise ValueError(f"has no effect without {fix}")
        return value

    return field_validator(*options)(validate)


Int = Annotated[int, BeforeValidator(_number)]
Positive = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections. Unknown keys raise an error, and assignments are validated in the same way as a file."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, raw: Any) -> Any:
        # A section whose keys are all commented out is None in YAML.
        return {} if raw is None else raw

    def user_set(self) -> dict[str, Any]:
        """Return the options that the user set, in schema order, with nested sections as dictionaries."""
        content: dict[str, Any] = {}
        for name, value in self:
            if isinstance(value, Section):
                inner = value.user_set()
                if inner or name in self.model_fields_set:
                    content[name] = inner
            elif name in self.model_fields_set:
                content[name] = value
        return content


class OpenSection(Section):
    """A section that also contains options of the class it names, which are checked by the constructor."""

    model_config = ConfigDict(extra="allow")

    def user_options(self) -> dict[str, Any]:
        """Return the options that the user set, for the constructor of the named class."""
        return {key: value for key, value in self.user_set().items() if key not in type(self).model_fields}


def _normalize(value: Any) -> Any:
    if value == "scran":
        raise ValueError(
            "is not supported, because its size factors are pooled over cells and tokenizers process single cells; "
            "remove the key to scale to the library size"
        )
    return value


def _size(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is None or whole or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be an amount of memory such as '16GB', or a number of bytes")


def _filters(value: Any) -> Any:
    if value is None or isinstance(value, dict) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be columns with their values, such as {tissue: [lung, heart]}, or a SOMA value_filter")


class PreprocessingConfig(Section):
    """Choice of genes, and normalization of their values.

    The tokenizer applies the normalization to raw counts, cell by cell, in training and inference. The options are
    saved with the model.

    Parameters
    ----------
    hvg_selection
        Number of highly variable genes to keep; 0 keeps all. If None, uses the default of the architecture.
    keep_genes
        Genes that are always kept.
    normalize
        ``"library_size"`` scales the counts of a cell to `target_sum`; ``"none"`` does not scale them.
    target_sum
        Total counts per cell after normalization. If None, uses 10,000.
    log1p
        Whether to apply log1p.

    Examples
    --------
    >>> PreprocessingConfig(hvg_selection=2000)
    PreprocessingConfig(hvg_selection=2000, keep_genes=[], normalize='library_size', target_sum=None, log1p=True)
    """

    hvg_selection: Annotated[Int, Field(ge=0)] | None = None
    keep_genes: list[str] = Field(default_factory=list)
    normalize: Annotated[Literal["library_size", "none"], BeforeValidator(_normalize)] = "library_size"
    target_sum: Annotated[Float, Field(gt=0)] | None = None
    log1p: bool = True

    @field_validator("target_sum")
    @classmethod
    def _needs_scaling(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("normalize") == "none":
            raise ValueError("has no effect with normalize='none'; remove one of the two")
        return value


class SamplingConfig(Section):
    """Sampling of training cells by class, with replacement, instead of using each cell once per epoch.

    If an option is None, uses the default of :class:`scforge.training.CellDataModule`.

    Parameters
    ----------
    balance_key
        Column of ``obs`` with the classes. If None, uses each cell once.
    warmup_epochs
        Number of epochs over which the strength changes from `start` to `end`.
    start, end
        Strength: 0 samples classes by their frequency, and 1 samples all classes equally often.

    Examples
    --------
    >>> config = SamplingConfig(balance_key="cell_type", warmup_epochs=5)
    >>> config.balance_key, config.end is None
    ('cell_type', True)
    """

    balance_key: Text | None = None
    warmup_epochs: Annotated[Int, Field(ge=0)] | None = None
    start: Share | None = None
    end: Share | None = None

    _needs_key = _needs(
        "balance_key",
        "balance_key, the column of obs with the classes; set balance_key",
        "warmup_epochs",
        "start",
        "end",
    )


class SplitConfig(Section):
    """Choice of the validation cells; ``training.validation_size`` sets their fraction.

    Parameters
    ----------
    by
        ``"cell"``, or a column of ``obs`` with groups, e.g. donors, that are held out as a whole.

    Examples
    --------
    >>> SplitConfig(by="donor").by, SplitConfig().by
    ('donor', 'cell')
    """

    by: Text = "cell"


class DataConfig(Section):
    """Source of the cells, choice of genes, and batching.

    Parameters
    ----------
    source
        ``"local"`` for `paths`, or ``"cellxgene_census"`` for a Census query.
    paths
        One or more h5ad or zarr files, stores, patterns of paths, or URLs of these. A single path may be given as text.
    organism
        Organism in the Census. If None, uses ``"homo_sapiens"``.
    filters
        Census cells to use: columns of ``obs`` with a value or a list of values, or a SOMA ``value_filter``.
    census_version
        Census release, e.g. ``"2025-01-30"``. If None, uses ``"stable"``.
    uri
        SOMA experiment, or a folder with the Census layout, to query instead of the Census.
    obs_columns
        Columns of ``obs`` to keep in addition to the columns in other options. If None, keeps all columns of local
        cells, and no additional columns of the Census.
    storage_options
        fsspec options for the file system of URLs; for the Census, TileDB options.
    modality
        Modality of a MuData.
    memory
        Maximum memory for cells, e.g. ``"16GB"``.
    cache
        Store into which cells are converted once, and from which they are read. If None, converts only cells that do
        not fit into memory, into ``~/.cache/scforge/stores`` (or ``$XDG_CACHE_HOME``).
    gene_vocab
        ``"from_data"``, a shipped vocabulary such as ``"human_protein_coding"``, or a vocabulary file.
    max_genes
        Maximum number of genes per cell; the most expressed genes are kept. If None, uses the tokenizer's default. Also
        accepted as ``tokenizer.max_genes``.
    layer
        Layer with raw counts. If None, reads ``adata.X``, or ``"raw"`` of the Census.
    gene_key
        Column of ``var`` with the gene names. If None, reads ``adata.var_names``, or the best match in the Census.
    batch_key, labels_key
        Columns of ``obs`` with the batch and the label of each cell.
    preprocessing
        Choice of genes.
    sampling
        Sampling by class.
    split
        Choice of the validation cells.
    max_tokens_per_batch
        Maximum number of tokens per batch, including padding. Cells of similar length then share a batch. Also accepted
        as ``training.max_tokens_per_batch``.
    num_threads
        Number of threads that tokenize ahead; 0 tokenizes in the training thread. Also accepted as
        ``data.num_workers``.
    pin_memory
        Whether to put batches into pinned memory for copies to a CUDA device. If None, does so if a CUDA device is
        available.

    Examples
    --------
    >>> config = DataConfig(paths="cells.h5ad", batch_key="donor", preprocessing={"hvg_selection": 2000})
    >>> config.paths, config.preprocessing.hvg_selection, config.gene_vocab
    (['cells.h5ad'], 2000, 'from_data')
    >>> DataConfig(source="cellxgene_census", filters={"tissue": "lung"}).paths is None
    True
    """

    source: Literal["local", "cellxgene_census"] = "local"
    paths: Annotated[list[Path] | None, Field(min_length=1, validate_default=True)] = None
    organism: Text | None = None
    filters: Annotated[Any, BeforeValidator(_filters)] = None
    census_version: Text | None = None
    uri: Path | None = None
    obs_columns: Annotated[list[Text] | None, BeforeValidator(_as_list)] = None
    storage_options: dict[str, Any] | None = None
    modality: Text | None = None
    memory: Annotated[Any, BeforeValidator(_size)] = None
    cache: Path | None = None
    gene_vocab: Path = "from_data"
    max_genes: Positive | None = None
    layer: Text | None = None
    gene_key: Text | None = None
    batch_key: Text | None = None
    labels_key: Text | None = None
    preprocessing: PreprocessingConfig = Field(default_factory=PreprocessingConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    split: SplitConfig = Field(default_factory=SplitConfig)
    max_tokens_per_batch: Positive | None = None
    num_threads: Annotated[Int, Field(ge=0)] | None = None
    pin_memory: bool | None = None

    @field_validator("paths", mode="before")
    @classmethod
    def _paths(cls, value: Any, info: ValidationInfo) -> Any:
        census = info.data.get("source") == _CENSUS
        if value is None and not census:
            raise PydanticCustomError("missing", "Field required")
        if value is not None and census:
            raise ValueError(f"has no effect with data.source={_CENSUS!r}; remove one of the two")
        return _as_list(value)

    @field_validator("paths", "uri", "storage_options")
    @classmethod
    def _whole_credentials(cls, value: Any) -> Any:
        if any(mark in str(value) for mark in (f"://{SECRET}@", f"?{SECRET}", f"'{SECRET}'")):
            raise ValueError("requires a credential, which scforge does not save to files; enter the credential again")
        return value

    @field_validator("organism", "filters", "census_version", "uri", "modality")
    @classmethod
    def _check_source(cls, value: Any, info: ValidationInfo) -> Any:
        local = info.field_name == "modality"
        if value is not None and info.data.get("source", "") == (_CENSUS if local else "local"):
            needed = "local" if local else _CENSUS
            raise ValueError(f"has no effect without data.source={needed!r}; set data.source={needed!r}, or remove it")
        return value


# Separate validators instead of ``int | str``, which reports an error once for each type.
def _batch_size(value: Any) -> Any:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if value is None or value == "auto":
        return value
    if whole and value < 1:
        raise ValueError("must be at least 1")
    if whole:
        return int(value)
    if isinstance(value, str) and value.strip().isdecimal() and int(value) >= 1:
        return int(value)
    raise ValueError("must be a whole number of cells, or 'auto' for as many cells as fit into memory")


def _devices(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == -1):
        return value
    if isinstance(value, str) and (value == "auto" or all(part.strip().isdecimal() for part in value.split(","))):
        return value
    raise ValueError("must be a number of devices, -1 for all devices, 'auto', or indices such as '0,1'")


BatchSize = Annotated[
    Any,
    BeforeValidator(_batch_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}, {"type": "null"}]}),
]
Devices = Annotated[
    Any,
    BeforeValidator(_devices),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": -1}, {"type": "string"}]}),
]


class OptimizerConfig(Section):
    """The optimizer. If an option is None, uses the default of the objective.

    Parameters
    ----------
    name
        ``"adamw"``, ``"adam"``, ``"sgd"``, or ``"muon"``, which orthogonalizes the updates of the weight matrices
        inside the layers.
    lr
        Peak learning rate. Also accepted as ``training.lr``.
    weight_decay
        Weight decay.

    Examples
    --------
    >>> OptimizerConfig(name="muon", lr=1e-3).lr
    0.001
    """

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    lr: Annotated[Float, Field(gt=0)] | None = None
    weight_decay: Annotated[Float, Field(ge=0)] | None = None


class SchedulerConfig(Section):
    """The learning-rate schedule. If an option is None, uses the default of the objective.

    Parameters
    ----------
    name
        Name of the schedule.
    warmup_steps
        Number of optimizer steps until the peak learning rate.

    Examples
    --------
    >>> SchedulerConfig(name="cosine_warmup", warmup_steps=500).warmup_steps
    500
    """

    name: Literal["cosine_warmup", "cosine", "linear_warmup", "linear", "one_cycle", "constant"] | None = None
    warmup_steps: Annotated[Int, Field(ge=0)] | None = None


class SharedTraining(Section):
    """Options of a training run in ``Encoder.train`` and in a configuration, with their checks.

    Parameters
    ----------
    batch_size
        Number of cells per step and device; ``"auto"`` finds out how many fit into memory. If None, uses the default of
        the objective.
    early_stopping
        Whether to stop when the validation loss no longer decreases after the learning-rate warm-up.
    num_nodes
        Number of machines with this many devices each.
    gradient_clip_val
        Maximum gradient norm; 0 disables clipping.
    accumulate_grad_batches
        Number of batches whose gradients are accumulated per step, which multiplies the number of cells per step.
    gradient_checkpointing
        Whether to recompute layers in the backward pass instead of storing their activations, which saves memory but
        takes more time. If None, uses the setting of the model.
    layer_lr_decay
        Ratio of the learning rates of a layer and the layer above it, e.g. 0.8. If None, uses one learning rate.
    gradual_unfreezing
        Number of epochs after which the next lower layer is unfrozen, starting with the top layer. If None, trains all
        layers from the start.
    compile
        Whether to compile the model with ``torch.compile``: the first step is slow, and later steps are faster.
    ema_decay
        Decay of an exponential moving average of the weights, e.g. 0.999. The average is validated and saved.
    log_every_n_steps
        Number of steps between two lines of the log.
    checkpoint_every_n_steps
        Number of steps between two checkpoints, in addition to the checkpoint at the end of each epoch.

    Examples
    --------
    >>> SharedTraining(ema_decay=0.999).gradient_clip_val
    1.0
    """

    batch_size: BatchSize = None
    early_stopping: bool = True
    num_nodes: Positive = 1
    gradient_clip_val: Annotated[Float, Field(ge=0)] = 1.0
    accumulate_grad_batches: Positive = 1
    gradient_checkpointing: bool | None = None
    layer_lr_decay: Annotated[Float, Field(gt=0, le=1)] | None = None
    gradual_unfreezing: Positive | None = None
    compile: bool = False
    ema_decay: Annotated[Float, Field(gt=0, lt=1)] | None = None
    log_every_n_steps: Positive = 10
    checkpoint_every_n_steps: Positive | None = None


class TrainingConfig(SharedTraining):
    """The training run. If an option is None, uses the default of the objective, or a value that suits the data.

    Parameters
    ----------
    max_epochs, max_steps
        Maximum number of epochs and of steps; training ends when one of them is reached.
    validation_size
        Fraction of cells held out for validation, in [0, 1).
    early_stopping_patience
        Number of epochs without improvement before stopping.
    precision
        Lightning precision; ``"auto"`` uses bfloat16 if it is faster.
    accelerator, devices
        Type of hardware, and number of devices per machine (or ``"auto"``, or a list of indices as text, ``"0,1"``).
        ``training.num_gpus`` sets both.
    strategy
        Parallel strategy: ``"ddp"`` copies the model to each device, and ``"fsdp"`` shards the weights; ``"auto"`` uses
        ``"ddp"`` for several devices.
    optimizer, scheduler
        Optimizer and learning-rate schedule.

    Examples
    --------
    >>> config = TrainingConfig(max_epochs=20, batch_size="auto", optimizer={"lr": 1e-4})
    >>> config.max_epochs, config.optimizer.lr, config.gradient_clip_val
    (20, 0.0001, 1.0)
    """

    max_epochs: Positive | None = None
    max_steps: Positive | None = None
    validation_size: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    early_stopping_patience: Positive | None = None
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"] | None = None
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Devices = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)


def _task(value: str) -> str:
    return TASK_ALIASES.get(value, value)


def _freeze(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError("must be true, false or a number of layers")


def _lora(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        return value
    raise ValueError("must be true, false or a section with options such as {r: 8}")


def _evaluate(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return EVALUATIONS.get(value, value) if isinstance(value, str) else value
    raise ValueError("must be true, false or the name of an evaluation")


Freeze = Annotated[
    Any, BeforeValidator(_freeze), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1}]})
]
Lora = Annotated[
    Any, BeforeValidator(_lora), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object"}], "default": False})
]
Evaluate = Annotated[
    Any, BeforeValidator(_evaluate), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string"}]})
]
Part = Annotated[Float, Field(ge=0, lt=1)]


class FinetuneConfig(OpenSection):
    """Fine-tuning of a trained model for a task. Any other key is an option of the task, e.g. ``class_weights``.

    The base model determines architecture, tokenizer and genes. Batches, epochs and learning rates are set in
    ``training``, and cells are set in ``data``.

    Parameters
    ----------
    base_model
        Base model to fine-tune: its folder, a hub repository (``hf://org/name``), or ``scforge://name``.
    task
        Registered name of the task, e.g. ``"annotation"``.
    labels_key, batch_key
        Columns of ``obs`` for the task. If None, uses the columns in the section ``data``.
    validation_size, test_size
        Fractions of the cells in the validation set, which is used to select the best epoch, and in the test set.
    split_by
        Column of ``obs`` with groups, e.g. donors, that are held out as a whole. If None, splits by cell.
    split_key
        Column of ``obs`` with the values ``"train"``, ``"validation"`` or ``"test"``, instead of a random split.
    freeze
        If True, trains only the head; a number freezes the embeddings and this many layers.
    lora
        Whether to train low-rank adapters instead of the weights: True, or adapter options.
    head
        Options of the head: ``hidden_dim`` and ``dropout``.
    evaluate
        Whether to score the test cells at the end, with baselines. Also accepts the name of an evaluation that matches
        the task, e.g. ``"perturbbench"``.
    **options
        Options of the task, checked by its constructor.

    Examples
    --------
    >>> FinetuneConfig(base_model="ck/final", task="cell_type_annotation", class_weights="balanced").user_options()
    {'class_weights': 'balanced'}
    """

    base_model: Path
    task: Annotated[Text, AfterValidator(_task)]
    labels_key: Text | None = None
    batch_key: Text | None = None
    validation_size: Part = 0.1
    test_size: Part = 0.1
    split_by: Text | None = None
    split_key: Text | None = None
    freeze: Freeze = False
    lora: Lora = False
    head: dict[Text, Any] | None = None
    evaluate: Evaluate = False

    @field_validator("test_size")
    @classmethod
    def _leaves_cells(cls, value: float, info: ValidationInfo) -> float:
        validation_size = info.data.get("validation_size", 0.0)
        if value + validation_size >= 1:
            raise ValueError(f"and validation_size={validation_size:g} leave no training cells; reduce one of the two")
        return value

    @field_validator("split_key")
    @classmethod
    def _one_split(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("split_by") is not None:
            raise ValueError(f"has no effect with split_by={info.data['split_by']!r}; keep one of the two")
        return value

    @field_validator("evaluate")
    @classmethod
    def _has_cells(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        if isinstance(value, str) and value != info.data.get("task", value):
            raise ValueError(
                f"is not an evaluation of the task {info.data['task']!r}; use evaluate=true (--eval) for the default"
            )
        if value and info.data.get("test_size") == 0 and info.data.get("split_key") is None:
            raise ValueError("requires test cells, but test_size=0; set test_size above 0")
        return value


def _benchmarks(value: Any) -> Any:
    if value is None:
        return None
    benchmarks = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(benchmarks, list):
        raise ValueError("is not a list of benchmarks")
    for benchmark in benchmarks:
        name, options = benchmark, None
        if isinstance(benchmark, Mapping) and len(benchmark) == 1:
            name, options = next(iter(benchmark.items()))
        has_text_keys = isinstance(options, Mapping | None) and all(isinstance(key, str) for key in options or ())
        if not (isinstance(name, str) and name and has_text_keys):
            raise ValueError(
                "contains an item that is not a benchmark; pass the name of each benchmark, optionally with options, "
                "e.g. [cell_type_annotation: {dataset: held_out}]"
            )
    return benchmarks


Benchmarks = Annotated[
    Any,
    BeforeValidator(_benchmarks),
    WithJsonSchema({"anyOf": [{"type": "array", "items": _BENCHMARK}, *_BENCHMARK["anyOf"], {"type": "null"}]}),
]


class OutputConfig(Section):
    """Output files and folders. If an option is None, nothing is written.

    Parameters
    ----------
    log_dir
        Folder of the training log.
    loggers
        One or several of the loggers ``"csv"``, ``"tensorboard"`` and ``"wandb"``. If None, uses ``"csv"`` if `log_dir`
        is set.
    project
        Weights & Biases project.
    run_name
        Name of the run in TensorBoard and Weights & Biases.
    wandb_mode
        ``"online"``; ``"offline"``, which writes the log to `log_dir` for a later upload; or ``"disabled"``.
    checkpoint_dir
        Folder of checkpoints and the trained model. If neither this option nor `embedding` is set, ``scforge train``
        uses ``checkpoints/NAME`` for a file ``NAME.yaml``, and ``scforge finetune`` uses ``DATA_TASK``.
    save_top_k
        Number of epochs with the lowest validation loss to keep as models; -1 keeps all epochs.
    keep_last
        Number of latest checkpoints to keep for resuming.
    embedding
        h5ad file to write with the data and ``obsm["X_scforge"]``.

    Examples
    --------
    >>> config = OutputConfig(log_dir="logs", loggers="tensorboard", checkpoint_dir="checkpoints")
    >>> config.loggers, config.save_top_k
    (['tensorboard'], 1)
    """

    log_dir: Path | None = None
    loggers: Annotated[list[Literal["csv", "tensorboard", "wandb"]] | None, BeforeValidator(_as_list)] = None
    project: Text | None = None
    run_name: Text | None = None
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    checkpoint_dir: Path | None = None
    save_top_k: Annotated[Int, Field(ge=-1)] = 1
    keep_last: Positive = 1
    embedding: Path | None = None

    _needs_folder = _needs("log_dir", "output.log_dir, the log folder; set output.log_dir", "loggers")

    @field_validator("project", "run_name", "wandb_mode")
    @classmethod
    def _needs_logger(cls, value: str | None, info: ValidationInfo) -> str | None:
        takers = ["wandb", "tensorboard"] if info.field_name == "run_name" else ["wandb"]
        loggers = info.data.get("loggers", takers) or []
        if value is not None and not set(takers) & set(loggers):
            raise ValueError(f"has no effect without a logger that supports it; add {takers[0]!r} to output.loggers")
        return value

    @field_validator("embedding")
    @classmethod
    def _h5ad(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".h5ad"):
            raise ValueError("is not the name of an h5ad file; use a name that ends in '.h5ad'")
        return value


class EvalConfig(Section):
    """Benchmarks on held-out cells during training, whose scores are logged with the loss.

    Parameters
    ----------
    benchmarks
        Registered names, or names with options: ``[cell_type_annotation: {labels_key: cell_type}]``. The option
        ``dataset`` is the name of one of `datasets`, whose cells are used instead of the held-out cells.
    every_n_epochs
        Number of epochs between evaluations; the last epoch is always evaluated.
    datasets
        A mapping from data set name to h5ad file.

    Examples
    --------
    >>> config = EvalConfig(benchmarks={"cell_type_annotation": {"labels_key": "cell_type"}}, every_n_epochs=5)
    >>> config.benchmarks
    [{'cell_type_annotation': {'labels_key': 'cell_type'}}]
    """

    benchmarks: Benchmarks = None
    every_n_epochs: Positive = 1
    datasets: dict[Text, Path] = Field(default_factory=dict)

    # An empty list disables the benchmarks of a file.
    _needs_benchmarks = _needs(
        "benchmarks",
        "eval.benchmarks; set eval.benchmarks, e.g. to [cell_type_annotation]",
        "every_n_epochs",
        "datasets",
    )


def _mask_ratio(value: Any) -> Any:
    try:
        check_mask_ratio(value)
    except OptionError as error:
        raise ValueError(error.problem) from None  # the message of a configuration names option and value itself
    return value


class MaskingConfig(Section):
    """Choice and replacement of masked tokens.

    Parameters
    ----------
    mask_ratio
        Fraction of tokens chosen for prediction, between 0 and 1; a list of fractions from which one is sampled for
        each cell; or a schedule ``{start: 0.15, end: 0.5, epochs: 10, shape: linear}`` (or ``cosine``).
    mask_token_prob, random_token_prob
        Probabilities that a chosen token is replaced by MASK, or by a random gene. Other chosen tokens are unchanged.

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
            raise ValueError(f"and {other}={info.data[other]!r} sum to {total:g}; their sum must not exceed 1")
        return value


class TokenizerConfig(OpenSection):
    """The tokenizer: strategy, options, and masking.

    Parameters
    ----------
    strategy
        Registered name of the tokenizer. If None, uses the default of the objective.
    masking
        Masking, for objectives that use it.
    **options
        Options of the strategy, checked by its constructor.

    Examples
    --------
    >>> config = TokenizerConfig(strategy="rank_value", masking={"mask_ratio": 0.3}, append_eos=True)
    >>> config.masking.mask_ratio, config.user_options()
    (0.3, {'append_eos': True})
    """

    strategy: Text | None = None
    masking: MaskingConfig = Field(default_factory=MaskingConfig)


class ObjectiveConfig(OpenSection):
    """The objective that training minimizes.

    Parameters
    ----------
    name
        Registered name of the objective. If None, uses the default of the architecture.
    **options
        Options of the objective, checked by its constructor.

    Examples
    --------
    >>> config = ObjectiveConfig(name="joint_embedding", views=8)
    >>> config.name, config.user_options()
    ('joint_embedding', {'views': 8})
    """

    name: Text | None = None


class ModelConfig(OpenSection):
    """The architecture and its options.

    The options below are shared by most architectures. Any other key is an option of the architecture, which is stored
    as an attribute and checked by its constructor.

    Parameters
    ----------
    architecture
        Registered name of the architecture. If None, uses the light encoder.
    vocab_size
        Number of token ids, including special tokens. None until the vocabulary is known.
    hidden_dim, num_layers, num_heads
        Width, depth and number of attention heads.
    ffn_dim
        Width inside the feed-forward layers. If None, uses the default of the architecture.
    dropout
        Dropout probability, in [0, 1).
    max_seq_len
        Maximum number of tokens per cell.
    pooling
        Pooling of token states to a cell embedding.
    activation
        Activation function of the feed-forward layers.
    use_expression_values
        Whether expression values are part of the token embedding.
    layer_norm_eps
        Epsilon of the layer norms.

    Examples
    --------
    >>> config = ModelConfig(architecture="autoregressive_transformer", vocab_size=5000, hidden_dim=64, n_bins=51)
    >>> config.num_layers, config.n_bins, config.user_options()
    (12, 51, {'hidden_dim': 64, 'n_bins': 51})
    """

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

    def user_options(self) -> dict[str, Any]:
        """Return the options that the user set, including options shared by most architectures."""
        return {key: value for key, value in self.user_set().items() if key not in ("architecture", "vocab_size")}


class Config(Section):
    """A complete configuration file.

    Parameters
    ----------
    data, tokenizer, objective, model, training, eval, output
        The sections.
    finetune
        Fine-tuning of a trained model. If None, trains a new model.
    seed
        Random seed.

    Raises
    ------
    pydantic.ValidationError
        If a key is unknown or a value is invalid. (:func:`load_config` converts it to a ``ConfigError`` with the line.)

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
        """Return the location of an option as the prefix of a message, e.g. ``"recipe.yaml, line 3: "``.

        Parameters
        ----------
        dotted
            Name of the option, e.g. ``"training.optimizer.lr"`` or ``"data.paths.0"``.

        Returns
        -------
        The text, or ``""`` if the option was not set in a file.
        """
        return self._places.of([int(key) if key.isdecimal() else key for key in dotted.split(".")])

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        plain = {key: value.user_set() if isinstance(value, Section) else value for key, value in raw.items()}
        canonical = apply_aliases(plain)
        # Sections given as objects stay the caller's objects unless an alias moves something between them.
        return raw if canonical == plain else canonical
