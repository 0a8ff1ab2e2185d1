import numpy as np
import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.finetuning.tasks._perturbation_model import Observed, fit_linear, gene_features, gene_vectors
from scforge.models import get_model, list_models
from scforge.models.components.gene_vectors import GeneVectorEmbedding


def test_features_that_tell_effects_count_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    (features, others), weights = rng.normal(size=(2, 40, 5)) / np.sqrt(5), rng.normal(size=(5, 30))
    unseen, shared = rng.normal(size=(10, 5)) / np.sqrt(5), rng.normal(size=30)
    for told, rank in ((features, 16), (others, 32)):
        deltas = shared + told @ weights + 0.05 * rng.normal(size=(40, 30))
        start = fit_linear(
            Observed(deltas, np.full(40, 100), np.eye(40), features, np.zeros((40, 4)), np.arange(40)), rank
        )
        predicted = (start["base"] + unseen @ start["of_features.weight"].T) @ start["basis"]
        if told is features:
            truth = shared + unseen @ weights
            assert np.square(predicted - truth).mean() < 0.05 * np.square(truth - truth.mean(axis=0)).mean()
        else:
            assert np.square(predicted - deltas.mean(axis=0)).mean() < 0.05 * deltas.var(axis=0).mean()
    # One effect is repeated.
    delta, one = np.arange(6.0)[None], np.ones((1, 1))
    start = fit_linear(Observed(delta, np.array([5]), one, np.ones((1, 2)), np.zeros((1, 2)), np.zeros(1)), 3)
    np.testing.assert_allclose((start["base"] + start["own.weight"][1]) @ start["basis"], delta[0], rtol=0.02)
    assert not start["of_features.weight"].any()


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
    with pytest.raises(OptionError, match="Linear has no embedding of genes"):
        gene_vectors(nn.Linear(2, 2))
