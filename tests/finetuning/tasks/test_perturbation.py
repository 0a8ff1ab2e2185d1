import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

from scforge.data import GeneVocab
from scforge.errors import DataError, OptionError
from scforge.eval.perturbation_metrics import distances
from scforge.finetuning import get_task
from scforge.finetuning.splits import Split
from scforge.finetuning.tasks import perturbation as report
from scforge.models import Encoder
from scforge.testing import raises, simulate_screen

GENES = [f"gene{i}" for i in range(30)]
SINGLES = [f"gene{i}" for i in range(6)]
COMBINATIONS = ["gene0+gene1", "gene2+gene3", "gene1+gene4", "gene0+gene5"]
OPTIONS = {"perturbation_key": "target", "control": "ctrl"}
SHARES = {"validation_size": 0.1, "test_size": 0.2, "split_by": None, "seed": 0}
QUICK = {"max_epochs": 1, "progress_bar": False, "accelerator": "cpu"}


def planted(labels: list[str], *, n_cells: int = 16, contexts: tuple[str, ...] = ("all",)) -> ad.AnnData:
    """Cells in which each target multiplies the means of genes, in all contexts alike; combinations multiply both."""
    rng = np.random.default_rng(0)
    names = sorted({part for label in labels for part in label.split("+")})
    effects = dict(zip(names, rng.normal(size=(len(names), len(GENES))) * 0.5, strict=True)) | {"ctrl": 0.0}
    base = {context: rng.uniform(2, 4, size=len(GENES)) for context in contexts}
    counts, obs = [], []
    for context in contexts:
        for label in ["ctrl", *labels]:
            n = 4 * n_cells if label == "ctrl" else n_cells
            change = np.sum([effects[part] for part in label.split("+")], axis=0)
            counts.append(rng.poisson(np.exp(base[context] + change), size=(n, len(GENES))))
            obs += [(label, context)] * n
    table = pd.DataFrame(obs, columns=["target", "type"], index=[f"cell{i}" for i in range(len(obs))])
    matrix = sparse.csr_matrix(np.concatenate(counts).astype(np.float32))
    return ad.AnnData(matrix, obs=table, var=pd.DataFrame(index=GENES))


def base_of(adata: ad.AnnData) -> Encoder:
    """A tiny model that was trained for an epoch."""
    Encoder.setup_anndata(adata)
    model = Encoder(adata, hidden_dim=16, ffn_dim=16, latent_dim=4)
    model.train(1, progress_bar=False, accelerator="cpu")
    return model


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    return planted(SINGLES + COMBINATIONS)


@pytest.fixture(scope="module")
def base(adata: ad.AnnData) -> Encoder:
    return base_of(adata.copy())


@pytest.fixture(scope="module")
def tuned(adata: ad.AnnData, base: Encoder) -> Encoder:
    """Fine-tuned without the combination of the genes 0 and 1, and without the genes 2 and 3 together."""
    return base.finetune(
        "perturbation", adata.copy(), heldout=["gene1+gene0", "gene2+gene3"], validation_size=0, **OPTIONS, **QUICK
    )


def test_combinations_are_predicted_about_as_well_as_by_addition_and_better_than_by_the_mean(tuned: Encoder) -> None:
    metrics = tuned.evaluate()
    assert metrics.index[0] == "scforge"
    never_missing = {"no_change", "train_mean", "technical_duplicate"}
    learned = {"control_mean", "additive", "linear_pca", "linear_embedding", "kernels", "nearest"}
    assert never_missing | learned <= {*metrics.index}
    assert never_missing <= {*tuned.evaluate(baselines=False).index}
    assert metrics.loc["scforge", "mse"] < 0.3 * metrics.loc[["no_change", "train_mean"], "mse"].min()
    assert metrics.loc["scforge", "mse"] < 1.5 * metrics.loc["additive", "mse"]
    assert metrics.loc["scforge", "rank"] == 0
    uns = tuned.adata.uns["scforge"]
    assert set(uns["metrics_per_perturbation"]["perturbation"]) == {"gene0+gene1", "gene2+gene3"}
    assert uns["metrics_calibrated"].loc["scforge", "mse"] > 0.5


