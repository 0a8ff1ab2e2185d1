import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.data.neighbors import harmony_correct, mutual_neighbors, principal_components
from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.models import Encoder, GenePoolingModel, TransformerEncoder
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training import NeighborDenoising
from scforge.training.objectives import _neighbors
from scforge.training.objectives.neighbor_denoising import contrastive_loss

GENES, PER_GROUP = 40, 60


def two_batches(*, missing: bool = False) -> AnnData:
    """Cells of three groups in two batches, of which the second has eight other genes raised."""
    generator = np.random.default_rng(0)
    parts, obs = [], []
    for batch in range(2):
        for group in range(3):
            if missing and (batch, group) == (1, 2):
                continue
            rates = np.ones(GENES)
            rates[group * 8 : group * 8 + 8] *= 6
            rates[32:] *= 12 if batch else 1
            parts.append(generator.poisson(rates, (PER_GROUP, GENES)))
            obs += [(f"b{batch}", f"t{group}")] * PER_GROUP
    counts = sparse.csr_matrix(np.concatenate(parts).astype(np.float32))
    frame = pd.DataFrame(obs, columns=["batch", "type"], index=[f"c{i}" for i in range(len(obs))])
    return AnnData(counts, obs=frame, var=pd.DataFrame(index=[f"g{i}" for i in range(GENES)]))


@pytest.fixture(scope="module")
def adata() -> AnnData:
    return two_batches()


def bound(adata: AnnData, **options) -> tuple:
    cells = open_cells(adata, GeneVocab.from_genes(list(adata.var_names)))
    objective = NeighborDenoising(**options)
    objective.bind(cells, np.arange(0, len(cells), 2))
    return objective, cells, get_tokenizer("continuous_projection", cells.vocab, append_cls=False)


def dense_values(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    values = torch.zeros(len(batch["input_ids"]), GENES + 4)
    return values.scatter_add(1, batch["input_ids"], batch["values"])[:, 4:]


def module_for(objective: NeighborDenoising) -> GenePoolingModel:
    torch.manual_seed(0)
    size = {"pooling": "weighted_sum", "ffn_dim": 16, "latent_dim": 4, "decoder_dim": 8}
    return GenePoolingModel(GENES + 4, 8, 1, dropout=0.0, **size, **objective.model_options())


KNOWN = {"batch_key": "batch", "batches": ["b0", "b1"]}


def test_loss_by_hand(adata):
    objective, cells, tokenizer = bound(adata, translation=0.3, agreement=3.0, beta=0.7, **KNOWN)
    module = module_for(objective).train()
    with torch.no_grad():  # next to no variance, so that draws of the latent are its mean
        module.decoder.logvar.weight.zero_()
        module.decoder.logvar.bias.fill_(-15.0)
    batch = objective.prepare(cells.block(np.arange(20)), tokenizer, epoch=0, seed=0)
    loss, figures = objective.loss(module, batch)

    tokens = {name: batch[name] for name in ("input_ids", "attention_mask", "values")}
    mu = module.encode(**tokens)
    decoded = [module.decode(part, batch["batch"]) for part in (mu[:20], mu[20:])]
    expected = cells.counts[:20].toarray() / cells.totals[:20, None] * 1e4
    errors = [((part - torch.from_numpy(np.log1p(expected)).float()) ** 2).mean(dim=1) for part in decoded]
    has = batch["has_neighbor"]
    logvar = module.infer(**tokens)["logvar"]
    kl = (-0.5 * (1 + logvar - mu**2 - logvar.exp())).sum(dim=1)[:20].mean()
    distance = (((mu[:20] - mu[20:]) ** 2).mean(dim=1) * has).sum() / has.sum()
    translated = 0.5 * torch.log((errors[1] * has).sum() / has.sum())
    assert 3.0 * distance > 0.02
    by_hand = 0.5 * torch.log(errors[0].mean()) + 0.3 * translated + 3.0 * distance + 0.7 * kl / GENES
    torch.testing.assert_close(loss, by_hand, rtol=1e-3, atol=1e-3)
    # In validation neighbors do not count.
    held_out, found = objective.loss(module.eval(), batch)
    torch.testing.assert_close(held_out, 0.5 * torch.log(errors[0].mean()) + 0.7 * kl / GENES, rtol=1e-4, atol=1e-4)
    assert "has_neighbor" not in found
    # Every other cell is a training cell, and may have neighbors; others have none.
    assert not has[1::2].any()
    assert has[::2].mean() > 0.5
    torch.testing.assert_close(figures["has_neighbor"], has.mean())


def test_alignment_adds_sigreg_within_batches_in_training_alone(adata):
    rows = np.arange(0, 360, 4)
    losses = {}
    for weight in (0.0, 0.2):
        objective, cells, tokenizer = bound(adata, alignment=weight, **KNOWN)
        module = module_for(objective)
        batch = objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0)
        torch.manual_seed(0)
        losses[weight] = objective.loss(module.train(), batch)
        assert "sigreg" not in objective.loss(module.eval(), batch)[1]
    (without, figures), (total, aligned) = losses.values()
    assert "sigreg" not in figures
    assert aligned["sigreg"] > 1, "the embedding of a module that is not trained is far from a Gaussian"
    torch.testing.assert_close(total - without, 0.2 * aligned["sigreg"], rtol=1e-3, atol=1e-4)
    untold, cells, tokenizer = bound(adata, alignment=0.2)
    batch = untold.prepare(cells.block(rows), tokenizer, epoch=0, seed=0)
    assert "sigreg" not in untold.loss(module_for(untold).train(), batch)[1], (
        "without batches there is nothing to align"
    )


