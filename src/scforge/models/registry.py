"""The registry of architectures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scforge._registry import Registry, check_options
from scforge.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from scforge.config.schema import ModelConfig


MODELS: Registry[Any] = Registry(
    "architecture",
    group="scforge.models",
    base="torch.nn.Module",
    # What a made module has to have, `Encoder` asks of the module: it may be set in the constructor.
    members=("from_config",),
    builtin={
        "autoregressive_transformer": "scforge.models.autoregressive",
        "gene_pooling": "scforge.models.gene_pooling",
        "masked_autoencoder": "scforge.models.masked_autoencoder",
        "mlp": "scforge.models.mlp",
        "scdiva": "scforge.models.scdiva.model",
        "transformer_encoder": "scforge.models.transformer_encoder",
    },
)

register_model, list_models = MODELS.register, MODELS.names


_MAX_LAYERS = 1_000

_OF_SCVI = {
    "n_latent": ("latent_dim", "hidden_dim", "encoder_dim"),
    "n_hidden": ("hidden_dim", "encoder_dim"),
    "n_layers": ("num_layers", "encoder_layers"),
    "dropout_rate": ("dropout",),
}
"""A mapping from options of scvi-tools to names for the same here, of which an architecture has the first it knows."""


def check_layers(options: Mapping[str, Any]) -> None:
    """Raise an OptionError for a number of layers that no model has; creating them would take all memory."""
    for option, value in options.items():
        if option.endswith("layers") and isinstance(value, int) and value > _MAX_LAYERS:
            raise OptionError(
                f"is more than {_MAX_LAYERS:,} layers; choose fewer layers.", argument=option, value=value
            )


def get_model(name: str, config: ModelConfig) -> nn.Module:
    """Create the architecture registered as `name` from a configuration with ``vocab_size`` set.

    Parameters
    ----------
    name
        Name of an architecture, see :func:`list_models`.
    config
        The ``model`` section of a configuration. Fields that are not set use the defaults of the constructor.

    Returns
    -------
    The module, with new weights.

    Raises
    ------
    OptionError
        If `name` is unknown, or there are too many layers. This error is a ``ValueError``.
    ValueError
        If ``config.vocab_size`` is None.

    Examples
    --------
    >>> from scforge.config import ModelConfig
    >>> config = ModelConfig(vocab_size=50, hidden_dim=8, num_layers=1, pooling="weighted_sum")
    >>> model = get_model("gene_pooling", config)
    >>> type(model).__name__, model.num_parameters()
    ('GenePoolingModel', 1570)
    """
    check_layers(config.user_options())
    return MODELS.get(name).from_config(config)


def option_names(name: str) -> list[str] | None:
    """Return the options of the constructor of `name`, or None if it accepts any options."""
    parameters = inspect.signature(MODELS.get(name)).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.name != "vocab_size"]


def own_names(architecture: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with shared configuration names replaced by constructor names.

    Raises
    ------
    OptionError
        If an option is given under both names.
    """
    renamed = getattr(architecture, "config_names", {})
    for shared, own in renamed.items():
        if shared in options and own in options:
            name = architecture.__name__
            raise OptionError(
                f"and {own}={options[own]!r} set the same option of {name}; pass only one of the two.",
                argument=shared,
                value=options[shared],
            )
    return {renamed.get(option, option): value for option, value in options.items()}


def check_model_options(name: str, options: dict[str, Any]) -> None:
    """Raise an OptionError if an option is not one of the architecture `name`, or there are too many layers."""
    check_layers(options)
    accepted = option_names(name)
    if accepted is not None:
        replacements = {old: [new for new in names if new in accepted] for old, names in _OF_SCVI.items()}
        hints = {old: f"pass {new[0]}, as scforge calls it" for old, new in replacements.items() if new}
        check_options("option", name, own_names(MODELS.get(name), options), accepted, hints)
