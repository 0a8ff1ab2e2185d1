"""Specification of a model: names and options of its components, its fine-tuning, and its genes."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from pydantic import ValidationError
from scipy import sparse
from torch import nn

from scforge._checks import check_count
from scforge._columns import texts_of
from scforge._registry import check_defines
from scforge.config.aliases import config_error
from scforge.config.schema import ModelConfig
from scforge.data.cells import choose_chunks, choose_rows
from scforge.data.checks import counts_of, gene_names, names_place
from scforge.data.gene_sets import enough_shared, lacking_genes, warn_of_lacking
from scforge.data.genes import GeneMap, map_names
from scforge.data.memory import available_memory
from scforge.data.sources import open_cells
from scforge.data.statistics import gene_entropies, gene_medians, kept_genes, select_genes, variable_genes
from scforge.data.store import SOURCE, StoreCells
from scforge.data.vocab import FROM_DATA, GeneVocab, n_of_species, open_vocab
from scforge.errors import OptionError, listing, warn
from scforge.finetuning.adapters import inject_lora
from scforge.finetuning.base import get_task
from scforge.finetuning.mapping import FineTunedModule
from scforge.models._utils import bounded
from scforge.models.components.gene_vectors import fill_gene_vectors
from scforge.models.components.heads import COUNT_LOSSES, is_truncated
from scforge.models.registry import MODELS, check_model_options, get_model, option_names, own_names
from scforge.tokenizers.base import TOKENIZERS, Tokenizer, get_tokenizer
from scforge.tokenizers.entropy_ranked import serialization_weights
from scforge.training.layers import freeze_layers
from scforge.training.objectives.base import Objective, get_objective

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.training.datamodule import CellDataModule

logger = logging.getLogger("scforge")

_TAKEN = frozenset(
    ("adata", "architecture", "datamodule", "keep_genes", "n_top_genes", "name", "objective", "registry", "seed")
) | {"tokenizer", "tuning", "vocab", "vocab_size"}
"""Names that cannot be options of an architecture, because ``Encoder`` or the description uses them."""

SAMPLED_CELLS = 100_000
"""Maximum number of training cells, sampled at random, from which genes are chosen in memory."""

_MIXED = 0.1
"""Minimum fraction of genes of each species in mixed data; in data of one species, the other is below 0.02."""

_OF_FILES = ("source_file", SOURCE)
"""Columns of obs in which ``read_h5ad`` and ``open_cells`` write the file of each cell."""

_CELLS_OF_BATCHES = 50_000
"""Number of cells from which it is judged which genes the batches measure."""


@dataclass(frozen=True)
class ArchitectureDefaults:
    """Defaults of an architecture: tokenizer, objective, genes and options.

    Attributes
    ----------
    architecture, tokenizer, objective
        Names in the registries.
    n_top_genes
        Number of highly variable genes. If None, uses all detected genes.
    options
        Options of the architecture.
    tokenizer_options
        Options of the tokenizer.
    """

    architecture: str
    tokenizer: str = "rank_value"
    objective: str = "masked_gene_prediction"
    n_top_genes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer_options: dict[str, Any] = field(default_factory=dict)


_DEFAULTS = (
    # Measured on PBMC 3k with joint_embedding: all genes, not 2,000, or 16 dimensions, not 32, cost .1 of macro-F1.
    ArchitectureDefaults(
        "gene_pooling",
        "continuous_projection",
        "neighbor_denoising",
        n_top_genes=2_000,
        options={
            "pooling": "weighted_sum",
            "hidden_dim": 256,
            "num_layers": 1,
            "ffn_dim": 512,
            "latent_dim": 32,
            "dropout": 0.0,
        },
        tokenizer_options={"append_cls": False},
    ),
    ArchitectureDefaults(
        "mlp",
        "continuous_projection",
        "neighbor_denoising",
        n_top_genes=2_000,
        tokenizer_options={"append_cls": False},
    ),
    ArchitectureDefaults(
        "transformer_encoder", options={"hidden_dim": 128, "num_layers": 4, "num_heads": 4, "pooling": "mean"}
    ),
    ArchitectureDefaults(
        "masked_autoencoder",
        "continuous_projection",
        "masked_value_prediction",
        n_top_genes=2_000,
        options={"encoder_dim": 128, "encoder_layers": 4, "encoder_heads": 4, "decoder_layers": 2},
        tokenizer_options={"append_cls": False},
    ),
    ArchitectureDefaults(
        "autoregressive_transformer",
        "binned_expression",
        "next_gene_prediction",
        n_top_genes=1_000,
        options={"hidden_dim": 128, "num_layers": 4, "num_heads": 4, "pooling": "mean"},
        tokenizer_options={"side": "one", "append_eos": True},
    ),
    ArchitectureDefaults(
        "scdiva",
        "entropy_ranked",
        "variational",
        n_top_genes=2_000,
        options={"hidden_dim": 128, "num_layers": 4, "num_heads": 4, "latent_dim": 32, "max_tokens": 64},
    ),
)


def defaults_for(architecture: str | None, options: dict[str, Any]) -> ArchitectureDefaults:
    """Return the defaults of an architecture. If None, uses the light encoder.

    ``gene_pooling`` with a pooling other than ``"weighted_sum"`` in `options` is not the light encoder.
    """
    name = architecture or "gene_pooling"
    is_light = options.get("pooling", "weighted_sum") == "weighted_sum"
    known = {one.architecture: one for one in _DEFAULTS if is_light or one.architecture != "gene_pooling"}
    return known.get(name) or ArchitectureDefaults(name)


@dataclass(frozen=True)
class FineTuneSpec:
    """Fine-tuning task with its options, the embedding width, adapters, and frozen layers.

    Attributes
    ----------
    task, task_options
        Name of the task in the registry, and its options.
    n_latent
        Embedding width of the base model.
    lora
        All adapter options. If None, uses no adapters.
    freeze
        True freezes the entire encoder, a number freezes this many of its first layers, and False freezes nothing.
    split
        Record of the split and its cells, see :func:`scforge.estimators.finetune.finetune`.
    base
        Checksum and number of epochs of the base model.
    backbone
        Architecture module with weights to which the head is added, instead of a new module. It is not saved.
    """

    task: str
    task_options: dict[str, Any]
    n_latent: int
    lora: dict[str, Any] | None = None
    freeze: bool | int = False
    split: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    backbone: nn.Module | None = field(default=None, repr=False, compare=False)

    def build_module(self, encoder: nn.Module) -> FineTunedModule:
        """Add a head and adapters to an architecture module, and freeze layers."""
        task = get_task(self.task, **self.task_options)
        if self.freeze is True:
            encoder.requires_grad_(False)
        elif self.freeze:
            freeze_layers(encoder, self.freeze)
        head = task.make_head(self.n_latent, encoder)
        if self.lora is not None:
            inject_lora(encoder, self.lora)
        module = FineTunedModule(encoder, head)
        module.frozen = self.freeze is True
        return module

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dict."""
        return {
            "task": {"name": self.task, **self.task_options},
            "n_latent": self.n_latent,
            "lora": self.lora,
            "freeze": self.freeze,
            "split": self.split,
            "base": self.base,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FineTuneSpec:
        """Read the output of :meth:`to_json`."""
        rest = {key: content[key] for key in ("n_latent", "lora", "freeze", "split", "base")}
        task, options = named_options("task", dict(content["task"]), "")
        return cls(task=task, task_options=options, **rest)


def check_freeze(freeze: bool | int, lora: Any, gradual_unfreezing: int | None) -> None:
    """Raise an :class:`~scforge.errors.OptionError` if the options for frozen layers are inconsistent."""
    if not isinstance(freeze, bool):
        check_count("freeze", freeze, "layers")
    frozen = "freeze=True" if freeze is True else f"lora={lora!r}" if lora not in (None, False) else None
    if freeze is not False and lora not in (None, False):
        raise OptionError(f"has no effect with lora={lora!r}, which freezes the encoder; omit it.", freeze=freeze)
    if gradual_unfreezing is not None and frozen:
        raise OptionError(
            f"unfreezes layers that {frozen} keeps frozen; remove one of the two.",
            argument="gradual_unfreezing",
        )


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
    raise OptionError("must be a name, or a dict with 'name' and options.", argument=argument, value=value)


def default_options(architecture: str) -> dict[str, Any]:
    """Return the default options of an architecture after a round trip through JSON.

    Defaults that JSON cannot represent and options in ``**kwargs`` are not included. For a plugin architecture, shared
    options are left out if their default differs from :class:`~scforge.config.ModelConfig`, because ``from_config`` may
    use either default.

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
    """Names and options of the architecture, tokenizer and objective, with vocabulary and fine-tuning task.

    Every option is stored (except options that :func:`default_options` leaves out), so that new defaults in a later
    version do not change a saved model.
    """

    architecture: str
    model_options: dict[str, Any]
    tokenizer: str
    tokenizer_options: dict[str, Any]
    objective: str
    objective_options: dict[str, Any]
    vocab: GeneVocab
    tuning: FineTuneSpec | None = None

    @classmethod
    def resolve(
        cls,
        defaults: ArchitectureDefaults,
        vocab: GeneVocab,
        *,
        tokenizer: tuple[str, dict[str, Any]],
        objective: tuple[str, dict[str, Any]],
        options: dict[str, Any],
    ) -> tuple[ModelSpec, np.ndarray | None]:
        """Fill in defaults, and check that the components are compatible.

        Returns
        -------
        The specification, and the pretrained gene vectors for a new model, float32, shape (V, D), or None.
        """
        name, tokenizer_options = tokenizer
        if name == defaults.tokenizer:
            tokenizer_options = defaults.tokenizer_options | tokenizer_options
        architecture = defaults.architecture
        check_model_options(architecture, options)
        options = defaults.options | own_names(MODELS.get(architecture), options)
        takes_limit = "max_len" in TOKENIZERS.get(name).option_names() and "max_len" not in tokenizer_options
        if takes_limit and options.get("max_seq_len") is not None:
            tokenizer_options = tokenizer_options | {"max_len": options["max_seq_len"]}
        special = TOKENIZERS.get(name).special_tokens(tokenizer_options)
        if added := [token for token in special if vocab.token_id(token) is None]:
            logger.info("The tokenizer %s adds the special tokens %s to the vocabulary.", name, listing(added))
            vocab = vocab.with_special_tokens(*added)
        made_tokenizer = get_tokenizer(name, vocab, **tokenizer_options)
        parameters = inspect.signature(MODELS.get(architecture)).parameters
        pooling = options.get("pooling", getattr(parameters.get("pooling"), "default", None))
        has_readout = getattr(MODELS.get(architecture), "predicts_next", False) and all(
            options.get(name, True) for name in ("shift_labels", "causal_encode")
        )
        if pooling == "cls" and not made_tokenizer.append_cls and not has_readout:
            raise OptionError(
                "needs a CLS token; set append_cls=True for the tokenizer, or pooling='mean'.", pooling="cls"
            )
        made_objective = get_objective(objective[0], **objective[1])
        made_objective.check(made_tokenizer)
        made_objective.check_architecture(MODELS.get(architecture))
        set_options = made_objective.model_options()
        check_model_options(architecture, set_options)
        for option, value in set_options.items():
            _settle(options, option, value, f"the objective {objective[0]!r} requires {value!r}")
        value_loss = options.get("value_loss", getattr(parameters.get("value_loss"), "default", None))
        if value_loss in COUNT_LOSSES:
            _check_counts(value_loss, name, made_tokenizer, made_objective)
        head = None
        if "expression_head" in parameters:
            head = options.get("expression_head", parameters["expression_head"].default)
            _check_expression_head(head, architecture, name, made_tokenizer, objective[0], made_objective)
        # Some architectures predict bins only on request.
        n_bins, bins = getattr(made_tokenizer, "n_bins", None), options.get("n_bins")
        asked = head == "bin" or getattr(parameters.get("n_bins"), "default", None) is not None
        if n_bins is not None and (asked or bins is not None):
            options["n_bins"] = n_bins if bins is None else bins
            _settle(options, "n_bins", n_bins, f"the tokenizer {name!r} creates {n_bins} bins")
        if "max_seq_len" in parameters:
            longest = made_objective.max_tokens(made_tokenizer)
            if options.setdefault("max_seq_len", longest) < longest:
                raise OptionError(
                    f"is smaller than the {longest} tokens that {name!r} and {objective[0]!r} create per cell; raise "
                    "max_seq_len, or lower the tokenizer's max_len (data.max_genes).",
                    max_seq_len=options["max_seq_len"],
                )
        # An architecture that uses them by default needs their number.
        if "n_special" in parameters and parameters["n_special"].default:
            _settle(options, "n_special", vocab.n_special, f"the vocabulary has {vocab.n_special} special tokens")
        # A saved model has the shape of its gene vectors in its description, and the vectors in its weights.
        vectors = None if options.get("gene_vectors") is not None else made_tokenizer.gene_vectors()
        if vectors is not None:
            known = option_names(architecture)
            if known is not None and "gene_vectors" not in known:
                raise OptionError(
                    f"does not accept the gene vectors of the tokenizer {name!r}; choose "
                    "another architecture or tokenizer.",
                    architecture=architecture,
                )
            frozen = bool(getattr(made_tokenizer, "freeze", True))
            without = int(np.isnan(vectors).any(axis=1).sum())
            options["gene_vectors"] = {"dim": vectors.shape[1], "learned": without, "frozen": frozen}
        options |= {n: value for n, value in default_options(architecture).items() if n not in options}
        spec = cls(
            architecture=architecture,
            model_options=options,
            tokenizer=name,
            tokenizer_options=made_tokenizer.config(),
            objective=objective[0],
            objective_options=made_objective.config(),
            vocab=vocab,
        )
        return spec, vectors

    @classmethod
    def from_json(cls, content: Mapping[str, Any], vocab: GeneVocab) -> ModelSpec:
        """Read the output of :meth:`to_json`. Options that are not in it have their defaults."""
        names = ("architecture", "tokenizer", "objective")
        (name, options), tokenizer, objective = (named_options(part, dict(content[part]), "") for part in names)
        defaults = defaults_for(name, options)
        spec, _ = cls.resolve(defaults, vocab, tokenizer=tokenizer, objective=objective, options=options)
        tuning = content.get("tuning")
        return spec if tuning is None else replace(spec, tuning=FineTuneSpec.from_json(tuning))

    def build_module(self, gene_vectors: np.ndarray | None = None) -> nn.Module:
        """Create the module with random weights and these gene vectors, or with the backbone for fine-tuning."""
        if self.tuning is not None and self.tuning.backbone is not None:
            return self.tuning.build_module(self.tuning.backbone)
        try:
            config = ModelConfig(architecture=self.architecture, vocab_size=len(self.vocab), **self.model_options)
        except ValidationError as error:
            raise config_error(error, ModelConfig) from None
        on_meta = torch.get_default_device().type == "meta"
        with bounded(None if on_meta else available_memory()):
            module = get_model(self.architecture, config)
            check_defines(
                f"architecture={self.architecture!r} is {type(module).__qualname__}", module, ("encode", "forward")
            )
            if gene_vectors is not None:
                fill_gene_vectors(module, torch.from_numpy(gene_vectors))
            if self.vocab.entropies is not None and hasattr(module, "init_gene_weights"):
                weighting = self.tokenizer_options.get("weighting", "complement")
                module.init_gene_weights(torch.from_numpy(serialization_weights(self.vocab, weighting)))
            return module if self.tuning is None else self.tuning.build_module(module)

    def build_untrained(self) -> tuple[nn.Module, Tokenizer]:
        """Create the pretraining module with random weights, and the tokenizer."""
        spec = replace(self, tuning=None)
        tokenizer = get_tokenizer(spec.tokenizer, spec.vocab, **spec.tokenizer_options)
        vectors = tokenizer.gene_vectors()
        if vectors is None and spec.model_options.get("gene_vectors") is not None:
            raise OptionError("only the trained gene vectors of this model are saved, not the initial ones.")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return spec.build_module(vectors).eval(), tokenizer

    def build_objective(self) -> Objective:
        """Create the objective, or the task of a fine-tuned model."""
        pretraining = get_objective(self.objective, **self.objective_options)
        if self.tuning is None:
            return pretraining
        task = get_task(self.tuning.task, **self.tuning.task_options)
        task.pretraining = pretraining
        if self.tuning.lora is not None:
            task.for_adapters()
        return task

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dict of everything except the vocabulary."""
        parts = {
            "architecture": {"name": self.architecture, **self.model_options},
            "tokenizer": {"name": self.tokenizer, **self.tokenizer_options},
            "objective": {"name": self.objective, **self.objective_options},
        }
        return parts if self.tuning is None else {**parts, "tuning": self.tuning.to_json()}


def _check_counts(value_loss: str, name: str, tokenizer: Tokenizer, objective: Objective) -> None:
    """Raise an OptionError if a count loss is used for other values, or a zero-truncated loss for zeros."""
    if not tokenizer.gives_counts:
        raise OptionError(
            f"requires counts, which the tokenizer {name!r} does not provide; "
            "pass tokenizer={'name': 'continuous_projection', 'transform': 'counts'}, or value_loss='mse'.",
            value_loss=value_loss,
        )
    option = "include_zero_genes" if tokenizer.lists_all_genes else "zero_targets"
    value: float = tokenizer.lists_all_genes or getattr(objective, "zero_targets", 0.0)
    if value and is_truncated(value_loss):
        other = value_loss.removeprefix("zero_truncated_")
        raise OptionError(
            f"requires counts above 0, but {option}={value!r} produces zeros; use value_loss={other!r}.",
            value_loss=value_loss,
        )


def _settle(options: dict[str, Any], name: str, value: Any, because: str) -> None:
    """Set an option that another component determines. Raises an OptionError if a different value was given."""
    if options.setdefault(name, value) != value:
        raise OptionError(f"is invalid, because {because}; omit {name}.", argument=name, value=options[name])


def _check_expression_head(
    head: Any, architecture: str, name: str, tokenizer: Tokenizer, objective_name: str, objective: Objective
) -> None:
    """Raise an OptionError if an expression head is missing, or the tokenizer provides no bins for it."""
    n_bins = getattr(tokenizer, "n_bins", None)
    if head == "bin" and n_bins is None:
        raise OptionError(
            f"requires bins, which the tokenizer {name!r} does not provide; use expression_head='value'.",
            expression_head="bin",
        )
    if head is None and objective.predicts_values:
        fitting = "'value'" if n_bins is None else "'value' or expression_head='bin'"
        of = f"the objective {objective_name!r} with architecture={architecture!r}"
        raise OptionError(f"{of} requires a head that predicts values; pass expression_head={fitting}.")


def n_top_genes_of(vocab: str | GeneVocab, n_default: int | None) -> int | None:
    """Return the default number of highly variable genes, or None to keep all genes of a list."""
    if vocab != FROM_DATA and open_vocab(vocab).chosen_from_data:
        return None
    return n_default


def vocab_of_adata(
    adata: AnnData,
    setup: dict[str, Any],
    vocab: str | GeneVocab,
    n_top_genes: int | None,
    *,
    tokenizer: tuple[str, dict[str, Any]],
    keep_genes: Sequence[str] = (),
    reports: bool = True,
) -> tuple[GeneVocab, bool]:
    """Choose the genes of a model for an AnnData, with the fields that the tokenizer needs.

    Genes that some batch does not measure are left out if genes are chosen, which the second result states, and only
    reported (with `reports`) if they are given.
    """
    key, layer = setup["gene_key"], setup["layer"]
    within = None if vocab == FROM_DATA else open_vocab(vocab)
    names = gene_names(adata, key)
    if within is not None:
        map_names(names, within, var=adata.var, gene_key=key)
    elif min((found := n_of_species(names)).values()) > _MIXED * len(names):
        counted = " and ".join(f"{n:,} {species} genes" for species, n in found.items())
        warn(
            f"{names_place(key)} contains {counted}, which are treated as different genes; pass "
            "vocab='human_mouse' to merge them."
        )
    chooses = within is None or n_top_genes is not None
    columns = {name: adata.obs[name] for name in (setup["batch_key"], *_OF_FILES) if name in adata.obs}
    lacking = np.zeros(len(names), dtype=bool)
    if columns and (chooses or reports):
        among = np.ones(len(names), dtype=bool) if within is None else GeneMap.of(names, within).columns >= 0
        lacking = _lacking(counts_of(adata, layer), columns, among, chooses=chooses)
    made = within
    if made is None or n_top_genes is not None:
        made = select_genes(
            adata[:, ~lacking | np.isin(names, list(keep_genes))] if lacking.any() else adata,
            layer=layer,
            gene_key=key,
            n_top_genes=n_top_genes,
            batch_key=setup["batch_key"],
            within=within,
            keep_genes=keep_genes,
        )
    elif len(keep_genes):
        kept_genes(keep_genes, made, "the vocabulary")
    made = _with_statistics(made, tokenizer, lambda: open_cells(adata, made, layer=layer, gene_key=key))
    return made, bool(lacking.any())


def vocab_of_cells(
    data: CellDataModule,
    vocab: str | GeneVocab,
    n_top_genes: int | None,
    *,
    tokenizer: tuple[str, dict[str, Any]],
    keep_genes: Sequence[str] = (),
    reports: bool = True,
) -> tuple[GeneVocab, bool]:
    """Choose the genes of a model for a data module as in :func:`vocab_of_adata`, from a sample of training cells."""
    cells: Any = data.cells
    if vocab != FROM_DATA:
        cells = cells.with_vocab(open_vocab(vocab))
    made = cells.vocab
    if made is None:
        raise OptionError("the cells of datamodule have no vocabulary; open the cells with scforge.data.open_cells.")
    chooses = vocab == FROM_DATA or n_top_genes is not None
    lacking = np.zeros(made.n_genes, dtype=bool)
    columns = {} if data.batch_key is None else {data.batch_key: cells.column(data.batch_key)}
    sources = cells.sources() if isinstance(cells, StoreCells) else getattr(cells, "obs", {}).get(SOURCE)
    if sources is not None:
        columns[SOURCE] = sources
    if columns and (chooses or reports):
        rows = choose_chunks(len(cells), _CELLS_OF_BATCHES, cells.chunk_size, rows=data.train_rows, seed=data.seed)
        some = cells.sample(len(rows), rows=rows)
        columns = {name: column.iloc[rows] for name, column in columns.items()}
        lacking = _lacking(some.counts, columns, np.ones(made.n_genes, dtype=bool), chooses=chooses)
    if lacking.any():
        shared = ~lacking
        if len(keep_genes):
            shared[kept_genes(keep_genes, made, "the cells")] = True
        made = made.subset(shared)
        cells = cells.with_vocab(made)
    if n_top_genes is not None and n_top_genes < made.n_genes:
        some = cells.sample(SAMPLED_CELLS, rows=data.train_rows, seed=data.seed)
        some = some.over_vocabulary() if lacking.any() else some
        made = variable_genes(some, n_top_genes, batch_key=data.batch_key, keep_genes=keep_genes)
    elif len(keep_genes):
        kept_genes(keep_genes, made, "the cells")
    some_of = {"rows": data.train_rows, "seed": data.seed}
    made = _with_statistics(made, tokenizer, lambda: cells.with_vocab(made).sample(SAMPLED_CELLS, **some_of))
    return made, bool(lacking.any())


def _lacking(
    counts: sparse.csr_matrix, columns: Mapping[str, pd.Series], among: np.ndarray, *, chooses: bool
) -> np.ndarray:
    """Return which of the genes `among` some batch in `columns` lacks, bool, shape (G,), and warn about them.

    The result is all False if the genes cannot be left out: they are given, or too few others remain.
    """
    found = np.zeros(len(among), dtype=bool)
    rows = choose_rows(counts.shape[0], _CELLS_OF_BATCHES)
    counts = counts[rows]
    reports: list[tuple[np.ndarray, Sequence[str], str]] = []
    for name, column in columns.items():
        of_cells = texts_of(column.iloc[rows], key=str(name), argument="batch_key")
        batches: Sequence[str] = list(of_cells.categories)
        lacking = lacking_genes(counts, np.asarray(of_cells.codes)) & among
        if lacking.any() and not any((lacking == other).all() for other, *_ in reports):
            reports.append((lacking, batches, name))
            found |= lacking.any(axis=0)
    leaves_out = chooses and enough_shared(counts, found)
    if leaves_out:
        what_now = "the model leaves these genes out, and divides the counts of a cell by the sum over its other genes"
    elif chooses:
        what_now = "too few genes are shared to leave them out, so use data that measure the same genes"
    else:
        what_now = "pass a vocab without these genes, or vocab='from_data', which leaves them out"
    for lacking, batches, name in reports:
        warn_of_lacking(lacking, batches, name, what_now)
    return found if leaves_out else np.zeros_like(found)


def _with_statistics(
    vocab: GeneVocab, tokenizer: tuple[str, dict[str, Any]], measured_on: Callable[[], Any]
) -> GeneVocab:
    """Return the vocabulary with the gene statistics that a tokenizer needs, computed from cells if missing."""
    cls = TOKENIZERS.get(tokenizer[0])
    needs_medians = cls.needs_medians and tokenizer[1].get("use_medians", True) and vocab.medians is None
    needs_entropies = cls.needs_entropies and vocab.entropies is None
    cells: Any = measured_on() if needs_medians or needs_entropies else None
    if needs_medians:
        vocab = vocab.with_medians(gene_medians(cells.counts, cells.totals))
    if needs_entropies:
        vocab = vocab.with_entropies(gene_entropies(cells))
    return vocab