def test_neighbors_in_a_batch_are_training_cells_near_the_cell(adata):
    objective, cells, tokenizer = bound(adata, across=10, within=0, keep_min=1.0, gene_dropout=0.0, **KNOWN)
    rows = np.arange(0, 20, 2)
    batch = objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0)
    dense = dense_values(batch)
    whole = np.log1p(adata.X.toarray() / adata.X.sum(axis=1) * 1e4)
    np.testing.assert_allclose(dense[: len(rows)], whole[rows], atol=1e-4)
    same = []
    for i in np.flatnonzero(batch["has_neighbor"].numpy()):
        (found,) = np.flatnonzero(np.abs(whole - dense[len(rows) + i].numpy()).max(axis=1) < 1e-4)
        assert found % 2 == 0
        assert adata.obs["batch"].iloc[found] == "b1"
        same.append(adata.obs["type"].iloc[found] == "t0")
    assert len(same) > 3
    assert np.mean(same) > 0.7


def test_choice_of_neighbors_depends_on_epoch_seed_and_cell_alone(adata):
    objective, cells, tokenizer = bound(adata, **KNOWN)

    def neighbors(rows, epoch):
        batch = objective.prepare(cells.block(np.asarray(rows)), tokenizer, epoch=epoch, seed=0)
        return dense_values(batch)[len(rows) :]

    both = neighbors([0, 8], 3)
    torch.testing.assert_close(both[1], neighbors([8], 3)[0])
    assert not torch.equal(both, neighbors([0, 8], 4))
    for options in ({"translation": 0, "agreement": 0}, {"across": 0, "within": 0}):
        without, cells, tokenizer = bound(adata, **options)
        batch = without.prepare(cells.block(np.arange(6)), tokenizer, epoch=0, seed=0)
        assert len(batch["input_ids"]) == without.n_cells(batch) == 6, "one view a cell"
        loss, figures = without.loss(module_for(without), batch)
        assert torch.isfinite(loss)
        assert "distance" not in figures


