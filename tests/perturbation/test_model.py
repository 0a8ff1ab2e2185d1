import numpy as np
import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models import get_model, list_models
from scforge.models.components.gene_vectors import GeneVectorEmbedding
from scforge.perturbation.model import (
    fit_linear,
    fit_spread,
    gene_features,
    gene_vectors,
    network_weight,
    shifted_cells,
)


def test_features_that_tell_effects_count_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    (features, others), weights = rng.normal(size=(2, 40, 5)) / np.sqrt(5), rng.normal(size=(5, 30))
    unseen, shared = rng.normal(size=(10, 5)) / np.sqrt(5), rng.normal(size=30)
    for told, rank in ((features, 16), (others, 32)):
        deltas = shared + told @ weights + 0.05 * rng.normal(size=(40, 30))
        start = fit_linear(deltas, np.full(40, 100), np.eye(40), features, (5,), np.zeros((40, 4)), np.arange(40), rank)
        predicted = (start["base"] + unseen @ start["of_features"].T) @ start["basis"]
        if told is features:
            truth = shared + unseen @ weights
            assert np.square(predicted - truth).mean() < 0.05 * np.square(truth - truth.mean(axis=0)).mean()
        else:
            assert np.square(predicted - deltas.mean(axis=0)).mean() < 0.05 * deltas.var(axis=0).mean()
    # One effect is repeated.
    delta, one = np.arange(6.0)[None], np.ones((1, 1))
    start = fit_linear(delta, np.array([5]), one, np.ones((1, 2)), (2,), np.zeros((1, 2)), np.zeros(1), 3)
    np.testing.assert_allclose((start["base"] + start["own"][1]) @ start["basis"], delta[0], rtol=0.02)
    assert not start["of_features"].any()


def test_the_network_counts_only_where_validation_effects_agree() -> None:
    rng = np.random.default_rng(0)
    rest, noise = rng.normal(size=(2, 6, 40))
    linear, n_cells = rng.normal(size=(6, 40)), np.full(6, 50)
    assert network_weight(linear, 2 * rest, linear + rest, n_cells) == pytest.approx(0.5)
    assert network_weight(linear, noise, linear + rest, n_cells) == 0.0
    assert network_weight(linear, -rest, linear + rest, n_cells) == 0.0
    # One effect cannot be checked with another, and one of six is not agreement.
    assert network_weight(linear[:1], rest[:1], (linear + rest)[:1], n_cells[:1]) == 0.0
    one = rest * (np.arange(6) == 0)[:, None]
    assert network_weight(linear, rest, linear + one, n_cells) < 0.3


def test_cells_have_the_mean_and_the_variance_of_their_effect() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(20, 2)))[0].T
    controls = 5 + rng.normal(size=(4000, 20)) * 0.3
    spread, strength = np.array([0.5, 0.0]), np.array([1.5, -1.0])
    cells = shifted_cells(controls, strength @ basis, strength, basis, spread)
    np.testing.assert_allclose(cells.mean(axis=0), controls.mean(axis=0) + strength @ basis)
    gain = (cells @ basis.T).var(axis=0) - (controls @ basis.T).var(axis=0)
    np.testing.assert_allclose(gain, spread * strength**2, rtol=0.1, atol=0.03)
    np.testing.assert_allclose(fit_spread(strength[None], gain[None], np.array([9])), spread, rtol=0.1, atol=0.03)
    # Expression is not negative, and a gene that no cell expresses stays so.
    low = np.maximum(controls - 5, 0.0)
    low[:, 0] = 0.0
    cells = shifted_cells(low, np.full(20, -0.05), np.zeros(2), basis, spread)
    assert cells.min() == 0.0
    np.testing.assert_allclose(cells.mean(axis=0), np.maximum(low.mean(axis=0) - 0.05, 0.0))


@pytest.mark.parametrize("architecture", list_models())
def test_genes_of_all_architectures_are_known(architecture: str) -> None:
    module = get_model(architecture, ModelConfig(architecture=architecture, vocab_size=25, hidden_dim=16))
    features = gene_features(gene_vectors(module), 5, 8)
    assert features.shape == (25, 8)
    assert not features[:5].any()
    assert features[5:].square().sum(dim=1).mean() == pytest.approx(1.0, rel=1e-4)


def test_pretrained_gene_vectors_are_features() -> None:
    table = GeneVectorEmbedding(vocab_size=12, hidden_dim=8, dim=3, learned=4)
    nn.init.normal_(table.projection.weight)
    nn.init.normal_(table.learned.weight)
    vectors = torch.full((12, 3), torch.nan)
    vectors[4:] = torch.randn(8, 3)
    table.fill(vectors)
    features = gene_features(gene_vectors(nn.Sequential(table)), 4, 6)
    # Three dimensions went in.
    assert features[4:, :3].any()
    torch.testing.assert_close(features[:, 3:], torch.zeros(12, 3), atol=1e-3, rtol=0)
    with pytest.raises(OptionError, match="Linear has no gene embedding"):
        gene_vectors(nn.Linear(2, 2))
