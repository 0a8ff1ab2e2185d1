"""The loss of a batch of chunks.

Shapes: B sequences, S tokens, H width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from scforge.soma.v1.configs import V1_PAD_TOKEN_ID, check_one_a_token, check_tokens, check_whole
from scforge.soma.v1.torch.model import Model, can_look_at
from scforge.soma.v1.torch.sigreg import SIGReg


def compute_loss(
    model: Model, sig_reg: SIGReg, token_ids: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the embedding of a batch.

    The loss is the mean cross entropy in nats at targets other than PAD, plus the regularizer over all states.
    Positions start at 0 in each chunk. The embedding is averaged over tokens, then over chunks. PAD is treated like any
    other token in the regularizer and the embedding, unless ``model.pad_mask`` is set.

    Parameters
    ----------
    model
        The model.
    sig_reg
        The regularizer, which samples its directions with torch's default generator.
    token_ids
        Tokens, integers, shape (B, S).
    targets
        Next tokens, integers, shape (B, S). If all targets are PAD, the loss is NaN.

    Returns
    -------
    The loss, a scalar, and the embedding, shape (H,).

    Raises
    ------
    DataError
        If `token_ids` and `targets` differ in shape, are not integer tensors, or contain tokens outside the vocabulary
        (checked only on a CPU).

    Examples
    --------
    >>> from scforge.soma.v1.configs import ModelConfig, SIGRegConfig
    >>> from scforge.soma.v1.torch import Model, SIGReg
    >>> model = Model(ModelConfig(0.0, embedding_dim=8, pwff_hidden_dim=16, num_layers=1, num_heads=2))
    >>> tokens = torch.tensor([[65, 67, 71, 257]])
    >>> loss, embedding = compute_loss(model, SIGReg(SIGRegConfig()), tokens, tokens.roll(-1, 1))
    >>> loss.shape, embedding.shape
    (torch.Size([]), torch.Size([8]))
    """
    check_whole("token_ids", token_ids, torch.Tensor)
    check_whole("targets", targets, torch.Tensor)
    check_one_a_token("targets", targets, "token_ids", token_ids)
    if can_look_at(targets):
        check_tokens("targets", targets, model.config.vocab_size)
    positions = torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape)
    states_bsh = model.encode(token_ids, positions)
    logits = model.predict(states_bsh)
    if model.pad_mask:
        chosen_bs = token_ids != V1_PAD_TOKEN_ID
        regularizer = sig_reg(states_bsh[chosen_bs])
        # Averaged over the chosen tokens of each chunk, then over chunks that have such tokens.
        n_b = chosen_bs.sum(dim=1)
        sums_bh = (states_bsh * chosen_bs.unsqueeze(-1)).sum(dim=1)
        embedding = (sums_bh / n_b.clamp(min=1).unsqueeze(-1)).sum(dim=0) / (n_b > 0).sum()
    else:
        regularizer = sig_reg(states_bsh)
        embedding = states_bsh.mean(dim=1).mean(dim=0)
    cross_entropy = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten().long(), ignore_index=V1_PAD_TOKEN_ID
    )
    return cross_entropy + regularizer, embedding