def test_predictions_are_an_anndata(tuned: Encoder, tmp_path) -> None:
    made = tuned.predict()
    assert made.obs_names.tolist() == ["gene0+gene1", "gene2+gene3"]
    assert made.var_names.tolist() == GENES
    assert not made.obs["is_seen"].any()
    controls = tuned.open_cells(tuned.adata[tuned.adata.obs["target"] == "ctrl"].copy())
    expression = np.log1p(controls.counts.toarray() / controls.totals[:, None] * 1e4)
    np.testing.assert_allclose(made.X, expression.mean(axis=0) + made.layers["delta"], rtol=1e-4)
    named = tuned.predict(perturbations=["gene5+gene4+gene20", "gene0"], n_cells=3)
    assert named.obs["is_seen"].tolist() == [False, True]
    assert named.obs["n_controls"].tolist() == [3, 3]
    named.write_h5ad(tmp_path / "predicted.h5ad")
    # Without validation perturbations there is no network.
    assert named.uns["scforge"]["predicted"]["network_weight"] == 0.0
    # Genes that are not measured have an effect, and no mean.
    made = tuned.predict(tuned.adata[:, 5:].copy(), perturbations=np.array(["gene0"]))
    np.testing.assert_array_equal(made.var["measured"], np.arange(30) >= 5)
    np.testing.assert_array_equal(np.isnan(made.X[0]), np.arange(30) < 5)
    assert (made.layers["delta"] != 0).all()


def test_predicted_cells_have_the_predicted_mean_and_are_scored_as_cells(tuned: Encoder) -> None:
    mean, cells = tuned.predict(), tuned.predict(single_cells=True, n_cells=50)
    assert cells.obs["target"].value_counts().to_dict() == {"gene0+gene1": 50, "gene2+gene3": 50}
    used = tuned.predict(single_cells=True, n_cells=2048)
    for name in mean.obs_names:
        np.testing.assert_allclose(used[used.obs["target"] == name].X.mean(axis=0), mean[name].X, atol=1e-4)
    measured = tuned.adata[tuned.adata.obs["target"].isin(["ctrl", *mean.obs_names])].copy()
    away = distances(measured, used, perturbation_key="target", control="ctrl").groupby("method")["distance"].mean()
    assert away["prediction"] < 0.5 * away["control"]


def test_nobody_looks_at_held_out_cells(adata: ad.AnnData, base: Encoder, predicted: list[np.ndarray]) -> None:
    held_out = ["gene0", "gene0+gene1", "gene0+gene5"]
    rows = adata.obs["target"].isin(held_out).to_numpy()
    found = []
    for changed in (False, True):
        work = adata.copy()
        if changed:
            counts = work.X.toarray()
            counts[rows] = counts[rows][:, ::-1] + 7
            work.X = sparse.csr_matrix(counts)
        model = base.finetune("perturbation", work, heldout=held_out, validation_size=0, **OPTIONS, **QUICK)
        metrics = model.evaluate()
        found.append((metrics, model.predict().layers["delta"], list(predicted)))
        predicted.clear()
    (before, delta, one), (after, same_delta, other) = found
    np.testing.assert_array_equal(delta, same_delta)
    assert len(one) == len(before) - 1  # all but the duplicate
    np.testing.assert_array_equal(one, other)
    # The figures do depend on them, or nothing was tested.
    assert not np.allclose(before["mse"], after["mse"])


