"""The training loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from scforge.soma.v1.configs import V1_PAD_TOKEN_ID, check_one_a_token, check_tokens, check_whole
from scforge.soma.v1.flax.model import Model
from scforge.soma.v1.flax.sigreg import SIGReg


def compute_loss(model: Model, sig_reg: SIGReg, token_ids: Array, targets: Array) -> tuple[Array, Array]:
    """Return the cross entropy of the next bytes without padding plus the regularizer, and the mean embedding.

    Positions start at 0 in each sequence, regardless of its offset in the data. Padding is included in the regularizer
    and the mean, as in the published package. If all targets are padding, the cross entropy is 0 (in torch: NaN).

    Parameters
    ----------
    model
        The model.
    sig_reg
        The regularizer, which samples its directions.
    token_ids, targets
        Integers, shape (B, S).

    Returns
    -------
    The loss, and the mean state of all tokens, shape (H,).

    Raises
    ------
    DataError
        If `token_ids` and `targets` differ in shape, are not integer arrays, or (unless traced) contain tokens outside
        the vocabulary.
    """
    check_whole("token_ids", token_ids)
    check_whole("targets", targets)
    check_one_a_token("targets", targets, "token_ids", token_ids)
    if not isinstance(targets, jax.core.Tracer):
        check_tokens("targets", targets, model.config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    states = model.encode(token_ids, positions)
    log_probabilities = jax.nn.log_softmax(model.predict(states), axis=-1)
    of_targets = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    counts = targets != V1_PAD_TOKEN_ID
    cross_entropy = -jnp.where(counts, of_targets, 0.0).sum() / jnp.maximum(counts.sum(), 1)
    return cross_entropy + sig_reg(states), states.mean(axis=(0, 1))
