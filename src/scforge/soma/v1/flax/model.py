"""The byte-level transformer in flax.

Shapes: B sequences, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array

from scforge.soma.v1.configs import (
    EncoderConfig,
    ModelConfig,
    check_config,
    check_one_a_token,
    check_tokens,
    check_whole,
    part_of,
)
from scforge.soma.v1.flax.modules.encoder import Encoder
from scforge.soma.v1.flax.modules.layer import layer_norm
from scforge.soma.v1.flax.serde import Serializable


class Model(Serializable, nnx.Module):
    """Byte embedding, encoder, final LayerNorm, and predictor of the next byte.

    Like other flax modules, it starts in training mode, with dropout; ``model.eval()`` and ``model.train()`` switch
    modes.

    Parameters
    ----------
    config
        Sizes of the model.
    rngs
        Random streams for initial weights (``params``) and dropout (``dropout``). If None, uses ``nnx.Rngs(0)``, for
        models whose weights come from a file.

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
        rngs = nnx.Rngs(0) if rngs is None else rngs
        check_config(config, ModelConfig)
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.embedding_dim, rngs=rngs)
        self.encoder = Encoder(part_of(config, EncoderConfig), rngs)
        self.final_norm = layer_norm(config.embedding_dim, rngs)
        self.predictor = nnx.Linear(config.embedding_dim, config.vocab_size, rngs=rngs)

    def encode(self, input: Array, positions: Array) -> Array:
        """Return the state of each token after the final LayerNorm.

        Parameters
        ----------
        input
            Token ids, integers, shape (B, S).
        positions
            Offsets of the bytes, integers, shape (B, S) or (1, S).

        Returns
        -------
        The states, shape (B, S, H).

        Raises
        ------
        DataError
            If tokens or positions are not arrays, or have a different shape or dtype, or if tokens are outside the
            vocabulary (not checked if they are traced under ``jit``).
        """
        check_whole("input", input)
        check_whole("positions", positions)
        check_one_a_token("positions", positions, "input", input, or_one_row=True)
        if not isinstance(input, jax.core.Tracer):
            check_tokens("input", input, self.config.vocab_size)
        return self.final_norm(self.encoder(self.embedding(input), positions))

    def predict(self, embeddings: Array) -> Array:
        """Return the logits of the next token, shape (B, S, V), from the output of :meth:`encode`."""
        return self.predictor(embeddings)

    def __call__(self, input: Array, positions: Array) -> Array:
        """Return the logits of the next token, shape (B, S, V); for the parameters, see :meth:`encode`."""
        return self.predict(self.encode(input, positions))
