"""The flax version of soma: the same model, loss and files as the torch version, on JAX. Requires the extra ``flax``.

>>> import jax.numpy as jnp
>>> from scforge.soma.v1.flax import Model, ModelConfig
>>> config = ModelConfig(dropout_rate=0.0, embedding_dim=16, pwff_hidden_dim=32, num_layers=2, num_heads=2)
>>> ids = jnp.asarray([list(b"ACGT")])
>>> Model(config)(ids, jnp.arange(4)[None]).shape
(1, 4, 264)
"""

from __future__ import annotations

import importlib.util

from scforge.errors import ScforgeError


class MissingFlaxError(ScforgeError, ImportError):
    """The packages of the extra ``flax`` are not installed."""


for _package in ("jax", "flax"):
    if importlib.util.find_spec(_package) is None:
        raise MissingFlaxError(f"scforge.soma.v1.flax needs {_package!r}; install it with pip install 'scforge[flax]'.")

from scforge.soma.v1.configs import ModelConfig, SIGRegConfig  # noqa: E402
from scforge.soma.v1.flax.loss import compute_loss  # noqa: E402
from scforge.soma.v1.flax.model import Model  # noqa: E402
from scforge.soma.v1.flax.sigreg import SIGReg  # noqa: E402

__all__ = ["MissingFlaxError", "Model", "ModelConfig", "SIGReg", "SIGRegConfig", "compute_loss"]
