"""From a configuration to a trained, saved model: what ``scforge train`` does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from anndata import AnnData

from scforge._constants import OBSM_KEY
from scforge._io import atomic_path, check_folder
from scforge.config.schema import Config
from scforge.errors import ConfigError
from scforge.estimators.config_data import embedded_adata, make_datamodule, open_source
from scforge.estimators.defaults import recipe_for
from scforge.estimators.encoder import Encoder
from scforge.models.registry import MODELS
from scforge.tokenizers.registry import TOKENIZERS
from scforge.training.objectives.registry import OBJECTIVES

__all__ = ["train_from_config"]

logger = logging.getLogger("scforge")

_FINAL = "final"
_MASKED = "masked_gene_prediction"


def train_from_config(config: Config, *, progress_bar: bool = True) -> Encoder:
    """Read the cells, train, and write what ``config.output`` asks for.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.
    progress_bar
        Show a bar while training.

    Returns
    -------
    The trained model. With ``output.checkpoint_dir`` it is saved there as ``final``, beside the best epochs.

    Examples
    --------
    >>> from scforge.config import load_config
    >>> train_from_config(load_config("recipe.yaml"))  # doctest: +SKIP
    """
    data, training, output = config.data, config.training, config.output
    tokenizer, objective = _tokenizer(config), _objective(config)
    # A typo in a name should not come to light after minutes of reading.
    for registry, name in (
        (MODELS, config.model.architecture),
        (TOKENIZERS, tokenizer.get("name")),
        (OBJECTIVES, objective.get("name")),
    ):
        if name is not None:
            registry.get(name)
    for name in ("checkpoint_dir", "log_dir"):
        if (folder := getattr(output, name)) is not None:
            check_folder(f"output.{name}", folder)
    if output.embedding is not None:
        check_folder("output.embedding", Path(output.embedding).parent)
    source = open_source(data)
    options = {
        "vocab": data.gene_vocab,
        "n_top_genes": data.preprocessing.hvg_selection,
        "seed": config.seed,
        **config.model.user_options(),
    }
    if isinstance(source, AnnData):
        Encoder.setup_anndata(
            source, layer=data.layer, gene_key=data.gene_key, batch_key=data.batch_key, labels_key=data.labels_key
        )
        model = Encoder(source, config.model.architecture, tokenizer, objective, **options)
        module = make_datamodule(model.cells(), config)
    else:
        module = make_datamodule(source, config)
        model = Encoder(None, config.model.architecture, tokenizer, objective, datamodule=module, **options)
    given: dict[str, Any] = {
        "max_steps": training.max_steps,
        "early_stopping_patience": training.early_stopping_patience,
    }
    model.train(
        training.max_epochs,
        datamodule=module,
        **{name: value for name, value in given.items() if value is not None},
        optimizer=training.optimizer.name,
        lr=training.optimizer.lr,
        weight_decay=training.optimizer.weight_decay,
        schedule=training.scheduler.name,
        warmup_steps=training.scheduler.warmup_steps,
        early_stopping=training.early_stopping,
        accelerator=training.accelerator,
        devices=training.devices,
        precision=training.precision,
        gradient_clip_val=training.gradient_clip_val,
        checkpoint_dir=output.checkpoint_dir,
        save_top_k=output.save_top_k,
        progress_bar=progress_bar,
        logger=_metrics_logger(output.log_dir),
    )
    if output.checkpoint_dir is not None:
        model.save(Path(output.checkpoint_dir) / _FINAL, overwrite=True)
    if output.embedding is not None:
        embedding = model.get_latent_representation()
        adata = source if isinstance(source, AnnData) else embedded_adata(module.cells, embedding, OBSM_KEY)
        _write(adata, output.embedding)
    return model


def _tokenizer(config: Config) -> dict[str, Any]:
    options = config.tokenizer.user_options()
    if config.data.max_genes is not None:
        if options.get("max_len", config.data.max_genes) != config.data.max_genes:
            raise ConfigError(
                f"tokenizer.max_len={options['max_len']} and data.max_genes={config.data.max_genes} mean the same; "
                "keep one of them."
            )
        options["max_len"] = config.data.max_genes
    return options if config.tokenizer.strategy is None else {"name": config.tokenizer.strategy, **options}


def _objective(config: Config) -> dict[str, Any]:
    """Return name and options of the objective; the options of masking stand in the tokenizer's section."""
    options = config.objective.user_options()
    masking = config.tokenizer.masking.user_set() if "masking" in config.tokenizer.model_fields_set else {}
    name = config.objective.name or (_masked_objective(config) if masking else None)
    if masking and "mask_ratio" not in OBJECTIVES.get(str(name)).option_names():
        raise ConfigError(
            f"tokenizer.masking is set but the objective {name!r} masks nothing; "
            f"remove it, or set objective.name to {_MASKED!r}."
        )
    for key in set(masking) & set(options):
        if masking[key] != options[key]:
            raise ConfigError(
                f"tokenizer.masking.{key}={masking[key]} and objective.{key}={options[key]} mean the same; "
                "keep one of them."
            )
    options = {**masking, **options}
    return options if name is None else {"name": name, **options}


def _masked_objective(config: Config) -> str:
    """Return the objective that masking is meant for where none is named: that of the architecture, if it masks."""
    default = recipe_for(config.model.architecture, config.model.user_options()).objective
    return default if "mask_ratio" in OBJECTIVES.get(default).option_names() else _MASKED


def _metrics_logger(log_dir: str | None) -> Any:
    if log_dir is None:
        return False
    from lightning.pytorch.loggers import CSVLogger

    return CSVLogger(save_dir=log_dir, name=None)


def _write(adata: Any, path: str) -> None:
    with atomic_path(path) as temporary:
        adata.write_h5ad(temporary)
