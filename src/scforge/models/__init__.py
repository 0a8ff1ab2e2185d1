"""Architectures (plain torch modules) and, lazily, the model classes that train them on AnnData."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "AutoregressiveTransformer": "scforge.models.autoregressive",
    "Encoder": "scforge.estimators.encoder",
    "CellModule": "scforge.models.protocol",
    "GeneratingModule": "scforge.models.protocol",
    "GenePoolingModel": "scforge.models.gene_pooling",
    "MLPEncoder": "scforge.models.mlp",
    "MaskedAutoencoder": "scforge.models.masked_autoencoder",
    "ModelOutput": "scforge.models.protocol",
    "ScDiVaConfig": "scforge.models.scdiva",
    "ScDiVaModel": "scforge.models.scdiva",
    "ScDiVa": "scforge.estimators.scdiva",
    "TransformerEncoder": "scforge.models.transformer_encoder",
    "components": "scforge.models.components",
    "count_parameters": "scforge.models._utils",
    "get_model": "scforge.models.registry",
    "init_weights": "scforge.models._utils",
    "list_models": "scforge.models.registry",
    "register_model": "scforge.models.registry",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "Encoder",
    "ScDiVa",
    "TransformerEncoder",
    "AutoregressiveTransformer",
    "MaskedAutoencoder",
    "GenePoolingModel",
    "MLPEncoder",
    "ScDiVaModel",
    "ScDiVaConfig",
    "ModelOutput",
    "CellModule",
    "GeneratingModule",
    "register_model",
    "get_model",
    "list_models",
    "init_weights",
    "count_parameters",
    "components",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
