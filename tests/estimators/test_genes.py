from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import open_cells
from scforge.errors import DataError, GeneMismatchError, NotTrainedWarning, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.insilico.perturb import cells_in_state
from scforge.testing import raises

pytestmark = pytest.mark.filterwarnings("ignore:Genes are compared with", "ignore:The fdr of a single significant gene")

RANK = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 16, "vocab": "from_data"}
AUTOENCODER = {"encoder_dim": 16, "encoder_layers": 1, "encoder_heads": 2, "decoder_layers": 1}
VIEWS = {"objective": "joint_embedding", "n_top_genes": 0, "hidden_dim": 16, "ffn_dim": 16, "latent_dim": 4}
ZEROS = {"name": "masked_value_prediction", "mask_ratio": 0.3, "zero_targets": 0.5}
N_GENES = 60


def simulate(n_genes: int) -> ad.AnnData:
    """Return 240 cells of two types: "a" has the markers 0 to 3, "b" the markers 4 to 7; some others are as high."""
    rng = np.random.default_rng(0)
    kind = np.arange(240) % 2
    mean = np.full((240, n_genes), 1.0)
    mean[:, 8:20] = 4.0
    mean[:, :8] = 0.02
    mean[kind == 0, :4] = mean[kind == 1, 4:8] = 4.0
    counts = rng.poisson(mean * rng.uniform(0.7, 1.4, (240, 1))).astype(np.float32)
    obs = pd.DataFrame({"kind": pd.Categorical(np.where(kind == 0, "a", "b"), ["a", "b", "unused"])})
    obs.index = [f"cell{i}" for i in range(240)]
    var = pd.DataFrame(index=[f"gene{i}" for i in range(n_genes)])
    return ad.AnnData(sparse.csr_matrix(counts), obs=obs, var=var)


@pytest.fixture(scope="module")
def planted_model() -> Encoder:
    planted = simulate(N_GENES)
    Encoder.setup_anndata(planted)
    model = Encoder(planted, **VIEWS)
    model.train(max_epochs=8, batch_size=32, lr=3e-3, progress_bar=False, accelerator="cpu")
    return model


def test_markers_move_cells_most(planted_model: Encoder, tmp_path: Path):
    genes, others = ["gene0", "gene1", "gene2", "gene3"], ["gene8", "gene9", "gene10"]
    results = planted_model.perturb_in_silico(genes=genes + others, goal={"kind": "b"}, n_permutations=30)
    assert results["goal_shift"].is_monotonic_decreasing
    results = results.set_index("gene")
    assert (results["n_cells"] <= 120).all()
    assert results.loc[genes, "goal_shift"].min() > results.loc[others, "goal_shift"].abs().max()
    assert results.loc[genes, "shift"].mean() > 2 * results.loc[others, "shift"].mean()
    back = planted_model.perturb_in_silico(genes=genes, mode="activate", start=("kind", "b"), goal=("kind", "a"))
    assert (back["goal_shift"] > 0).all()
    over = planted_model.perturb_in_silico(
        genes=["gene0", "gene4"], mode="overexpress", start={"kind": ["a"]}, goal={"kind": "b"}, n_permutations=0
    )
    assert over["gene"].tolist() == ["gene4", "gene0"]
    assert over["goal_p_value"].isna().all()
    planted_model.adata.write_h5ad(tmp_path / "cells.h5ad")
    read = ad.read_h5ad(tmp_path / "cells.h5ad").uns["scforge"]["in_silico"]
    assert (read["mode"], read["goal"]) == ("overexpress", "{'kind': 'b'}")
    assert read["vocab_hash"] == planted_model.vocab.hash
    pd.testing.assert_frame_equal(read["results"].reset_index(drop=True), over, check_dtype=False)


def test_the_same_genes_in_an_untrained_model(planted_model: Encoder):
    asked = {"genes": ["gene0", "gene8", "gene30"], "goal": {"kind": "b"}, "n_permutations": 30, "key_added": None}
    results = planted_model.perturb_in_silico(**asked)
    without = planted_model.perturb_in_silico(**asked, untrained=False)
    pd.testing.assert_frame_equal(without, results.drop(columns=["shift_z_untrained", "goal_z_untrained"]))
    random = Encoder(planted_model.adata, **VIEWS)
    random.module.load_state_dict(planted_model.spec.build_untrained()[0].state_dict())
    with pytest.warns(NotTrainedWarning, match="its perturbation effects are random"):
        expected = random.perturb_in_silico(**asked, untrained=False).set_index("gene").loc[results["gene"]]
    for name in ("shift_z", "goal_z"):
        np.testing.assert_allclose(results[f"{name}_untrained"], expected[name], rtol=1e-4)
        assert np.abs(results[f"{name}_untrained"] - results[name]).max() > 0.1


