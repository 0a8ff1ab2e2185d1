"""Screens that pertpy downloads: its real functions read files of the layout they have, of a simulated screen."""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from scipy import sparse

from scforge.datasets import get_card, get_split, list_cards, load
from scforge.datasets.cards import SplitRule
from scforge.errors import DataError, MissingFileError, OptionError
from scforge.eval.perturbation import PerturbationPrediction
from scforge.perturbation.baselines import perturbation_baselines
from scforge.perturbation.effects import PerturbedCells
from scforge.perturbation.keys import PerturbationKeys
from scforge.testing import SimulatedScreen, raises, simulate_screen

KEYS = ("perturbation_name", "control")


@pytest.fixture(scope="module")
def screen() -> SimulatedScreen:
    return simulate_screen(n_knockouts=30, n_pairs=70, n_cells=50, n_genes=200, n_programs=4, n_response=30)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which pertpy looks before it downloads."""
    monkeypatch.delenv("SCFORGE_DATA", raising=False)
    before = sc.settings.datasetdir
    sc.settings.datasetdir = tmp_path / "pertpy"
    yield tmp_path / "pertpy"
    sc.settings.datasetdir = before


def write(path: Path, adata: ad.AnnData) -> None:
    path.parent.mkdir(exist_ok=True)
    adata.write_h5ad(path)


def as_norman(screen: SimulatedScreen) -> ad.AnnData:
    """Return a screen with what norman_2019.h5ad has: log-normalized X, counts in a layer, empty guides of controls."""
    adata = screen.adata.copy()
    labels = adata.obs.pop("perturbation")
    adata.obs["guide_ids"] = labels.str.replace("+", ",").replace("control", "")
    adata.obs["perturbation_name"] = pd.Categorical(labels)
    adata.obs["gemgroup"] = np.arange(adata.n_obs) % 8 + 1
    adata.layers["counts"] = adata.X.copy()
    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)
    return adata


def test_norman(screen: SimulatedScreen, cache: Path) -> None:
    with pytest.raises(MissingFileError):
        load("norman")
    write(cache / "norman_2019.h5ad", as_norman(screen))
    adata = load("norman", download=True)
    np.testing.assert_array_equal(adata.X.toarray(), screen.adata.X.toarray())
    assert "counts" not in adata.layers
    assert adata.obs["perturbation_name"].tolist() == screen.adata.obs["perturbation"].tolist()
    # What is in the folder comes first.
    write(cache / "norman.h5ad", adata[: adata.n_obs - 50].copy())
    assert load("norman", cache, download=True).n_obs == adata.n_obs - 50


def test_adamson_has_genes_of_guides_and_one_control(screen: SimulatedScreen, cache: Path) -> None:
    adata = screen.adata[~screen.adata.obs["perturbation"].str.contains("+", regex=False)].copy()
    guides = adata.obs["perturbation"].to_numpy(object)
    is_control = guides == "control"
    guides = np.array([f"{gene}_pDS{200 + row % 2}" for row, gene in enumerate(guides)], dtype=object)
    guides[is_control] = np.resize(["63(mod)_pBA580", "62(mod)_pBA581", "Gal4-4(mod)_pBA582"], is_control.sum())
    guides[-3:] = ["*", None, "<NA>"]
    adata.obs["perturbation"] = pd.Categorical(guides)
    adata.X = sparse.csc_matrix(adata.X)
    write(cache / "adamson_2016_upr_perturb_seq.h5ad", adata)
    found = load("adamson", download=True)
    assert found.n_obs == adata.n_obs - 3
    assert found.obs["perturbation"].tolist() == screen.adata.obs.loc[found.obs_names, "perturbation"].tolist()


@pytest.mark.parametrize(
    ("name", "file"),
    [("replogle_k562", "replogle_2022_k562_essential"), ("replogle_rpe1", "replogle_2022_rpe1")],
)
def test_replogle_holds_out_whole_knockouts(name: str, file: str, screen: SimulatedScreen, cache: Path) -> None:
    adata = screen.adata.copy()
    adata.obs["gene_id"] = "ENSG00000000001"
    write(cache / f"{file}.h5ad", adata)
    found = load(name, download=True)
    labels = get_split(name, found).labels(found)
    parts = pd.crosstab(found.obs["perturbation"], labels).drop(index="control")
    assert ((parts > 0).sum(axis=1) == 1).all()
    assert (parts["test"] > 0).sum() == round(0.25 * len(parts))


def test_kang_holds_out_stimulation_of_cell_types(cache: Path) -> None:
    rng, n_cells = np.random.default_rng(0), 480
    obs = pd.DataFrame(
        {
            "label": rng.choice(["ctrl", "stim"], n_cells),
            "replicate": rng.choice([f"patient_{i}" for i in (101, 107, 1015)], n_cells),
            "cell_type": rng.choice(["B cells", "CD4 T cells", "NK cells", "CD14+ Monocytes"], n_cells),
        },
        index=[f"cell{i}" for i in range(n_cells)],
    )
    write(
        cache / "kang_2018.h5ad", ad.AnnData(rng.poisson(1.0, (n_cells, 30)).astype(np.float32), obs.astype("category"))
    )
    adata = load("kang_2018", download=True)
    table = pd.crosstab([adata.obs["cell_type"], adata.obs["label"]], get_split("kang_2018", adata).labels(adata))
    stimulated = table.xs("stim", level="label")
    assert (stimulated > 0).sum().to_dict() == {"train": 1, "validation": 1, "test": 2}
    assert (table.xs("ctrl", level="label")["train"] > 0).all()


def test_every_function_of_a_card_exists() -> None:
    import pertpy

    sources = [card.pertpy for card in map(get_card, list_cards()) if card.pertpy is not None]
    assert len(sources) == 5
    assert all(callable(getattr(pertpy.data, source.function)) for source in sources)


def test_what_pertpy_cannot_read(screen: SimulatedScreen, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(MissingFileError):
        load("norman", download=True)
    cache.unlink()
    write(cache / "norman_2019.h5ad", screen.adata)
    with raises(DataError, "layer"):
        load("norman", download=True)


def test_pairs_by_how_many_of_their_genes_were_seen(screen: SimulatedScreen, cache: Path) -> None:
    write(cache / "norman_2019.h5ad", as_norman(screen))
    adata = load("norman", download=True)
    split = get_split("norman", adata, version=2)
    seen = split.seen_targets(adata, *KEYS)
    pairs = seen[seen.index.str.contains("+", regex=False)]
    assert set(pairs) == {0, 1, 2}
    assert (seen.drop(pairs.index) == 0).all()
    assert len(seen) - len(pairs) == round(0.2 * 30), "single knockouts of held-out genes"
    known = adata.obs.loc[split.train, "perturbation_name"].astype(str)
    genes = {gene for name in known for gene in name.split("+")}
    assert [sum(gene in genes for gene in name.split("+")) for name in seen.index] == seen.tolist()
    of_other_version = get_split("norman", adata)
    assert set(of_other_version.seen_targets(adata, *KEYS)) == {2}
    with raises(OptionError, "part"):
        split.seen_targets(adata, *KEYS, part="train")
    with raises(OptionError, "kind"):
        SplitRule("targets", "perturbation_name", 0.1, 0.2)

    # The truth is additive: the more genes are known, the closer predictions are to it.
    train, test = (adata[split.rows(adata, part)].copy() for part in ("train", "test"))
    keys = PerturbationKeys("perturbation_name", "control")
    trained, held_out = (PerturbedCells.read(cells, keys, argument="cells") for cells in (train, test))
    made = perturbation_baselines(trained, held_out.effects, keys, {})
    true = screen.effects.rename(index=lambda name: "+".join(sorted(name.split("+")))).loc[pairs.index]
    strong = pairs[true.abs().sum(axis=1) > 10]
    found = {
        name: pd.Series({pair: np.corrcoef(made[name].loc[pair], true.loc[pair])[0, 1] for pair in strong.index})
        .groupby(strong)
        .mean()
        for name in ("additive", "kernels", "train_mean")
    }
    for name in ("additive", "kernels"):
        assert found[name].is_monotonic_increasing
        assert found[name][2] > max(found[name][0], found["train_mean"][2]) + 0.1
    # So do scores against the measured effects.
    benchmark = PerturbationPrediction("perturbation_name", "control").trained_on(train)
    scores = {name: benchmark.table(made[name], test).set_index("perturbation")["pearson_delta"] for name in found}
    of_two = strong.index[strong == 2]
    assert scores["kernels"][of_two].mean() > scores["train_mean"][of_two].mean()