def split_of(adata: ad.AnnData, *, vocab: GeneVocab | None = None, **options) -> tuple[Split, pd.Series]:
    """Split cells, and return their perturbations (or contexts, where those are held out)."""
    how = {name: options.pop(name, value) for name, value in SHARES.items()}
    task = get_task("perturbation", **OPTIONS, **options)
    task.vocab = vocab
    split = task.split(adata.obs.__getitem__, **how)
    return split, adata.obs["type" if how["split_by"] == "type" else "target"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("split_by", [None, "type"])
def test_no_perturbation_and_no_context_is_on_two_sides(seed: int, split_by: str | None) -> None:
    cells = planted(SINGLES + COMBINATIONS, n_cells=4, contexts=tuple("abcde"))
    split, of_cells = split_of(cells, seed=seed, split_by=split_by, context_key="type", validation_size=0.2)
    control = (cells.obs["target"] == "ctrl").to_numpy()
    parts = [rows[~control[rows]] for rows in (split.train, split.validation, split.test)]
    names = [set(of_cells.iloc[rows]) for rows in parts]
    assert all(names)
    assert len(set.union(*names)) == sum(map(len, names)) == of_cells[~control].nunique()
    assert sum(map(len, parts)) == (~control).sum()
    # Controls of all contexts are on both sides, cell by cell.
    for rows in (split.train, split.test):
        assert set(cells.obs["type"].iloc[rows[control[rows]]]) == set("abcde")


def test_what_the_model_cannot_know_is_not_drawn() -> None:
    cells = planted(["drug", "gene0", "gene1", "other+gene0"], n_cells=4)
    drawn = set()
    for seed in range(8):
        split, labels = split_of(cells, seed=seed, vocab=GeneVocab.from_genes(GENES))
        drawn |= set(labels.iloc[split.test])
    assert drawn == {"gene0", "gene1", "ctrl"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heldout": ["gene7"]}, OptionError, "heldout='gene7' is not the label of a perturbed cell; did you mean"),
        ({"heldout": ["ctrl"]}, OptionError, "heldout contains 'ctrl', which is the control"),
        ({"heldout": SINGLES + COMBINATIONS}, OptionError, "leaves no perturbation to train on"),
        ({"heldout_contexts": ["z"], "context_key": "type"}, OptionError, "heldout_contexts='z'"),
        ({"split_by": "donor"}, OptionError, "split_by='donor' must be the column of perturbation_key or context_key"),
        (
            {"heldout": ["gene0"], "context_key": "type", "split_by": "type"},
            OptionError,
            "split_by='type' holds out contexts; omit one",
        ),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(adata: ad.AnnData, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        split_of(adata, **options)


def test_a_single_perturbation_leaves_nothing_to_hold_out(base: Encoder) -> None:
    cells = planted(["gene0"])
    with pytest.raises(OptionError, match="leaves no perturbation to train on"):
        base.finetune("perturbation", cells, **OPTIONS, **QUICK)
    model = base.finetune("perturbation", cells, test_size=0, **OPTIONS, **QUICK)
    # Nothing tells the response of another gene, so that it is taken to be the same.
    made = model.predict(perturbations=["gene0", "gene3"]).layers["delta"]
    assert np.corrcoef(made)[0, 1] > 0.9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"control": "NT"}, DataError, r"control='NT' is not in obs\['target'\] \(available: 'ctrl', 'gene0'"),
        ({"perturbation_key": "targets"}, DataError, "'targets' is not a column of obs.* did you mean 'target'"),
        ({"perturbation_key": "nothing"}, DataError, "all cells are controls"),
        ({"split_key": "part"}, OptionError, "hold out whole perturbations"),
        (
            {"perturbation_key": "named", "heldout": ["drug"]},
            OptionError,
            "the targets 'drug' are not in the vocabulary of the model",
        ),
    ],
)
def test_cells_that_cannot_be_learned_from(adata: ad.AnnData, base: Encoder, change: dict, error, message) -> None:
    cells = adata.copy()
    cells.obs["nothing"] = "ctrl"
    cells.obs["part"] = np.where(np.arange(cells.n_obs) % 4, "train", "test")
    cells.obs["named"] = cells.obs["target"].astype(str).replace("gene4", "drug")
    with pytest.raises(error, match=message):
        base.finetune("perturbation", cells, **{**OPTIONS, **change}, **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"perturbations": ["drug+gene0"]}, "the targets 'drug' are not in the vocabulary of the model"),
        ({"perturbations": ["ctrl"]}, "contains 'ctrl', which is the control"),
        ({"perturbations": []}, "is not a list of unique names"),
        ({"perturbations": ["gene0"], "contexts": ["b"]}, "contexts='b' is not in the contexts with control cells"),
        ({"key_added": "x"}, "key_added='x'"),
        ({"n_cells": 0}, "n_cells=0"),
    ],
)
def test_predictions_that_make_no_sense_are_refused(tuned: Encoder, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tuned.predict(**options)
    cells = tuned.adata[tuned.adata.obs["target"] == "ctrl"].copy()
    del cells.obs["target"]
    with raises(DataError, "perturbation_key"):
        tuned.predict(cells, perturbations=["gene0"])


@pytest.mark.parametrize("delta_loss", ["mse", "wmse"])
def test_a_response_seen_in_other_contexts_is_predicted_in_a_new_one(delta_loss: str) -> None:
    cells = planted(["stimulated"], contexts=("a", "b", "c", "d"))
    base = base_of(cells[cells.obs["target"] == "ctrl"].copy())
    options = {"context_key": "type", "heldout_contexts": ["c"], "delta_loss": delta_loss}
    model = base.finetune("perturbation", cells, **options, **OPTIONS, **QUICK)
    metrics = model.evaluate()
    assert {"perturbation_mean", "technical_duplicate"} <= {*metrics.index}
    assert "additive" not in metrics.index
    assert metrics.loc["scforge", "mse"] < 0.3 * metrics.loc["no_change", "mse"]
    assert metrics["rank"].isna().all()  # one effect has no other to be told apart from
    made = model.predict(perturbations=["stimulated"])
    assert not made.obs.set_index("context").loc["c", "is_seen"]
    assert made.obs["is_seen"].sum() == 2  # one context validates
    # A context of other cells is compared over the genes that both have.
    options = {"context_key": "type", "test_size": 0, "validation_size": 0}
    model = base.finetune("perturbation", cells[cells.obs["type"] != "c"].copy(), **options, **OPTIONS, **QUICK)
    metrics = model.evaluate(cells[cells.obs["type"] == "c", 6:].copy())
    assert metrics.drop(columns=["rank", "rank_in_screen"]).notna().all(axis=None)


def test_other_cells_are_scored_against_controls_of_their_own(tuned: Encoder) -> None:
    other = planted(["gene4+gene5"], n_cells=30)
    metrics = tuned.evaluate(other)
    assert tuned.predict(other).obs["n_controls"].tolist() == [120]
    assert np.isfinite(metrics["mse"]).all()
    with pytest.raises(DataError, match="the scored cells have no unseen perturbation"):
        tuned.evaluate(planted(["gene0"]))


def test_control_cells_are_inputs_and_no_targets(adata: ad.AnnData, base: Encoder) -> None:
    task = get_task("perturbation", **OPTIONS, perturbations={name: ["all"] for name in SINGLES + COMBINATIONS})
    cells = base.open_cells(adata)
    train = np.arange(adata.n_obs)
    task.bind(cells, train)
    control = adata.obs["target"].to_numpy() == "ctrl"
    mixed = np.concatenate([np.flatnonzero(control)[:3], np.flatnonzero(~control)[:5]])
    batch = task.prepare(cells.block(mixed), base.tokenizer, epoch=0, seed=0)
    assert task.n_cells(batch) == len(batch["input_ids"]) == len(batch["delta"]) == 5
    again = task.prepare(cells.block(mixed[::-1].copy()), base.tokenizer, epoch=0, seed=0)
    np.testing.assert_allclose(again["values"].sum(1).flip(0), batch["values"].sum(1))
    other = task.prepare(cells.block(mixed), base.tokenizer, epoch=1, seed=0)
    assert not torch.equal(other["values"].sum(1), batch["values"].sum(1))
    alone = task.prepare(cells.block(mixed[:3]), base.tokenizer, epoch=0, seed=0)
    assert task.n_cells(alone) == 0
    assert task.loss_of(torch.ones(1, 34), alone)[0] == 0


@pytest.fixture
def predicted(monkeypatch) -> list[np.ndarray]:
    """What is scored, method by method."""
    scored: list[np.ndarray] = []

    def score(made, *rest, real=report.score_deltas):
        scored.append(made)
        return real(made, *rest)

    monkeypatch.setattr(report, "score_deltas", score)
    return scored


def test_genes_that_the_scored_cells_lack_take_nothing_from_the_baselines(
    base: Encoder, adata: ad.AnnData, predicted: list[np.ndarray]
) -> None:
    model = base.finetune("perturbation", adata.copy(), test_size=0, validation_size=0, **OPTIONS, **QUICK)
    scored = planted(["gene0+gene2", "gene1+gene3"])
    # Where genes are missing, cells of the fine-tuning are known by their names.
    scored.obs_names = "new " + scored.obs_names
    names = model.evaluate(scored).index.drop("technical_duplicate")
    model.evaluate(scored[:, 6:].copy())
    of_whole, of_part = predicted[: len(names)], predicted[len(names) :]
    for name, whole, part in list(zip(names, of_whole, of_part, strict=True))[1:]:
        np.testing.assert_allclose(part, whole[:, 6:], atol=1e-6, err_msg=name)


def test_the_calibrated_scores_are_over_effects_that_have_a_duplicate(tuned: Encoder) -> None:
    single = planted(["gene4+gene5", "gene1+gene5", "gene2+gene5"])
    one = np.flatnonzero(single.obs["target"] == "gene2+gene5")
    single = single[np.setdiff1d(np.arange(single.n_obs), one[1:])].copy()
    tuned.evaluate(single)
    effects = single.uns["scforge"]["metrics_per_perturbation"]
    effects = effects[effects["perturbation"] != "gene2+gene5"].groupby("method")["mse"].mean()
    room = effects["technical_duplicate"] - effects["train_mean"]
    expected = (effects["scforge"] - effects["train_mean"]) / room
    assert single.uns["scforge"]["metrics_calibrated"].loc["scforge", "mse"] == pytest.approx(expected)


def test_controls_are_kept_back_only_if_something_is_tested(adata: ad.AnnData) -> None:
    for test_size, n_controls in ((0.0, 64), (0.2, 43)):
        split, labels = split_of(adata, test_size=test_size)
        assert (labels.iloc[split.train] == "ctrl").sum() == n_controls
    # Cells without a label take no part.
    cells = adata.copy()
    cells.obs.loc[cells.obs_names[:20], "target"] = None
    split, _ = split_of(cells)
    assert not np.isin(np.arange(20), np.concatenate([split.train, split.validation, split.test])).any()


def test_vectors_of_genes_from_a_file_predict_unseen_knockouts(tmp_path) -> None:
    screen = simulate_screen(n_knockouts=40, n_pairs=0, n_cells=30, n_genes=60, n_programs=2, n_response=20)
    table = tmp_path / "vectors.parquet"
    pd.get_dummies(screen.program, dtype=float).rename(columns=str).to_parquet(table)
    heldout = screen.program.index[screen.program >= 0][:6].tolist()
    options = {"perturbation_key": "perturbation", "control": "control", "heldout": heldout, "validation_size": 0}
    found = {}
    for tables in (None, {"programs": str(table)}):
        model = base_of(screen.adata.copy()).finetune("perturbation", gene_tables=tables, **options, **QUICK)
        found[tables is None] = model.predict().layers["delta"], model
    truth = screen.effects.loc[heldout].to_numpy()
    without, with_table = (
        np.mean([np.corrcoef(*pair)[0, 1] for pair in zip(found[is_none][0], truth, strict=True)])
        for is_none in (True, False)
    )
    assert with_table > max(without + 0.1, 0.6)
    # The file is read in training only.
    model = found[False][1]
    model.save(tmp_path / "model")
    table.unlink()
    again = Encoder.load(tmp_path / "model", adata=screen.adata.copy()).predict().layers["delta"]
    np.testing.assert_allclose(again, found[False][0], atol=1e-5)