def test_limits_of_p_values_are_told(planted_model: Encoder):
    genes = [f"gene{i}" for i in range(12)]
    low = "at least 0.39, above 0.1; test fewer genes, or pass n_permutations=120 if the model has"
    with pytest.warns(ScforgeWarning, match=low):
        results = planted_model.perturb_in_silico(genes=genes, n_permutations=30)
    written = planted_model.adata.uns["scforge"]["in_silico"]
    assert results.attrs["lowest_fdr"] == written["lowest_fdr"] == pytest.approx(12 / 31)
    # By default as many others as a rate of 0.1 takes, if there are so many genes.
    for tested in (genes[:1], genes):  # 12 would take 120, and the model has 60
        planted_model.perturb_in_silico(genes=tested)
        assert planted_model.adata.uns["scforge"]["in_silico"]["n_permutations"] == 100


@pytest.mark.slow
def test_groups_and_batches(planted_model: Encoder):
    genes = ["gene0", "gene4", "gene30"]
    results = planted_model.perturb_in_silico(genes=genes, groups="kind", n_permutations=20, batch_size=256)
    assert len(results) == 6
    few = planted_model.perturb_in_silico(genes=genes, groups="kind", n_permutations=20, batch_size=7)
    pd.testing.assert_frame_equal(few, results, rtol=1e-4, atol=1e-7)
    by = results.set_index(["gene", "group"])["n_cells"]
    assert by["gene0", "a"] > 10 * by["gene0", "b"]


