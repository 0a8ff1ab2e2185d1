"""The byte-level transformer in flax.

Shapes: B sequences, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx
from jax import Array

from scforge.errors import DataError
from scforge.soma.v1.configs import EncoderConfig, ModelConfig, check_config, part_of
from scforge.soma.v1.flax.modules.encoder import Encoder
from scforge.soma.v1.flax.modules.layer import layer_norm
from scforge.soma.v1.flax.serde import Serializable


class Model(Serializable, nnx.Module):
    """Embedding of bytes, encoder, final LayerNorm, predictor of the next byte.

    As flax modules do, it starts in training mode, with dropout; ``model.eval()`` and ``model.train()`` switch.

    Parameters
    ----------
    config
        Its sizes.
    rngs
        Where initial weights (``params``) and dropout (``dropout``) come from; None takes ``nnx.Rngs(0)``, for models
        whose weights come from a file.

    Raises
    ------
    OptionError
        If the heads do not divide the embedding, ``scale_factor`` is below 1, or another number cannot be used.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> config = ModelConfig(dropout_rate=0.0, embedding_dim=16, pwff_hidden_dim=32, num_layers=1, num_heads=2)
    >>> model = Model(config, nnx.Rngs(0))
    >>> again = Model.load_bytes(model.save_bytes(), config)
    >>> ids, positions = jnp.asarray([list(b"ATG")]), jnp.arange(3)[None]
    >>> bool((model.encode(ids, positions) == again.encode(ids, positions)).all())
    True
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None = None) -> None:
        check_config(config, ModelConfig)
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.embedding_dim, rngs=rngs)
        self.encoder = Encoder(
            part_of(config, EncoderConfig),
            rngs,
        )
        self.final_norm = layer_norm(config.embedding_dim, rngs)
        self.predictor = nnx.Linear(config.embedding_dim, config.vocab_size, rngs=rngs)

    def encode(self, input: Array, positions: Array) -> Array:
        """Return the state of each token behind the final LayerNorm.

        Parameters
        ----------
        input
            Token ids, whole numbers, shape (B, S).
        positions
            Offsets of the bytes, whole numbers, shape (B, S) or (1, S).

        Returns
        -------
        Shape (B, S, H).

        Raises
        ------
        DataError
            If tokens or positions are no arrays, or have another shape or dtype; if tokens are outside the vocabulary,
            unless they are traced (under ``jit``).
        """
        check_whole("input", input)
        check_whole("positions", positions)
        check_tokens("input", input, self.config.vocab_size)
        if positions.shape[1] != input.shape[1] or positions.shape[0] not in (1, input.shape[0]):
            raise DataError(f"positions has shape {positions.shape} and input {input.shape}; pass one a token.")
        return self.final_norm(self.encoder(self.embedding(input), positions))

    def predict(self, embeddings: Array) -> Array:
        """Return the logits of the next token, shape (B, S, V), from what :meth:`encode` returned."""
        return self.predictor(embeddings)

    def __call__(self, input: Array, positions: Array) -> Array:
        """Return the logits of the next token, shape (B, S, V); parameters as in :meth:`encode`."""
        return self.predict(self.encode(input, positions))


def check_whole(argument: str, values: Array) -> None:
    """Raise unless `values` is an array of whole numbers, shape (B, S)."""
    if not isinstance(values, jax.Array | np.ndarray):
        raise DataError(f"{argument} is of type {type(values).__name__}; pass an array, e.g. jnp.asarray({argument}).")
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"{argument} has dtype {values.dtype}; pass whole numbers, e.g. {argument}.astype(int).")
    if values.ndim != 2:
        raise DataError(f"{argument} has shape {values.shape}; pass (batch, seq).")


def check_tokens(argument: str, values: Array, vocab_size: int) -> None:
    """Raise if a token is outside the vocabulary; values that are traced cannot be looked at."""
    if isinstance(values, jax.core.Tracer) or not values.size:
        return
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= vocab_size:
        raise DataError(
            f"{argument} holds {least if least < 0 else most}; pass tokens from 0 to {vocab_size - 1}, the vocabulary."
        )
