import numpy as np
import pytest
import torch

from scforge.data import open_cells
from scforge.errors import DataError, OptionError, ScforgeWarning, TrainingError
from scforge.models import GenePoolingModel, TransformerEncoder
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training import JointEmbedding
from scforge.training.objectives import joint_embedding

VIEWS, SLICES, LATENT = 2, 32, 4
SMALL = {"views": VIEWS, "slices": SLICES}
PER_BATCH = {**SMALL, "per_batch": True, "batch_key": "protocol"}


@pytest.fixture
def adata(tiny_adata):
    """60 cells: two batches of a good size, and one of a single cell."""
    tiny_adata.obs["protocol"] = ["x"] * 20 + ["y"] * 39 + ["alone"]
    return tiny_adata


@pytest.fixture
def cells(adata, tiny_vocab):
    return open_cells(adata, tiny_vocab)


@pytest.fixture
def tokenizer(tiny_vocab):
    return get_tokenizer("continuous_projection", tiny_vocab, append_cls=False)


def module_of(vocab, **options):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "pooling": "weighted_sum", "ffn_dim": 32, "latent_dim": LATENT, **options}
    return GenePoolingModel(len(vocab), 16, 1, **options)


def bound(cells, **options):
    objective = JointEmbedding(**options)
    objective = JointEmbedding(**{**options, **objective.options_from(cells.column)})
    objective.bind(cells, np.arange(len(cells)))
    return objective


def views_of(objective, cells, tokenizer, rows):
    return objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0)


def sigreg_of_parts(objective, module, batch, parts):
    """The statistic of some cells of each of the batches."""
    with torch.no_grad():
        z_kbd = module.encode(**{k: v for k, v in batch.items() if k != "batch_shares"}).unflatten(0, (VIEWS, -1))
        noise = torch.randn(LATENT, SLICES, generator=torch.Generator().manual_seed(0))
        return [objective._sigreg.compute(z_kbd[:, part], noise) for part in parts]


def test_sigreg_is_that_of_each_batch_weighted_by_its_cells(cells, tokenizer, tiny_vocab):
    objective, module = bound(cells, **PER_BATCH), module_of(tiny_vocab).eval()
    assert objective.batches == ["alone", "x", "y"]
    assert objective.model_options() == {}, "the architecture is not told the batches"
    rows = np.array([0, 40, 59, 1, 2, 41, 42, 43])  # three of x, four of y, and the one alone
    batch = views_of(objective, cells, tokenizer, rows)
    loss, figures = objective.loss(module, batch)
    x, y = sigreg_of_parts(objective, module, batch, ([0, 3, 4], [1, 5, 6, 7]))
    torch.testing.assert_close(figures["sigreg"], (3 * x + 4 * y) / 7)
    torch.testing.assert_close(loss.detach(), 0.95 * figures["agreement"] + 0.05 * figures["sigreg"])
    # One batch is as all cells.
    losses = []
    for of in (objective, bound(cells, **SMALL)):
        torch.manual_seed(3)
        losses.append(of.loss(module.train(), views_of(of, cells, tokenizer, np.arange(20)))[0])
    torch.testing.assert_close(*losses)
    # A step without two cells of a batch has agreement alone.
    loss, figures = objective.loss(module, views_of(objective, cells, tokenizer, np.array([0, 30, 59])))
    loss.backward()
    assert figures["sigreg"] == 0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in module.parameters())


def test_batches_are_pulled_together(adata, tiny_vocab, tokenizer):
    """Batches that differ by a tenfold expression of some genes end nearer to each other than without."""
    counts = adata.X.toarray()
    counts[20:59, ::4] += 20
    adata.X = counts
    cells = open_cells(adata[:59].copy(), tiny_vocab)
    gaps = []
    for options in (SMALL, PER_BATCH):
        objective, module = bound(cells, weight=0.5, **options), module_of(tiny_vocab)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for epoch in range(60):
            batch = objective.prepare(cells.block(np.arange(59)), tokenizer, epoch=epoch, seed=0)
            optimizer.zero_grad()
            objective.loss(module, batch)[0].backward()
            optimizer.step()
        with torch.no_grad():
            z = module.eval().encode(**tokenizer(cells.block(np.arange(59))))
        gaps.append(float((z[:20].mean(dim=0) - z[20:].mean(dim=0)).norm()))
    assert gaps[1] < 0.5 * gaps[0]


