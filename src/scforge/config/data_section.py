"""The section ``data`` of a configuration file: where the cells come from, and how they become batches."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from scforge.config._fields import Float, Int, Path, Positive, Section, Share, Text
from scforge.errors import SECRET

__all__ = ["DataConfig", "PreprocessingConfig", "SamplingConfig", "SplitConfig"]

_CENSUS = "cellxgene_census"


def _normalize(value: Any) -> Any:
    if value == "scran":
        raise ValueError(
            "is not supported: its size factors are pooled over cells, and tokenizers see one cell at a time; "
            "remove the key, which scales to the library size"
        )
    return value


def _size(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is None or whole or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("is not an amount of memory such as '16GB', or a number of bytes")


def _filters(value: Any) -> Any:
    if value is None or isinstance(value, dict) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("is neither columns with their values, such as {tissue: [lung, heart]}, nor a SOMA value_filter")


class PreprocessingConfig(Section):
    """Choice of genes, and the values of genes that the model is given.

    The tokenizer makes them of raw counts, cell by cell, in training and in inference: its options are saved.

    Parameters
    ----------
    hvg_selection
        Number of highly variable genes to keep; 0 keeps all. None takes what suits the architecture.
    keep_genes
        Genes that are among them however they vary.
    normalize
        ``"library_size"`` scales the counts of a cell to `target_sum`, ``"none"`` does not.
    target_sum
        What the counts of a cell sum up to; None for 10,000.
    log1p
        Whether the logarithm is taken.

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
            raise ValueError("has no use with normalize='none'; remove one of the two")
        return value


class SamplingConfig(Section):
    """Draws of training cells by class, with replacement, instead of each cell once an epoch.

    None takes the default of :class:`scforge.training.CellDataModule`.

    Parameters
    ----------
    balance_key
        Column of ``obs`` with the classes. None draws each cell once.
    warmup_epochs
        Epochs over which the strength goes from `start` to `end`.
    start, end
        Strength: 0 draws classes as often as they are, 1 equally often.

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

    @field_validator("warmup_epochs", "start", "end")
    @classmethod
    def _needs_key(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("balance_key", "") is None:
            raise ValueError("has no use without balance_key, the column of obs with the classes; add it beside")
        return value


class SplitConfig(Section):
    """How validation cells are held out; ``training.validation_size`` says how many.

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
    """Where the cells come from, which genes count, and how cells become batches.

    Parameters
    ----------
    source
        ``"local"`` for `paths`, ``"cellxgene_census"`` for a query of the Census.
    paths
        One or more h5ad or zarr files, stores, patterns of paths, or URLs of these. One may be given as text.
    organism
        Organism of the Census. None takes ``"homo_sapiens"``.
    filters
        Which cells of the Census: columns of ``obs`` with a value or a list of values, or a SOMA ``value_filter``.
    census_version
        Release of the Census, e.g. ``"2025-01-30"``. None takes ``"stable"``.
    uri
        SOMA experiment, or a folder laid out as the Census is, to query in its place.
    obs_columns
        Columns of ``obs`` to have at hand, besides those that other options name. None: all of local cells, none of
        the Census.
    storage_options
        Options of the file system of URLs, as of fsspec; for the Census those of TileDB.
    modality
        Modality of a MuData.
    memory
        Most memory that local cells may take, e.g. ``"16GB"``.
    cache
        Store that local cells are converted into once, and read from. None converts cells that do not fit into memory,
        into ``~/.cache/scforge/stores`` (or ``$XDG_CACHE_HOME``).
    gene_vocab
        ``"from_data"``, a shipped vocabulary such as ``"human_protein_coding"``, or a vocabulary file.
    max_genes
        Genes kept per cell, the most expressed. None takes the tokenizer's default. Also accepted as
        ``tokenizer.max_genes``.
    layer
        Layer with raw counts. None reads ``adata.X``, or ``"raw"`` of the Census.
    gene_key
        Column of ``var`` with the gene names. None reads ``adata.var_names``, or what fits best in the Census.
    batch_key, labels_key
        Columns of ``obs`` with the batch and the label of each cell.
    preprocessing
        Choice of genes.
    sampling
        Draws by class.
    split
        How validation cells are held out.
    max_tokens_per_batch
        Tokens that a batch holds at most, padding included; cells of like length come together then. Also accepted
        as ``training.max_tokens_per_batch``.
    num_threads
        Threads that tokenise ahead; 0 does all in the training thread. Also accepted as ``data.num_workers``.
    pin_memory
        Put batches into memory that a CUDA device copies from. None does so if there is one.

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
    obs_columns: list[Text] | None = None
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
            raise ValueError(f"has no use with data.source={_CENSUS!r}; remove one of the two")
        return [value] if isinstance(value, str | os.PathLike) else value

    @field_validator("paths", "uri", "storage_options")
    @classmethod
    def _whole_credentials(cls, value: Any) -> Any:
        if any(mark in str(value) for mark in (f"://{SECRET}@", f"?{SECRET}", f"'{SECRET}'")):
            raise ValueError("needs a credential, which scforge does not write into files; give all of it again")
        return value

    @field_validator("obs_columns", mode="before")
    @classmethod
    def _one_column(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("organism", "filters", "census_version", "uri", "modality", "memory", "cache")
    @classmethod
    def _of_its_source(cls, value: Any, info: ValidationInfo) -> Any:
        local = info.field_name in ("modality", "memory", "cache")
        if value is not None and info.data.get("source", "") == (_CENSUS if local else "local"):
            needed = "local" if local else _CENSUS
            raise ValueError(f"has no use without data.source={needed!r}; set that, or remove the key")
        return value
