import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scforge.data import open_cells
from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.models import ScDiVaModel, TransformerEncoder
from scforge.tokenizers import get_tokenizer
from scforge.training import Variational
from scforge.training.objectives.variational import dense_profiles
from scforge.training.plan import EpochMetrics

N_GENES, LATENT = 80, 3


class Linear(nn.Module):
    """The smallest module with a latent distribution; it remembers for which batches it decoded."""

    def __init__(self, n_batches=1):
        super().__init__()
        torch.manual_seed(0)
        self.genes = nn.Embedding(N_GENES + 4, 2 * LATENT, padding_idx=0)
        self.decoder, self.classify = nn.Linear(LATENT, N_GENES), nn.Linear(LATENT, 2)
        self.of_batch = nn.Embedding(n_batches, N_GENES)

    def infer(self, input_ids, attention_mask, values):
        mu, logvar = (0.02 * self.genes(input_ids) * values.unsqueeze(-1)).sum(dim=1).chunk(2, dim=1)
        return {"latent": mu, "mu": mu, "logvar": logvar}

    def decode(self, latent, batch=None):
        self.asked = batch
        return self.decoder(latent) if batch is None else self.decoder(latent) + self.of_batch(batch)


@pytest.fixture
def tokenizer(entropy_ranked):
    return entropy_ranked


def profiles(cells):
    return torch.from_numpy(np.log1p(cells.counts.toarray() * (1e4 / cells.totals[:, None]))).float()


def bound(cells, **options):
    objective = Variational(**options)
    objective = Variational(**{**options, **objective.options_from(cells.column)})
    objective.bind(cells, np.arange(len(cells)))
    return objective


def test_loss_is_the_formula(cells, tokenizer):
    options = {"beta": 0.3, "reconstruction_weight": 2.0, "classification_weight": 0.5}
    objective, module = bound(cells, labels_key="group", **options, kl_warmup=4), Linear()
    labels = torch.tensor([0, 1] * 30)
    for epoch, beta in ((0, 0.075), (2, 0.225), (5, 0.3)):
        batch = objective.prepare(cells.block(np.arange(60)), tokenizer, epoch=epoch, seed=0)
        found = module.infer(batch["input_ids"], batch["attention_mask"], batch["values"])
        mu, logvar = found["mu"], found["logvar"]
        reconstruction = ((module.decode(mu) - profiles(cells)) ** 2).mean()
        classification = F.cross_entropy(module.classify(mu), labels)
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(dim=1).mean()
        # The warm-up is one of training alone.
        for training, weight in ((True, beta), (False, 0.3)):
            loss, figures = objective.loss(module.train(training), batch)
            torch.testing.assert_close(loss, 2.0 * reconstruction + 0.5 * classification + weight * kl)
        torch.testing.assert_close(figures["reconstruction"], reconstruction.detach())
        torch.testing.assert_close(figures["kl"], kl.detach())
    summary = objective.summarize({name: figure.numpy() for name, figure in {"loss": loss.detach(), **figures}.items()})
    right = (module.classify(mu).argmax(dim=1) == labels).float().mean()
    assert summary["accuracy"] == pytest.approx(float(right))
    assert summary["active_units"] == int((mu.var(dim=0, correction=0) > 0.01).sum())
    assert set(summary) == {"loss", "reconstruction", "classification", "kl", "accuracy", "active_units"}
    objective = Variational(beta=1.0, kl_warmup=0, free_bits=50.0)
    batch = objective.prepare(cells.block(np.arange(60)), tokenizer, epoch=0, seed=0)
    free, figures = objective.loss(module, batch)
    torch.testing.assert_close(free - figures["reconstruction"], torch.tensor(50.0 * LATENT))
    torch.testing.assert_close(figures["kl"], kl.detach())  # what is logged is the divergence itself


def test_active_units_are_those_over_all_cells_of_an_epoch(cells, tokenizer):
    objective, means, module = Variational(), EpochMetrics(), Linear()
    mu = module.infer(**tokenizer(cells.block(np.arange(60))))["mu"]
    with torch.no_grad():  # one dimension just above the threshold, two just below
        module.genes.weight[:, :LATENT] *= (torch.tensor([0.0101, 0.0099, 0.0099]) / mu.var(dim=0, correction=0)).sqrt()
    for rows in np.split(np.arange(60), [7, 30, 31]):
        loss, figures = objective.loss(module, objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0))
        means.add({"loss": loss, **figures}, len(rows))
    assert objective.summarize(means.take())["active_units"] == 1
    assert means.take() == {}, "the next epoch begins anew"


def test_what_is_seen_and_what_is_predicted(cells, tokenizer):
    block, objective = cells.block(np.arange(60)), Variational(thinning=(0.1, 0.5))
    whole = Variational().prepare(block, tokenizer, epoch=0, seed=0)
    assert torch.equal(whole["values"], tokenizer(block)["values"])
    thinned = objective.prepare(block, tokenizer, epoch=0, seed=0)
    assert thinned["attention_mask"].sum() < 0.7 * whole["attention_mask"].sum()
    assert all(torch.equal(thinned[name], whole[name]) for name in ("profile_genes", "profile_values"))
    # What happens to a cell does not depend on its batch.
    rows = np.array([40, 3])
    some = objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0)
    torch.testing.assert_close(some["values"].sum(dim=1), thinned["values"].sum(dim=1)[rows])