def test_training_refuses_unknown_batches(cells):
    for changed, message in (
        ({"batches": ["x"]}, "batch_key='protocol': 40 of 60 cells have batches that"),
        ({"batch_key": "protocl"}, "batch_key='protocl'"),
        ({"clusters": 61}, "clusters=61 is more than the 60 cells to cluster"),
    ):
        with pytest.raises(DataError, match=message):
            bound(cells, **{**PER_BATCH, **changed})
    with raises(TrainingError, "batches"):
        JointEmbedding(**PER_BATCH).bind(cells, np.arange(60))


def test_batches_of_a_query_need_not_be_known(cells, tokenizer):
    objective = JointEmbedding(**PER_BATCH, batches=["another"])
    objective.bind_query(cells, np.arange(60))
    batch = views_of(objective, cells, tokenizer, np.arange(60))
    assert (batch["batch_shares"] > 0).sum(dim=1).tolist() == [20, 39]
    torch.testing.assert_close(batch["batch_shares"].sum(dim=1), torch.ones(2))
    objective = JointEmbedding(**{**PER_BATCH, "batch_key": "donor"}, batches=["another"])
    with pytest.warns(ScforgeWarning, match="batch_key='donor': .*all cells are treated as one batch"):
        objective.bind_query(cells, np.arange(60))
    assert views_of(objective, cells, tokenizer, np.arange(60))["batch_shares"].shape == (1, 60)


CLUSTERS = {**PER_BATCH, "clusters": 2}


@pytest.fixture
def uneven(adata, tiny_vocab, monkeypatch):
    """The cells of batches x and y; x has 4 of group a and 16 of b, y as many of the one as of the other."""
    # So few cells of such batches are more than Harmony can do.
    monkeypatch.setattr(joint_embedding, "harmony_correct", lambda components, batches: components)
    group = adata.obs["group"].cat.codes.to_numpy()
    in_x = np.concatenate([np.flatnonzero(group == 0)[:4], np.flatnonzero(group == 1)[:16]])
    adata.obs["protocol"] = np.where(np.isin(np.arange(60), in_x), "x", "y")
    rest = [np.flatnonzero((adata.obs["protocol"] == "y") & (group == one))[:14] for one in (0, 1)]
    adata = adata[np.sort(np.concatenate([in_x, *rest]))].copy()
    return adata, open_cells(adata, tiny_vocab)


def test_weights_even_out_the_shares_of_clusters(uneven, adata, tokenizer, tiny_vocab):
    some, cells = uneven
    objective = bound(cells, **CLUSTERS)
    in_x, in_a = np.array(some.obs["protocol"] == "x"), np.array(some.obs["group"] == "a")
    # On average .35 of a batch are of group a, and .65 of group b.
    for batch, group, weight in ((in_x, in_a, 1.75), (in_x, ~in_a, 0.8125), (~in_x, in_a, 0.7), (~in_x, ~in_a, 1.3)):
        np.testing.assert_allclose(objective._weights[batch & group], weight, rtol=1e-6)
    shares = views_of(objective, cells, tokenizer, np.arange(len(cells)))["batch_shares"]
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(2))
    torch.testing.assert_close(shares[:, in_a].sum(dim=1), torch.tensor([0.35, 0.35]))
    # Cells that were not drawn weigh one, and rare ones ten at most.
    assert (bound(cells, **CLUSTERS, max_cells=30)._weights == 1).sum() == 18
    adata.obs["protocol"] = np.where(adata.obs["group"] == "a", "x", "y")
    adata.obs.loc[adata.obs_names[1], "protocol"] = "x"  # the one cell of group b there
    assert bound(open_cells(adata, tiny_vocab), **CLUSTERS)._weights[1] == 10


