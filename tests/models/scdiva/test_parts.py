import math

import pytest
import torch

from scforge.errors import OptionError
from scforge.models import ModelOutput, ScDiVaModel
from scforge.models.components.latent import classification_loss, kl_divergence, reconstruction_loss
from scforge.models.scdiva.parts import mean_over_cells
from scforge.testing import raises

SIZES = {"hidden_dim": 16, "num_layers": 2, "num_heads": 4, "latent_dim": 6}
VOCAB = 60


def test_losses_by_hand():
    one, two = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert float(reconstruction_loss(one, two)) == 2.5
    logits, labels = torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([1, -100])
    torch.testing.assert_close(classification_loss(logits, labels), torch.tensor(math.log(2)))
    assert float(classification_loss(logits, torch.tensor([-100, -100]))) == 0.0
    mu, logvar = torch.randn(7, 4), torch.randn(7, 4)
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(mu, (0.5 * logvar).exp()), normal(0.0, 1.0))
    torch.testing.assert_close(kl_divergence(mu, logvar), exact.sum(dim=1).mean())
    torch.testing.assert_close(kl_divergence(mu, logvar, free_bits=0.7), exact.mean(dim=0).clamp(min=0.7).sum())
    losses, cells = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert float(mean_over_cells(losses, cells, None)) == 3.0
    assert float(mean_over_cells(losses, cells, torch.tensor([1.0, 9.0, 2.0]))) == (2.0 + 0.0 + 10.0) / 3


def test_the_latent_is_drawn_in_training_alone(made, profiles):
    model = made(num_cell_types=2)
    found = model.encode(profiles)
    assert torch.equal(found["latent"], found["mu"])
    model.train()
    drawn, mu, logvar = model.variational_layer(torch.randn(3, 1, 16).expand(3, 5000, 16))
    torch.testing.assert_close(drawn.mean(dim=1), mu[:, 0], atol=0.1, rtol=0)
    torch.testing.assert_close(drawn.var(dim=1), logvar[:, 0].exp(), atol=0, rtol=0.1)
    assert torch.equal(model.predict(profiles), model.predict(profiles))
    assert model.training
    without = made(variational=False).train()
    found = without.infer(profiles)
    assert torch.equal(found["latent"], found["mu"])
    assert "kl" not in without(profiles, target=profiles).losses


def test_profiles_have_the_losses_of_their_tasks(made, profiles):
    model = made(num_cell_types=3, mode="vector")
    labels = torch.tensor([0, 2, 1, -100, 1])
    output = model(profiles, labels=labels, target=profiles, beta=0.5)
    assert isinstance(output, ModelOutput)
    found = model.infer(profiles)
    expected = classification_loss(model.classify(found["mu"]), labels)
    expected = expected + reconstruction_loss(model.decode(found["mu"]), profiles)
    expected = expected + 0.5 * kl_divergence(found["mu"], found["logvar"])
    torch.testing.assert_close(output.loss, expected)
    assert set(output.losses) == {"classification", "reconstruction", "kl"}
    assert model(profiles).loss is None
    assert made()(profiles).logits is None


def test_a_target_is_reconstructed_from_tokens(hide, tokens_of, made, profiles):
    model = made(denoising=True)
    _, hidden = hide(tokens_of(profiles))
    output = model(**hidden, target=profiles, beta=0.25)
    names = ("input_ids", "attention_mask", "values", "masked_positions", "masked_values")
    found = model.infer(**{name: hidden[name] for name in names})
    torch.testing.assert_close(
        output.losses["reconstruction"], reconstruction_loss(model.decode(found["mu"]), profiles)
    )
    torch.testing.assert_close(output.losses["kl"], kl_divergence(found["mu"], found["logvar"]))
    parts = output.losses
    torch.testing.assert_close(
        output.loss, parts["identity"] + parts["value"] + parts["reconstruction"] + 0.25 * parts["kl"]
    )


def test_batches_change_the_expression(made, profiles):
    model = made(n_batches=3)
    latent = model.infer(profiles)["mu"]
    parts = [model.decode(latent, batch) for batch in range(3)]
    assert not torch.allclose(parts[0], parts[1], atol=1e-4)
    each = model.decode(latent, torch.tensor([0, 1, 2, 0, 1]))
    torch.testing.assert_close(each[1], parts[1][1])
    fresh = ScDiVaModel(VOCAB, **SIZES, n_batches=3).eval()
    torch.testing.assert_close(fresh.decode(latent, 2), fresh.decode(latent))
    for batch, message in (
        (3, "pass numbers from 0 to 2"),
        (0.5, "pass an integer"),
        (torch.zeros(2).long(), "each of the 5"),
    ):
        with pytest.raises(OptionError, match=message):
            model.decode(latent, batch)
    with raises(OptionError, "batch"):
        made().decode(latent, 0)