def test_all_genes_and_pairs(planted_model: Encoder):
    results = planted_model.perturb_in_silico(key_added=None)
    assert len(results) == N_GENES
    assert results["shift"].is_monotonic_decreasing
    assert results["n_controls"].max() == N_GENES - 1  # each other
    pairs = planted_model.perturb_in_silico(genes=["gene0", "gene1", "gene30"], combinations=2, n_permutations=20)
    assert sorted(pairs["gene"] + pairs["gene_2"]) == ["gene0gene1", "gene0gene30", "gene1gene30"]
    assert pairs.loc[0, ["gene", "gene_2"]].tolist() == ["gene0", "gene1"]
    single = planted_model.perturb_in_silico(genes=["gene0", "gene30"], n_permutations=0)
    assert pairs["shift"].iloc[0] > single["shift"].max()


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        (None, {}),
        ("transformer_encoder", RANK),
        ("masked_autoencoder", AUTOENCODER),
        ("autoregressive_transformer", RANK),
    ],
)
def test_deletion_equals_data_without_the_gene(architecture, sizes, build: Callable[..., Encoder], tiny_adata):
    model = build(architecture, n_top_genes=0, **sizes)
    model.is_trained_ = True
    some = tiny_adata[tiny_adata.X[:, 3].toarray()[:, 0] > 0].copy()
    results = model.perturb_in_silico(some, ["gene3"], n_permutations=0, batch_size=9)
    before = model.get_latent_representation(some).astype(np.float64)
    some.X = sparse.csr_matrix(some.X.toarray() * (np.arange(80) != 3)).astype(np.float32)
    after = model.get_latent_representation(some).astype(np.float64)
    cosine = (before * after).sum(axis=1) / np.linalg.norm(before, axis=1) / np.linalg.norm(after, axis=1)
    assert results["n_cells"][0] == some.n_obs
    assert results["shift"][0] == pytest.approx((1 - cosine).mean(), rel=1e-3, abs=1e-9)
    assert results["shift"][0] > 0
    nothing = model.perturb_in_silico(some, ["gene3"])
    assert nothing["n_cells"][0] == 0
    assert nothing.drop(columns=["gene", "n_cells", "n_controls"]).isna().all(axis=None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"genes": ["gene0", "gene60", "x"]},
            GeneMismatchError,
            "names that are not among the 60.*: 'gene60', 'x'; did you mean 'gene",
        ),
        ({"genes": ["gene0", "gene1", "gene0"]}, OptionError, "genes contains the gene 'gene0' more than once"),
        ({"genes": None, "combinations": 2}, OptionError, "combinations=2 requires genes"),
        (
            {"genes": ["gene0", "gene1"], "combinations": 3},
            OptionError,
            "combinations=3 is invalid; pass combinations=False",
        ),
        ({"mode": "knock_out"}, OptionError, "mode='knock_out' is not known"),
        ({"goal": {"kind": "B"}}, DataError, r"goal: no cell has 'B' in obs\['kind'\]; did you mean 'b'\?"),
        ({"start": {"kinds": "b"}}, DataError, "'kinds' is not a column of obs"),
        ({"start": {"kind": "a", "other": "b"}}, OptionError, "is not a valid state"),
        ({"start": {"kind": ["a", "b"]}, "goal": {"kind": "b"}}, DataError, "cells that are already in the goal state"),
    ],
)
def test_bad_requests(planted_model: Encoder, options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        planted_model.perturb_in_silico(**{"genes": "gene0", **options})


def test_cells_and_models_that_cannot_be_asked(planted_model: Encoder):
    planted = planted_model.adata
    with pytest.raises(DataError, match="start selects no cells"):
        planted_model.perturb_in_silico(planted[planted.obs["kind"] == "a"].copy(), "gene0", goal={"kind": "a"})
    silent = planted.copy()
    silent.X = sparse.csr_matrix(silent.X.toarray() * (np.arange(N_GENES) != 5)).astype(np.float32)
    with raises(DataError, "mode"):
        planted_model.perturb_in_silico(silent, ["gene5"], mode="activate")
    for method in (planted_model.impute, planted_model.denoise):
        with pytest.raises(OptionError, match="JointEmbedding does not predict the expression.*masked_autoencoder"):
            method()


def test_gene_embeddings_follow_the_columns(planted_model: Encoder):
    planted = planted_model.adata
    vectors = planted_model.get_gene_embeddings()
    assert vectors.index.tolist() == list(planted_model.vocab.genes)
    assert planted.varm["X_scforge_genes"].shape == (N_GENES, 16)
    mixed = planted[:, np.random.default_rng(0).permutation(N_GENES)[:40]].copy()
    mixed.var_names = ["unknown", *mixed.var_names[1:]]
    planted_model.get_gene_embeddings(mixed, key_added="genes")
    assert np.isnan(mixed.varm["genes"][0]).all()
    np.testing.assert_array_equal(mixed.varm["genes"][1:], vectors.loc[mixed.var_names[1:]])
    with pytest.raises(OptionError, match="the same embedding for all tokens of a cell"):
        planted_model.get_gene_embeddings(contextual=True)


def test_contextual_embeddings_and_attention_follow_the_columns(trained: Callable[..., Encoder], tiny_adata):
    model = trained("transformer_encoder", **RANK)
    context = model.get_gene_embeddings(contextual=True)
    assert not context.isna().any(axis=None)
    graph = model.get_attention(top_k=7)
    assert graph.shape == (80, 80)
    np.testing.assert_array_equal(tiny_adata.varp["scforge_attention"].toarray(), graph.toarray())
    mixed = tiny_adata[:, np.random.default_rng(0).permutation(80)].copy()
    again = model.get_attention(mixed, top_k=7)
    np.testing.assert_allclose(again.toarray(), graph.toarray(), atol=1e-6)
    order = [model.vocab.genes.index(name) for name in mixed.var_names]
    np.testing.assert_array_equal(mixed.varp["scforge_attention"].toarray(), again.toarray()[np.ix_(order, order)])
    with pytest.raises(OptionError, match="GenePoolingModel does not return attention weights"):
        trained().get_attention()


@pytest.mark.slow
def test_hidden_entries_are_imputed():
    # Markers that are set to 0 by chance: the type of the cell tells which of them were on.
    cells = simulate(12)
    truth = cells.X.toarray()
    lost = (truth > 0) & (np.random.default_rng(1).random(truth.shape) < 0.3)
    lost[:, 8:] = False
    off = (truth == 0) & (np.arange(12) < 8)
    cells.X = sparse.csr_matrix(np.where(lost, 0, truth))
    Encoder.setup_anndata(cells)
    model = Encoder(cells, "masked_autoencoder", objective=ZEROS, n_top_genes=0, dropout=0.0, **AUTOENCODER)
    train = {"batch_size": 16, "lr": 5e-3, "progress_bar": False, "accelerator": "cpu", "early_stopping": False}
    model.train(max_epochs=20, **train)
    genes = [f"gene{i}" for i in range(10)]
    imputed = model.impute(genes=genes)
    assert (imputed.index.tolist(), imputed.columns.tolist()) == (cells.obs_names.tolist(), genes)
    values, asked = imputed.to_numpy()[:, :8], (lost | off)[:, :8]
    known, counts = (np.log1p(x / x.sum(axis=1, keepdims=True) * 1e4)[:, :8] for x in (truth, cells.X.toarray()))
    # Where a marker is 0: off, or lost. The mean of a gene is the same for both.
    assert np.corrcoef(values[asked], known[asked])[0, 1] > 0.5
    means = np.broadcast_to(known.mean(axis=0), known.shape)
    assert np.corrcoef(values[asked], known[asked])[0, 1] > np.corrcoef(means[asked], known[asked])[0, 1] + 0.3
    layer = cells.layers["imputed"]
    np.testing.assert_array_equal(layer[:, :10], imputed.to_numpy())
    assert np.isnan(layer[:, 10:]).all()
    np.testing.assert_allclose(values[counts > 0], counts[counts > 0], rtol=1e-5)
    few = model.impute(genes=genes, batch_size=13, key_added=None)
    np.testing.assert_allclose(few, imputed, atol=1e-4)


@pytest.mark.parametrize("head", ["value", "bin"])
def test_transformers_with_an_expression_head_impute(head: str, trained: Callable[..., Encoder], tiny_adata):
    tokenizer = {"name": "binned_expression", "n_bins": 8, "side": "one", "max_len": 60}
    model = trained("transformer_encoder", tokenizer, ZEROS, expression_head=head, **RANK)
    imputed = model.impute(genes=["gene0", "gene50"]).to_numpy()
    assert np.isfinite(imputed).all()
    assert imputed.min() >= 0
    assert imputed.max() <= 7 or head == "value"
    # Denoised values follow the columns, of which the model may not know all.
    mixed = tiny_adata[:, np.random.default_rng(0).permutation(80)[:60]].copy()
    mixed.var_names = ["unknown", *mixed.var_names[1:]]
    values, layer = model.denoise(mixed, n_folds=3), mixed.layers["denoised"]
    assert values.data.min() >= 0
    order = model.vocab.gene_indices(mixed.var_names)
    np.testing.assert_array_equal(layer[:, 1:].toarray(), values[:, order[1:]].toarray())
    assert layer[:, 0].nnz == 0


def test_fine_tuned_models_are_asked_as_well(trained: Callable[..., Encoder], quick: dict):
    base = trained("masked_autoencoder", setup={"labels_key": "group"}, **AUTOENCODER)
    with pytest.warns(ScforgeWarning, match="was trained on expressed genes only"):
        base.impute(genes=["gene0"])
    tuned = base.finetune("annotation", **quick)
    results = tuned.perturb_in_silico(genes=["gene0", "gene79"], goal={"group": "b"}, n_permutations=0)
    assert (results["shift"] > 0).all()
    assert tuned.get_gene_embeddings().shape == (80, 16)
    assert tuned.get_attention(key_added=None).nnz > 0
    with pytest.raises(OptionError, match="the model was fine-tuned.*use its base model"):
        tuned.impute()


@pytest.mark.parametrize(
    ("values", "wanted", "expected"),
    [
        ([1, 2, 10], "1", [True, False, False]),
        ([False, True, True], "True", [False, True, True]),
        ([0.5, 1.5, np.nan], [0.5, "1.5"], [True, True, False]),
        (pd.Categorical(["a", "b", None]), ("a", "b"), [True, True, False]),
    ],
)
def test_values_are_found_as_they_are_or_as_text(values, wanted, expected):
    obs = pd.DataFrame({"stage": values}, index=["c0", "c1", "c2"])
    cells = open_cells(ad.AnnData(sparse.csr_matrix(np.ones((3, 2), dtype=np.float32)), obs=obs))
    assert cells_in_state(cells, "goal", {"stage": wanted}).tolist() == expected
    for missing in ("c", np.nan):
        with raises(DataError, "goal"):
            cells_in_state(cells, "goal", {"stage": missing})
