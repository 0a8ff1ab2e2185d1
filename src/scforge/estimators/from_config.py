"""From a configuration to a trained, saved model: what ``scforge train`` does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anndata import AnnData
from lightning.fabric.utilities.rank_zero import rank_zero_only

from scforge._constants import OBSM_KEY
from scforge._io import atomic_path
from scforge.config.schema import Config, OutputConfig
from scforge.data.readers import write_h5ad
from scforge.errors import ConfigError
from scforge.estimators.config_check import benchmark_callbacks, check_settings
from scforge.estimators.config_data import embedded_adata, make_datamodule, open_source
from scforge.estimators.config_parts import model_options, objective_of, placed, tokenizer_of
from scforge.estimators.config_start import KeepConfig, check_gpus, check_run
from scforge.estimators.encoder import Encoder
from scforge.estimators.front_classes import class_of_architecture
from scforge.training.checkpoint import FINAL

if TYPE_CHECKING:
    from scforge.data.cells import Cells
    from scforge.training.datamodule import CellDataModule


_ARGUMENTS = {
    "training": [
        "max_epochs",
        "max_steps",
        "early_stopping",
        "early_stopping_patience",
        "precision",
        "accelerator",
        "devices",
        "num_nodes",
        "strategy",
        "gradient_clip_val",
        "accumulate_grad_batches",
        "gradient_checkpointing",
        "layer_lr_decay",
        "gradual_unfreezing",
        "compile",
        "ema_decay",
        "log_every_n_steps",
        "checkpoint_every_n_steps",
    ],
    "output": ["checkpoint_dir", "save_top_k", "keep_last"],
}
"""Options that arguments of ``Encoder.train`` are named after; where the user set none, its default holds."""


def train_from_config(
    config: Config,
    *,
    progress_bar: bool = True,
    resume: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Encoder:
    """Read the cells, train, and write what ``config.output`` asks for.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.
    progress_bar
        Show a bar while training.
    resume
        ``"auto"`` goes on with the latest state in ``output.checkpoint_dir``, and starts where there is none; or the
        path of a state. None starts, and refuses a folder that holds another run.
    overwrite
        Replace the run in ``output.checkpoint_dir``, and the file ``output.embedding``.

    Returns
    -------
    The trained model. With ``output.checkpoint_dir`` it is saved there as ``final``, beside the best epochs and the
    configuration (``config.yaml``). Without, nothing is saved, while ``scforge train``, which returns no model, takes
    ``checkpoints/NAME`` of a file ``NAME.yaml``. Of several processes only the first writes.

    Raises
    ------
    ConfigError, OptionError
        If an option cannot be used.
    MissingFileError, DataError
        If the cells cannot be read or used.

    Examples
    --------
    >>> from scforge.config import load_config
    >>> train_from_config(load_config("recipe.yaml"))  # doctest: +SKIP
    """
    if config.finetune is not None:
        raise ConfigError(
            f"{config.place_of('finetune')}the configuration has a section finetune; run it with scforge finetune "
            "--config, or remove the section to train a new model."
        )
    # A typo should not come to light after minutes of reading.
    check_settings(config, replaces=overwrite or resume is not None)
    check_run(config, resume=resume, overwrite=overwrite, first=not rank_zero_only.rank)
    check_gpus(config)
    arguments = training_arguments(config, train_arguments(config), resume=resume, overwrite=overwrite)
    source = open_source(config.data)
    model, module = _model(source, config)
    model.train(datamodule=module, **arguments, progress_bar=progress_bar)
    if not rank_zero_only.rank:
        outputs_of(model, source, config)
    return model


def training_arguments(
    config: Config, arguments: dict[str, Any], *, resume: str | os.PathLike[str] | None, overwrite: bool
) -> dict[str, Any]:
    """Add to the arguments of ``Encoder.train`` how to begin, and what keeps the configuration."""
    added: dict[str, Any] = {} if resume is None else {"resume": resume}
    if config.output.checkpoint_dir is not None:
        added["callbacks"] = [*arguments["callbacks"], KeepConfig(config)]
        if overwrite:
            added["overwrite"] = True
    return {**arguments, **added}


def outputs_of(model: Encoder, source: AnnData | Cells, config: Config) -> None:
    """Write the model, and the embedding of its cells, where the configuration says so."""
    output = config.output
    if output.checkpoint_dir is not None:
        model.save(Path(output.checkpoint_dir) / FINAL, overwrite=True)
    if output.embedding is not None:
        embedding = model.get_latent_representation()
        adata = source if isinstance(source, AnnData) else embedded_adata(source, embedding, OBSM_KEY)
        _write(adata, output.embedding)


def train_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of ``Encoder.train`` that a configuration gives, loggers and callbacks among them."""
    training, output = config.training, config.output
    written = config.user_set()
    arguments = {
        name: written[section][name]
        for section, names in _ARGUMENTS.items()
        for name in names
        if written.get(section, {}).get(name) is not None
    }
    if training.batch_size == "auto":
        arguments["batch_size"] = "auto"
    return arguments | {
        "optimizer": training.optimizer.name,
        "lr": training.optimizer.lr,
        "weight_decay": training.optimizer.weight_decay,
        "schedule": training.scheduler.name,
        "warmup_steps": training.scheduler.warmup_steps,
        "logger": _loggers(output),
        "callbacks": benchmark_callbacks(config),
    }


def _model(source: AnnData | Cells, config: Config) -> tuple[Encoder, CellDataModule]:
    data = config.data
    parts = (config.model.architecture, tokenizer_of(config), objective_of(config))
    front = class_of_architecture(config.model.architecture)
    options = {
        "vocab": data.gene_vocab,
        "n_top_genes": data.preprocessing.hvg_selection,
        "keep_genes": data.preprocessing.keep_genes,
        "seed": config.seed,
        **model_options(config),
    }
    with placed(config):
        if isinstance(source, AnnData):
            front.setup_anndata(
                source, layer=data.layer, gene_key=data.gene_key, batch_key=data.batch_key, labels_key=data.labels_key
            )
            model = front(source, *parts, **options)
            return model, make_datamodule(model.cells(), config)
        module = make_datamodule(source, config)
        return front(None, *parts, datamodule=module, **options), module


def _loggers(output: OutputConfig) -> Any:
    if output.log_dir is None or output.loggers == []:
        return False
    from scforge.training.monitoring import make_loggers

    return make_loggers(
        ["csv"] if output.loggers is None else output.loggers,
        output.log_dir,
        project=output.project,
        run_name=output.run_name,
        wandb_mode=output.wandb_mode,
    )


def _write(adata: Any, path: str) -> None:
    with atomic_path(path) as temporary:
        write_h5ad(temporary, adata)
