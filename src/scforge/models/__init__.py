"""Architectures (plain torch modules) and the lazily imported model classes that train them on AnnData."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Encoder": "scforge.estimators.encoder",
    "ScDiVa": "scforge.estimators.scdiva",
    "TransformerEncoder": "scforge.models.transformer_encoder",
    "AutoregressiveTransformer": "scforge.models.autoregressive",
    "MaskedAutoencoder": "scforge.models.masked_autoencoder",
    "GenePoolingModel": "scforge.models.gene_pooling",
    "MLPEncoder": "scforge.models.mlp",
    "ScDiVaModel": "scforge.models.scdiva",
    "ScDiVaConfig": "scforge.models.scdiva",
    "ModelOutput": "scforge.models.protocol",
    "CellModule": "scforge.models.protocol",
    "register_model": "scforge.models.registry",
    "get_model": "scforge.models.registry",
    "list_models": "scforge.models.registry",
    "init_weights": "scforge.models._utils",
    "count_parameters": "scforge.models._utils",
    "components": "scforge.models.components",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