def test_the_profile_is_whole_however_the_tokens_are_cut(cells, tiny_vocab):
    short = get_tokenizer("entropy_ranked", tiny_vocab, max_len=5)
    batch = Variational().prepare(cells.block(np.arange(60)), short, epoch=0, seed=0)
    assert batch["input_ids"].shape[1] == 5
    torch.testing.assert_close(dense_profiles(batch, N_GENES), profiles(cells))
    assert (profiles(cells)[:, 0] > 0).any()  # the first gene is not lost to padding
    # The decoder starts at the means.
    module = ScDiVaModel(N_GENES + 4, 8, 1, 1, latent_dim=2, max_tokens=4)
    Variational().initialize(module, cells, short)
    expected = profiles(cells).mean(dim=0)
    torch.testing.assert_close(module.decode(torch.zeros(1, 2))[0], expected, rtol=1e-5, atol=1e-5)
    Variational().initialize(Linear(), cells, short)  # nothing to start


def test_classes_and_batches(tiny_adata, tiny_vocab, tokenizer):
    tiny_adata.obs["group"] = [*[None] * 6, "c", *tiny_adata.obs["group"].iloc[7:]]
    cells = open_cells(tiny_adata, tiny_vocab)
    objective = bound(cells, labels_key="group", labels=["a", "b"], batch_key="batch")
    assert objective.batches == ["x", "y"]
    assert objective.model_options() == {"num_cell_types": 2, "n_batches": 2}
    assert Variational().model_options() == {}
    module, rows = Linear(n_batches=2), np.array([0, 6, 7, 8, 40])
    batch = objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0)
    assert batch["cell_type"].tolist() == [-1, -1, 1, 0, 0]
    assert batch["batch"].tolist() == [0, 0, 0, 0, 1]
    _, figures = objective.loss(module, batch)
    assert module.asked.tolist() == [0, 0, 0, 0, 1]
    logits = module.classify(module.infer(batch["input_ids"], batch["attention_mask"], batch["values"])["mu"])
    torch.testing.assert_close(figures["classification"], F.cross_entropy(logits[2:], torch.tensor([1, 0, 0])).detach())
    assert figures["labeled"] == pytest.approx(0.6)
    without = objective.prepare(cells.block(rows[:2]), tokenizer, epoch=0, seed=0)
    loss, figures = objective.loss(module, without)
    assert figures["classification"] == 0
    assert loss.isfinite()
    assert "accuracy" not in objective.summarize({name: figure.numpy() for name, figure in figures.items()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels_key": "number"}, "labels_key='number' contains non-integer numbers"),
        ({"batch_key": "empty"}, "batch_key='empty' is missing for all cells"),
        ({"labels_key": "grup"}, "labels_key='grup'"),
        (
            {"batch_key": "batch", "batches": ["x"]},
            "batch_key='batch': 30 of 60 cells have batches that are unknown to the model",
        ),
        ({"labels_key": "group", "labels": ["t"]}, "no training cell has a class that is known to the model"),
    ],
)
def test_what_does_not_fit(tiny_adata, tiny_vocab, options, message):
    with pytest.raises(OptionError, match="with TransformerEncoder, which has no latent distribution"):
        Variational().check_architecture(TransformerEncoder)
    tiny_adata.obs["number"] = np.linspace(0, 1, 60)
    tiny_adata.obs["empty"] = pd.Categorical([None] * 60)
    with pytest.raises((OptionError, DataError), match=message):
        bound(open_cells(tiny_adata, tiny_vocab), **options)


def test_queries_without_classes_and_of_other_batches(tiny_adata, tiny_vocab, tokenizer):
    del tiny_adata.obs["group"]
    tiny_adata.obs["batch"] = np.where(np.arange(60) < 20, "x", "new")
    cells, rows = open_cells(tiny_adata, tiny_vocab), np.arange(60)
    objective = Variational(labels_key="group", labels=["a", "b"], batch_key="batch", batches=["x", "y"])
    with (
        pytest.warns(ScforgeWarning, match="batch_key='batch': 40 of 60 cells .* decoded with the mean of all"),
        pytest.warns(
            ScforgeWarning, match="labels_key='group': no training cell .* are used only for the reconstruction"
        ),
    ):
        objective.bind_query(cells, rows)
    batch = objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0)
    assert batch["cell_type"].tolist() == [-1] * 60
    assert batch["batch"].tolist() == [0] * 20 + [-1] * 40
    torch.manual_seed(0)
    module = ScDiVaModel(84, 8, 1, 1, latent_dim=2, num_cell_types=2, n_batches=2, dropout=0.0).eval()
    with torch.no_grad():
        module.batch_integration_head.batch_embedding.weight.normal_()
    loss, figures = objective.loss(module, batch)
    assert loss.isfinite()
    assert figures["classification"] == 0
    latent = torch.randn(2, 2)
    told = module.decode(latent, torch.tensor([1, -1]))
    assert torch.equal(told[0], module.decode(latent, 1)[0])
    assert torch.equal(told[1], module.decode(latent)[1])
    only = {"labels_key": "group", "labels": ["a"], "reconstruction_weight": 0.0}
    with pytest.raises(DataError, match="reconstruction_weight=0 leaves no other loss; label some of the cells"):
        Variational(**only).bind_query(cells, rows)