def test_sigreg_of_weights_is_that_of_repeated_cells(cells, tokenizer, tiny_vocab):
    objective, module = bound(cells, **CLUSTERS), module_of(tiny_vocab).eval()
    objective._weights = np.ones(60, dtype=np.float32)
    objective._weights[[0, 40]] = 2.0
    batch = views_of(objective, cells, tokenizer, np.array([0, 1, 40, 41, 42]))
    _, figures = objective.loss(module, batch)
    # The statistic is a number of cells times an error; that of the weights counts each cell once.
    x, y = sigreg_of_parts(objective, module, batch, ([0, 0, 1], [2, 2, 3, 4]))
    torch.testing.assert_close(figures["sigreg"], (2 * 2 * x / 3 + 3 * 3 * y / 4) / 5)


def test_clusters_of_a_query(cells):
    objective = JointEmbedding(**PER_BATCH, clusters=3, batches=["another"])
    objective.bind_query(cells, np.arange(60))
    assert len(np.unique(objective._weights)) > 1
    for rows in (np.array([0, 1]), np.array([0])):  # two clusters in place of three, or none
        objective.bind_query(cells, rows)
        assert (objective._weights is None) == (len(rows) == 1)


def test_the_projector_takes_the_loss_and_the_embedding_is_its_input(cells, tokenizer, tiny_vocab, train_on):
    objective = bound(cells, **SMALL, projector=8)
    assert objective.model_options() == {"projector_dim": 8}
    module = module_of(tiny_vocab, **objective.model_options())
    objective.check_architecture(module)
    batch = views_of(objective, cells, tokenizer, np.arange(12))
    loss, figures = objective.loss(module.eval(), batch)
    with torch.no_grad():
        z = module.encode(**batch)
        p_kbd = module.project(z).unflatten(0, (VIEWS, -1))
        noise = torch.randn(8, SLICES, generator=torch.Generator().manual_seed(0))
    assert (z.shape[1], p_kbd.shape[2]) == (LATENT, 8)
    torch.testing.assert_close(figures["agreement"], (p_kbd - p_kbd.mean(dim=0)).square().mean())
    torch.testing.assert_close(figures["sigreg"], objective._sigreg.compute(p_kbd, noise))
    assert figures["geometry_direction"].shape == (LATENT,)
    loss.backward()
    head = {name for name, _ in module.named_parameters() if name.startswith("head.")}
    assert {name for name, p in module.named_parameters() if p.grad is None} <= head
    before = [p.detach().clone() for p in module.projector.parameters()]
    history = train_on(cells, tokenizer, module, objective, epochs=2, n_held_out=10, batch_size=25)
    assert not any(torch.equal(a, b) for a, b in zip(before, module.projector.parameters(), strict=True))
    # What is logged has the geometry of the embedding.
    for stage in ("train", "validation"):
        assert all(1 <= rank <= LATENT for rank in history[f"{stage}_effective_rank"])
        assert all(0 <= cosine < 1 for cosine in history[f"{stage}_mean_cosine"])
    assert not any("geometry" in name for name in history)


def test_architectures_without_a_projector():
    objective, name = JointEmbedding(projector=8), "TransformerEncoder"
    for architecture in (TransformerEncoder, TransformerEncoder(84, 8, 1, 2, max_seq_len=8)):
        with pytest.raises(
            OptionError, match=f"{name}, which has no projector for projector=8; choose .* 'gene_pooling'"
        ):
            objective.check_architecture(architecture)
        JointEmbedding().check_architecture(architecture)


def test_collapse_is_named_once_a_training(cells, tokenizer, tiny_vocab, train_on):
    class Dead(GenePoolingModel):
        """All cells are one point."""

        def encode(self, *args, **kwargs):
            return 1 + 1e-4 * super().encode(*args, **kwargs)

    options = {"epochs": 3, "n_held_out": 10, "batch_size": 25, "lr": 1e-6}
    for _ in range(2):
        module = Dead(len(tiny_vocab), 16, 1, pooling="weighted_sum", latent_dim=LATENT)
        with pytest.warns(ScforgeWarning, match=f"collapsed.* of {LATENT} dimensions.*larger weight") as told:
            train_on(cells, tokenizer, module, JointEmbedding(**SMALL), **options)
        assert len(told) == 1
