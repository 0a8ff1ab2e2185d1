"""A small ScDiVa, and cells for it as profiles, as tokens, and with hidden parts."""

from collections.abc import Callable

import pytest
import torch

from scforge.models import ScDiVaModel

SIZES = {"hidden_dim": 16, "num_layers": 2, "num_heads": 4, "latent_dim": 6}
VOCAB, GENES = 60, 56
MASK = 2
type Batch = dict[str, torch.Tensor]


@pytest.fixture
def profiles() -> torch.Tensor:
    """Profiles of five cells."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(5, GENES, generator=generator) * 5
    return x * (torch.rand(5, GENES, generator=generator) < 0.4)


def _made(std: float = 0.05, **options) -> ScDiVaModel:
    """Make a model of options, none of whose weights are zero."""
    torch.manual_seed(0)
    model = ScDiVaModel(VOCAB, **{**SIZES, "dropout": 0.0, **options})
    with torch.no_grad():  # some weights start at zero
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=std)
    return model.eval()


def _tokens_of(x: torch.Tensor) -> Batch:
    """All expressed genes from high to low, ties by gene."""
    order = x.sort(dim=1, descending=True, stable=True).indices
    values = x.gather(1, order)
    width = int((x > 0).sum(dim=1).max())
    mask = (values > 0)[:, :width]
    return {"input_ids": (order + 4)[:, :width] * mask, "attention_mask": mask, "values": values[:, :width] * mask}


def _hide(batch: Batch, seed: int = 0) -> tuple[Batch, Batch]:
    """Hide identities and values, each of half of the tokens; return the batch as it was, and as a model gets it."""
    generator = torch.Generator().manual_seed(seed)
    mask, ids, values = (batch[name] for name in ("attention_mask", "input_ids", "values"))
    no_gene, no_value = (mask & (torch.rand(mask.shape, generator=generator) < 0.5) for _ in range(2))
    hidden = {
        "input_ids": ids.masked_fill(no_gene, MASK),
        "attention_mask": mask,
        "values": values.masked_fill(no_value, 0.0),
        "labels": ids.masked_fill(~no_gene, -100),
        "value_labels": values,
        "masked_positions": no_gene,
        "masked_values": no_value,
        "loss_weights": 1.0 + torch.arange(len(ids)),
    }
    return batch, hidden


@pytest.fixture
def made() -> Callable[..., ScDiVaModel]:
    return _made


@pytest.fixture
def tokens_of() -> Callable[[torch.Tensor], Batch]:
    return _tokens_of


@pytest.fixture
def hide() -> Callable[[Batch], tuple[Batch, Batch]]:
    return _hide