def test_loss_is_the_same_for_architectures_that_only_decode(adata):
    objective, cells, tokenizer = bound(adata)
    batch = objective.prepare(cells.block(np.arange(0, 20, 2)), tokenizer, epoch=0, seed=0)
    losses, gradients = [], []
    for only_decodes in (False, True):
        module = module_for(objective).train()
        if only_decodes:
            module.squared_errors = None
        torch.manual_seed(0)
        loss, _ = objective.loss(module, batch)
        loss.backward()
        losses.append(loss)
        gradients.append([part.grad for part in module.decoder.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_cells_without_neighbors_are_computed_alike_and_count_nothing(adata, monkeypatch):
    objective, cells, tokenizer = bound(adata, **KNOWN)
    module, decoded = module_for(objective).train(), []
    errors = module.squared_errors
    monkeypatch.setattr(
        module, "squared_errors", lambda latent, *rest: decoded.append(len(latent)) or errors(latent, *rest)
    )
    for rows in (np.arange(0, 20, 2), np.arange(1, 21, 2)):  # training cells; held-out ones
        loss, figures = objective.loss(module, objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0))
        loss.backward()
    # Another process may have neighbors in this step; where weights are sharded, all have to decode as often.
    assert decoded == [20] * 2
    assert torch.isfinite(loss)
    assert all(figures[name] == 0 for name in ("has_neighbor", "distance", "translated_error"))


def test_neighbors_are_looked_for_in_the_space_that_is_asked_for(adata):
    pools = {}
    for space in ("harmony", "components"):
        objective, _, _ = bound(adata, across=10, within=0, space=space, **KNOWN)
        pools[space] = objective._pool
        coordinates, batches = principal_components(pools[space].cells)[0], objective._batches[pools[space].rows]
        if space == "harmony":
            coordinates = harmony_correct(coordinates, batches)
        assert (mutual_neighbors(coordinates, batches, across=10, within=0) != pools[space].pairs).nnz == 0
    assert (pools["components"].pairs != pools["harmony"].pairs).nnz > 0


@pytest.mark.parametrize("temperature", [0.05, None])
def test_neighbors_are_drawn_as_often_as_they_weigh(adata, temperature, monkeypatch):
    objective, cells, _ = bound(adata, across=10, temperature=temperature, **KNOWN)
    pool = objective._pool
    place = int(np.argmax(np.diff(pool.pairs.indptr)))
    theirs = pool.pairs[place].indices
    which = {tuple(pool.cells.block(np.array([i])).counts): i for i in range(len(pool.rows))}
    drawn = np.zeros(len(pool.rows))
    for epoch in range(2_000):
        found, has = pool.neighbors(cells.block(pool.rows[[place]]), epoch=epoch, seed=0)
        assert has.all()
        drawn[which[tuple(found.counts)]] += 1 / 2_000
    unit = harmony_correct(principal_components(pool.cells)[0], objective._batches[pool.rows])
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    weights = np.ones(len(theirs)) if temperature is None else np.exp(unit[theirs] @ unit[place] / temperature)
    expected = np.zeros(len(drawn))
    expected[theirs] = weights / weights.sum()
    assert np.ptp(expected[theirs]) > 0.05 or temperature is None
    np.testing.assert_allclose(drawn, expected, atol=0.04)
    # The first and the last draw are neighbors of the cell, too.
    for key in (0, 2**64 - 1):
        keys = np.full(len(pool.rows), key, dtype=np.uint64)
        monkeypatch.setattr(_neighbors, "cell_keys", lambda rows, keys=keys, **_: keys)
        found, has = pool.neighbors(cells.block(pool.rows), epoch=0, seed=0)
        assert has.mean() > 0.9
        for row in np.flatnonzero(has):
            assert which[tuple(found.counts[found.indptr[row] : found.indptr[row + 1]])] in pool.pairs[row].indices


@pytest.mark.parametrize("known", [KNOWN, {}])
def test_cells_outside_the_pool_take_the_neighbors_of_the_nearest_in_it(adata, known):
    whole, cells, tokenizer = bound(adata, within=10, **known)
    objective, _, _ = bound(adata, within=10, max_cells=50, **known)
    pool = objective._pool
    assert len(pool.rows) == 50
    if known:
        assert np.bincount(objective._batches[pool.rows]).tolist() == [25, 25]
    block = cells.block(np.arange(len(cells)))
    batch = objective.prepare(block, tokenizer, epoch=0, seed=0)
    of_all = whole.prepare(block, tokenizer, epoch=0, seed=0)["has_neighbor"]
    assert batch["has_neighbor"][::2].mean() > of_all[::2].mean() - 0.15
    assert not batch["has_neighbor"][1::2].any()  # held out
    places = pool._pool_positions(block)
    rows = np.arange(0, len(cells), 2)
    assert (places[pool.rows] == np.arange(50)).all()
    types, batches = (adata.obs[name].to_numpy() for name in ("type", "batch"))
    stands = pool.rows[places[rows]]
    assert (types[stands] == types[rows]).mean() > 0.85
    if known:
        assert (batches[stands] == batches[rows]).all()


def test_a_lack_of_neighbors_is_told(adata):
    with pytest.warns(
        ScforgeWarning,
        match=r"\d+% of the cells have no mutual neighbor in another batch, among them most cells of 'b\d', 'b\d', so",
    ):
        objective, _, _ = bound(adata, across=1, **KNOWN)
    batches, pairs = objective._batches[objective._pool.rows], objective._pool.pairs.toarray()
    expected = {f"b{code}": pairs[batches == code][:, batches != code].any(axis=1).mean() for code in (0, 1)}
    assert objective.shares_across == pytest.approx(expected)
    assert bound(adata, **KNOWN)[0].shares_across["b0"] > 0.9
    assert bound(adata)[0].shares_across == {}


def test_batches_that_lack_neighbors_are_named(adata):
    few = adata[adata.obs["batch"] == "b0"].copy()
    few.obs["batch"] = [f"small {i % 8}" if i < 72 else "large" for i in range(few.n_obs)]  # too small for neighbors
    few.obs.loc[few.obs_names[:4], "batch"] = np.nan
    cells = open_cells(few, GeneVocab.from_genes(list(few.var_names)))
    objective = NeighborDenoising(batch_key="batch", batches=["other"])
    named = r"most cells of ('[\w ]+', ){4}'[\w ]+', \.\.\. \(\d more\), so these batches"
    with pytest.warns(ScforgeWarning, match="unknown to the model"), pytest.warns(ScforgeWarning, match=named):
        objective.bind(cells, np.arange(len(cells)))
    assert objective.shares_across == dict.fromkeys(["large", "no batch", *(f"small {i}" for i in range(8))], 0.0)


@pytest.mark.slow
def test_batches_are_mixed_and_types_are_not():
    adata = two_batches(missing=True)
    shared = (adata.obs["type"] != "t2").to_numpy()

    def trained(**objective) -> np.ndarray:
        Encoder.setup_anndata(adata, batch_key="batch")
        options = {"objective": {"name": "neighbor_denoising", **objective}, "hidden_dim": 32, "seed": 0}
        model = Encoder(adata, n_top_genes=0, **options)
        model.train(30, batch_size=60, progress_bar=False, accelerator="cpu")
        return model.get_latent_representation()

    def mixing(embedding: np.ndarray, adata: AnnData) -> tuple[float, float]:
        """Return the share of the 10 nearest cells of a type that are of the other batch, and that of the type."""
        types, batches = adata.obs["type"].to_numpy(), adata.obs["batch"].to_numpy()
        distances = ((embedding[:, None] - embedding[None]) ** 2).sum(axis=2) + 1e9 * np.eye(len(embedding))
        nearest = np.argsort(distances, axis=1)[:, :10]
        same = types[nearest] == types[:, None]
        other = batches[nearest] != batches[:, None]
        return float((same & other).sum() / same.sum()), float(same.mean())

    without, together = trained(translation=0, agreement=0, batch_key=None), trained()
    assert mixing(without[shared], adata[shared])[0] < 0.1
    assert mixing(together[shared], adata[shared])[0] > 0.25
    assert mixing(together, adata)[1] > 0.97


def test_the_default_encoder_takes_the_batches_of_the_setup(adata):
    Encoder.setup_anndata(adata, batch_key="batch")
    spec = Encoder(adata, n_top_genes=0).spec
    assert spec.objective == "neighbor_denoising"
    assert (spec.objective_options["batch_key"], spec.objective_options["batches"]) == ("batch", ["b0", "b1"])
    assert spec.model_options["n_batches"] == 2
    untold = Encoder(adata, objective={"name": "neighbor_denoising", "batch_key": None}, n_top_genes=0).spec
    assert (untold.objective_options["batch_key"], untold.model_options["n_batches"]) == (None, 0)
    others = Encoder(adata, objective="joint_embedding", n_top_genes=0).spec
    assert others.model_options["n_batches"] is None


def test_cells_of_unknown_batches_are_trained_on(adata):
    objective, _, tokenizer = bound(adata, **KNOWN)
    adata = adata.copy()
    adata.obs["batch"] = adata.obs["batch"].replace("b1", "b7")
    cells = open_cells(adata, GeneVocab.from_genes(list(adata.var_names)))
    with pytest.warns(ScforgeWarning, match="180 of 360 cells have batches that are unknown to the model"):
        objective.bind(cells, np.arange(len(cells)))
    objective.bind_query(cells, np.arange(len(cells)))  # no warning: new batches are what a query is for
    batch = objective.prepare(cells.block(np.arange(len(cells))), tokenizer, epoch=0, seed=0)
    assert sorted(set(batch["batch"].tolist())) == [-1, 0]
    loss, _ = objective.loss(module_for(objective), batch)
    assert torch.isfinite(loss)


def test_models_without_a_decoder_are_refused():
    with pytest.raises(
        OptionError, match="which has no latent .*; choose the architecture 'gene_pooling', 'mlp' or 'scdiva'"
    ):
        NeighborDenoising().check_architecture(TransformerEncoder)
    with pytest.raises(OptionError, match="the model has no expression decoder; create it with n_batches=0"):
        GenePoolingModel(20, 8, pooling="weighted_sum").decode(torch.zeros(2, 8))
    with raises(OptionError, "pooling"):
        GenePoolingModel(20, 8, n_batches=0)


def swapped_types() -> AnnData:
    """Cells of two types that trade their strongest genes in the second batch, with the type of half of the cells."""
    generator = np.random.default_rng(0)
    parts, obs = [], []
    for batch in range(2):
        for group in range(2):
            rates = np.full(GENES, 2.0)
            rates[8 * (group ^ batch) : 8 * (group ^ batch) + 8] *= 4
            rates[16 + 12 * group : 28 + 12 * group] *= 2
            parts.append(generator.poisson(rates, (100, GENES)))
            obs += [(f"b{batch}", f"t{group}")] * 100
    frame = pd.DataFrame(obs, columns=["batch", "type"], index=[f"c{i}" for i in range(len(obs))])
    frame["known"] = frame["type"].where(generator.random(len(frame)) < 0.5)
    counts = sparse.csr_matrix(np.concatenate(parts).astype(np.float32))
    return AnnData(counts, obs=frame, var=pd.DataFrame(index=[f"g{i}" for i in range(GENES)]))


LABELED = {"labels_key": "known", "labels": ["t0", "t1"], **KNOWN}


@pytest.mark.parametrize("max_cells", [20_000, 60])
def test_neighbors_with_different_labels_are_dropped(max_cells):
    adata = swapped_types()
    known = adata.obs["known"].to_numpy(dtype=object)

    def labels_of_pairs(**options) -> np.ndarray:
        objective, cells, _ = bound(adata, max_cells=max_cells, **options)
        block = cells.block(np.arange(0, len(cells), 2))
        found, has = objective._pool.neighbors(block, epoch=0, seed=0)
        pairs = np.stack([known[block.rows], known[objective._pool.rows[found.rows]]], axis=1)[has > 0]
        return pairs[pd.notna(pairs).all(axis=1)]

    without, with_labels = labels_of_pairs(**KNOWN), labels_of_pairs(**LABELED)
    assert (without[:, 0] != without[:, 1]).mean() > 0.2
    assert len(with_labels) > 15
    assert (with_labels[:, 0] == with_labels[:, 1]).all()


def test_contrast_by_hand(adata):
    generator = np.random.default_rng(0)
    mu, labels = generator.normal(size=(6, 3)), [0, 1, 0, -1, 0, 2]
    cosines = mu @ mu.T / np.outer(np.linalg.norm(mu, axis=1), np.linalg.norm(mu, axis=1))
    expected = []
    for i in (0, 2, 4):  # only one cell has each of the other labels
        others = [j for j in (0, 1, 2, 4, 5) if j != i]
        total = np.log(sum(np.exp(cosines[i, j] / 0.1) for j in others))
        expected.append(-np.mean([cosines[i, j] / 0.1 - total for j in (0, 2, 4) if j != i]))
    leaf = torch.from_numpy(mu).float().requires_grad_()
    loss = contrastive_loss(leaf, torch.tensor(labels))
    torch.testing.assert_close(loss.item(), float(np.mean(expected)), rtol=1e-4, atol=1e-4)
    for too_few in ([-1] * 6, [0, 1, -1, -1, -1, -1]):
        leaf.grad = None
        loss = contrastive_loss(leaf, torch.tensor(too_few))
        loss.backward()
        assert loss.item() == 0
        assert not leaf.grad.any()


def test_labels_add_their_weight_to_the_loss_of_training_alone():
    adata, losses = swapped_types(), {}
    for weight in (0.0, 0.5):
        objective, cells, tokenizer = bound(adata, labels_weight=weight, **LABELED)
        module = module_for(objective).train()
        batch = objective.prepare(cells.block(np.arange(0, 400, 5)), tokenizer, epoch=0, seed=0)
        for training in (True, False):
            torch.manual_seed(0)
            losses[weight, training] = objective.loss(module.train(training), batch)
    contrast = losses[0.5, True][1]["contrast"]
    assert contrast > 0.1
    torch.testing.assert_close(losses[0.5, True][0], losses[0.0, True][0] + 0.5 * contrast)
    assert losses[0.5, False][0] == losses[0.0, False][0]
    assert "contrast" not in losses[0.0, True][1]


def test_labels_of_held_out_and_of_query_cells_are_not_used():
    adata, changed = swapped_types(), swapped_types()
    held_out = np.arange(1, len(adata), 2)
    changed.obs.iloc[held_out, 2] = adata.obs["type"].to_numpy()[held_out[::-1]]
    changed.obs.iloc[::2, 2] = changed.obs["known"].iloc[::2].fillna("unknown")  # a word for a missing label
    batches = []
    for cells_of in (adata, changed):
        objective, cells, tokenizer = bound(cells_of, **LABELED)
        batches.append(objective.prepare(cells.block(np.arange(len(cells))), tokenizer, epoch=0, seed=0))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    assert (batches[0]["labels"] >= 0).any()
    objective.bind_query(cells, np.arange(len(cells)))
    assert "labels" not in objective.prepare(cells.block(np.arange(6)), tokenizer, epoch=0, seed=0)


def test_labels_are_used_by_the_option_alone():
    adata = swapped_types()
    Encoder.setup_anndata(adata, batch_key="batch", labels_key="type")
    without = Encoder(adata, n_top_genes=0).spec.objective_options
    assert (without["labels_key"], without["labels"]) == (None, None)
    objective = {"name": "neighbor_denoising", "labels_key": "known"}
    options = Encoder(adata, objective=objective, n_top_genes=0).spec.objective_options
    assert (options["labels_key"], options["labels"]) == ("known", ["t0", "t1"])


def test_a_loaded_model_keeps_the_option_and_embeds_cells_without_labels(tmp_path):
    adata = swapped_types()
    Encoder.setup_anndata(adata, batch_key="batch")
    objective = {"name": "neighbor_denoising", "labels_key": "known", "labels_weight": 0.3}
    model = Encoder(adata, objective=objective, n_top_genes=0, hidden_dim=8)
    model.train(1, progress_bar=False, accelerator="cpu")
    embedding = model.get_latent_representation()
    model.save(tmp_path / "model")
    del adata.obs["known"]
    loaded = Encoder.load(tmp_path / "model", adata)
    assert loaded.spec.objective_options == model.spec.objective_options
    assert loaded.spec.objective_options["labels_weight"] == 0.3
    np.testing.assert_allclose(loaded.get_latent_representation(), embedding, atol=1e-6)
    with raises(DataError, "labels_key"):
        loaded.train(1, progress_bar=False)
    adata.obs["known"] = np.where(np.arange(len(adata)) % 2, "t0", None)
    with raises(DataError, "labels_key"):
        loaded.train(1, progress_bar=False)


@pytest.mark.parametrize(
    ("values", "error", "argument"),
    [
        (None, DataError, "labels_key"),
        (np.nan, OptionError, "labels_key"),
        ("t0", OptionError, "labels_key"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(values, error, argument):
    adata = swapped_types()
    adata.obs["known"] = values
    if values is None:
        del adata.obs["known"]
    Encoder.setup_anndata(adata, batch_key="batch")
    with raises(error, argument):
        Encoder(adata, objective={"name": "neighbor_denoising", "labels_key": "known"}, n_top_genes=0)


@pytest.mark.slow
def test_labels_separate_types_that_neighbors_confuse():
    adata = swapped_types()
    types, batches = adata.obs["type"].to_numpy(), adata.obs["batch"].to_numpy()
    is_known = adata.obs["known"].notna().to_numpy()
    purity = {}
    for key in (None, "known"):
        Encoder.setup_anndata(adata, batch_key="batch")
        objective = {"name": "neighbor_denoising", "labels_key": key, "labels_weight": 0.1}
        model = Encoder(adata, objective=objective, n_top_genes=0, hidden_dim=32)
        model.train(30, batch_size=60, progress_bar=False, accelerator="cpu")
        z = model.get_latent_representation()
        z = z / np.linalg.norm(z, axis=1, keepdims=True)
        cosines = np.where(batches[:, None] != batches, z @ z.T, -np.inf)[~is_known]
        nearest = np.argsort(-cosines, axis=1)[:, :10]
        purity[key] = (types[nearest] == types[~is_known][:, None]).mean()
    assert purity[None] < 0.7
    assert purity["known"] > purity[None] + 0.2
