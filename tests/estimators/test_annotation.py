"""One call that labels cells, and the reference cells that are saved with a model."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file
from scipy import sparse

import scforge
from scforge.cli import main
from scforge.data import convert
from scforge.errors import DataError, GeneMismatchError, ModelFileError, OptionError, ScforgeWarning
from scforge.models import Encoder
from scforge.testing import raises
from scforge.training import CellDataModule

QUIET = {"progress_bar": False, "accelerator": "cpu"}
KINDS = ["t0", "t1", "t2"]
BROADER = {"t0": "T", "t1": "T", "t2": "B"}


def cells(n: int = 120, seed: int = 0, kinds: list[str] = KINDS, sharp: float = 12.0) -> ad.AnnData:
    """Cells of types that 10 genes each tell, in two donors."""
    generator = np.random.default_rng(seed)
    kind = np.array(kinds)[np.arange(n) % len(kinds)]
    mean = np.full((n, 60), 1.0)
    for name in kinds:
        first = 10 * int(name[1])
        mean[kind == name, first : first + 10] = sharp
    obs = pd.DataFrame({"cell_type": kind, "donor": np.where(generator.random(n) < 0.5, "d0", "d1")})
    obs.index = [f"{seed}-{i}" for i in range(n)]
    obs["broad"] = obs["cell_type"].map({**BROADER, "t3": "B", "t4": "B"})
    var = pd.DataFrame(index=[f"gene{i}" for i in range(60)])
    return ad.AnnData(sparse.csr_matrix(generator.poisson(mean).astype(np.float32)), obs=obs, var=var)


@pytest.fixture(scope="module")
def model() -> Encoder:
    adata = cells(240)
    Encoder.setup_anndata(adata, labels_key="cell_type", batch_key="donor")
    model = Encoder(adata, n_top_genes=60, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(max_epochs=8, batch_size=60, **QUIET)
    return model


@pytest.fixture
def query() -> ad.AnnData:
    adata = cells(60, seed=1)
    del adata.obs["cell_type"], adata.obs["broad"]
    return adata


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for a few epochs."""
    whole = Encoder.train
    monkeypatch.setattr(Encoder, "train", lambda self, **_: whole(self, max_epochs=5, batch_size=60, **QUIET))


def test_two_anndata_give_labels_and_a_report(query: ad.AnnData, quick) -> None:
    reference, given = cells(240), query.copy()
    report = scforge.annotate(query, reference, batch_key="donor")
    key = "scforge_cell_type_transferred"
    assert (query.obs[key].to_numpy() == cells(60, seed=1).obs["cell_type"]).mean() > 0.95
    assert set(query.obs) == {"donor", key, f"{key}_probability", f"{key}_agreement", f"{key}_p_value"}
    assert report.summary["n_cells"].sum() == query.n_obs
    assert report.summary.loc["t0", "n_cells"] == (query.obs[key] == "t0").sum()
    text = report.to_markdown()
    assert "60 cells" in text
    assert "100% of the 60 genes" in text
    assert "240 labeled cells in 2 batches" in text
    assert query.obsm["X_scforge"].shape[0] == query.n_obs
    np.testing.assert_array_equal(query.X.toarray(), given.X.toarray())
    assert list(reference.obs) == ["cell_type", "donor", "broad"]
    assert not reference.uns, "the reference is not changed"
    again = scforge.annotate(given, report.model)
    pd.testing.assert_frame_equal(again.labels, report.labels)


def test_a_saved_model_labels_without_its_training_cells(model: Encoder, query: ad.AnnData, tmp_path: Path) -> None:
    expected = model.transfer_labels(query.copy())
    model.save(tmp_path / "model")
    assert (tmp_path / "model" / "reference.safetensors").exists()
    loaded = Encoder.load(tmp_path / "model")
    pd.testing.assert_frame_equal(loaded.transfer_labels(query.copy()), expected)
    pd.testing.assert_frame_equal(scforge.annotate(query.copy(), tmp_path / "model").labels, expected)
    loaded.save(tmp_path / "again")
    again = scforge.annotate(query.copy(), str(tmp_path / "again")).labels
    pd.testing.assert_frame_equal(again, expected)
    mapped = Encoder.load_query_data(query.copy(), loaded)
    pd.testing.assert_frame_equal(mapped.transfer_labels(), expected)


def test_reference_cells_have_no_names_and_the_card_tells_of_them(model: Encoder, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    content = (tmp_path / "model" / "reference.safetensors").read_bytes()
    assert b"0-17" not in content, "names of cells are left out"
    assert load_file(tmp_path / "model" / "reference.safetensors")["data"].dtype == np.uint8
    card = (tmp_path / "model" / "README.md").read_text()
    assert "240 labeled" in card
    assert "save(reference=False)" in card
    reference = Encoder.load(tmp_path / "model").reference_cells
    assert list(reference.obs) == ["cell_type", "donor"]
    np.testing.assert_array_equal(reference.counts.toarray(), model.open_cells().counts.toarray())


def test_without_reference_cells_a_model_says_what_it_cannot_do(
    model: Encoder, query: ad.AnnData, tmp_path: Path
) -> None:
    model.save(tmp_path / "model", reference=False)
    assert not (tmp_path / "model" / "reference.safetensors").exists()
    loaded = Encoder.load(tmp_path / "model")
    with pytest.raises(OptionError, match="neither its training cells nor saved reference cells"):
        loaded.transfer_labels(query)
    with pytest.raises(OptionError, match="neither its training cells nor saved reference cells"):
        scforge.annotate(query, loaded)
    assert "cell_type" not in " ".join(query.obs)
    assert len(loaded.transfer_labels(query, reference=cells(90))) == 60


def test_fewer_cells_are_kept_of_each_type(model: Encoder, tmp_path: Path) -> None:
    model.save(tmp_path / "model", reference=30)
    kept = Encoder.load(tmp_path / "model").reference_cells
    assert len(kept) == 30
    assert kept.obs["cell_type"].value_counts().min() >= 5
    with raises(OptionError, "reference"):
        model.save(tmp_path / "other", reference=1)


def test_saving_over_a_model_removes_its_reference_cells(model: Encoder, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    model.save(tmp_path / "model", overwrite=True, reference=False)
    assert not (tmp_path / "model" / "reference.safetensors").exists()


def test_changed_cells_are_not_saved_and_the_model_is(tmp_path: Path) -> None:
    adata = cells()
    Encoder.setup_anndata(adata, labels_key="cell_type")
    model = Encoder(adata, n_top_genes=60, hidden_dim=8, ffn_dim=8, latent_dim=4)
    model.train(max_epochs=1, **QUIET)
    adata.X = adata.X * 0.37
    with pytest.warns(ScforgeWarning, match="No reference cells are saved with the model"):
        model.save(tmp_path / "model")
    assert Encoder.load(tmp_path / "model").reference_cells is None


def test_a_model_of_a_store_keeps_reference_cells(query: ad.AnnData, tmp_path: Path) -> None:
    cells(200).write_h5ad(tmp_path / "cells.h5ad")
    convert(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", obs=["cell_type", "donor"], progress=False)
    data = CellDataModule(tmp_path / "cells.zarr", labels_key="cell_type", batch_key="donor")
    model = Encoder(datamodule=data, n_top_genes=60, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(max_epochs=8, **QUIET)
    model.save(tmp_path / "model")
    table = scforge.annotate(query, tmp_path / "model").labels
    assert (table["label"].to_numpy() == cells(60, seed=1).obs["cell_type"]).mean() > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.update(indices=arrays["indices"] + 60), "cannot be read"),
        (lambda arrays: arrays.update(data=arrays["data"] * 0), "invalid counts"),
        (lambda arrays: arrays.update(totals=arrays["totals"] * np.nan), "invalid counts"),
        (lambda arrays: arrays.update(codes0=arrays["codes0"] + 7), "cannot be read"),
        (lambda arrays: arrays.pop("indptr"), "cannot be read"),
    ],
)
def test_invalid_reference_cells_are_refused(
    change: Callable[[dict], object], message: str, model: Encoder, tmp_path: Path
) -> None:
    from scforge._io import sha256_of
    from scforge.estimators.serialize import sealed

    model.save(tmp_path / "model")
    path = tmp_path / "model" / "reference.safetensors"
    arrays = load_file(path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelFileError):
        Encoder.load(tmp_path / "model")
    change(arrays)
    names = {"cell_type": KINDS, "donor": ["d0", "d1"]}
    save_file(arrays, path, metadata={"columns": json.dumps(names)})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["sha256"]["reference.safetensors"] = sha256_of(path)
    for key in ("checksum", "format", "scforge_version"):
        config.pop(key)
    (tmp_path / "model" / "config.json").write_text(sealed(config))
    with pytest.raises(ModelFileError, match=message):
        Encoder.load(tmp_path / "model")


def test_an_unsure_cell_gets_a_broader_label(model: Encoder) -> None:
    # Cells between two types of one group, and cells between the groups.
    vague = cells(60, seed=2, sharp=1.0)
    means = np.ones(60)
    means[:20] = 6.0
    vague.X = sparse.csr_matrix(np.random.default_rng(3).poisson(np.tile(means, (60, 1))).astype(np.float32))
    table = model.transfer_labels(vague, min_probability=0.99, broader=BROADER)
    assert {"T", "unassigned"} & set(table["label"])
    probability = table["probability"]
    assert set(table["label"][probability < 0.99]) <= {"unassigned"}
    assert {"T", "B", *KINDS} >= set(table["label"][probability >= 0.99])
    by_column = model.transfer_labels(vague, min_probability=0.99, broader="broad")
    pd.testing.assert_series_equal(by_column["label"].astype(str), table["label"].astype(str))
    strict = model.transfer_labels(vague, min_probability=0.99)
    assert set(strict["label"]) <= {*KINDS, "unassigned"}
    assert (table["label"] == "unassigned").sum() <= (strict["label"] == "unassigned").sum()
    with raises(OptionError, "broader"):
        model.transfer_labels(vague, broader={"t0": "T", "t1": "T"})
    with raises(OptionError, "broader"):
        model.transfer_labels(vague, broader="donor")


def test_an_unknown_type_is_found(model: Encoder) -> None:
    adata = cells(120, seed=4, kinds=["t0", "t1", "t4"])
    table = scforge.annotate(adata, model, unknown=0.05).labels
    is_new = (adata.obs["cell_type"] == "t4").to_numpy()
    is_unknown = (table["label"] == "unknown").to_numpy()
    assert is_unknown[is_new].mean() > 0.5
    assert is_unknown[~is_new].mean() < 0.3
    np.testing.assert_array_equal(is_unknown, table["p_value"] <= 0.05)
    with raises(OptionError, "unknown"):
        model.transfer_labels(adata, unknown=0.05, method="knn")
    with raises(OptionError, "unknown"):
        model.transfer_labels(adata, unknown=2.0)


def test_the_query_of_an_annotator_is_mapped_onto_its_base_model(model: Encoder, query: ad.AnnData) -> None:
    annotator = model.finetune("annotation", max_epochs=1, batch_size=60, **QUIET)
    mapped = Encoder.load_query_data(query, annotator)
    expected = Encoder.load_query_data(query, model).get_latent_representation()
    np.testing.assert_array_equal(mapped.get_latent_representation(), expected)


def changed(**columns: object) -> ad.AnnData:
    return ad.AnnData(cells().X, obs=cells().obs.assign(**columns), var=cells().var)


def renamed(names: list[str]) -> ad.AnnData:
    return ad.AnnData(cells(20).X, obs=cells(20).obs, var=pd.DataFrame(index=names))


@pytest.mark.parametrize(
    ("reference", "key", "message"),
    [
        (lambda: changed(), "celltype", "labels_key='celltype' is not in adata.obs"),
        (lambda: changed(cell_type="t0"), None, "labels_key='cell_type' has 1 label"),
        (lambda: changed(cell_type=np.nan), None, "labels_key='cell_type' has 0 label"),
        (lambda: changed(cell_type="unknown"), None, "labels_key='cell_type' has 0 label"),
        (lambda: cells()[:, :0].copy(), None, "adata"),
        (lambda: ad.AnnData(cells().X * 0.3, obs=cells().obs, var=cells().var), None, "not whole numbers"),
        (lambda: 3, None, "reference is of type 'int'"),
        (lambda: "nowhere", None, "'nowhere' does not exist"),
    ],
)
def test_an_invalid_reference_is_refused_before_training(
    reference: Callable[[], object], key: str | None, message: str, query: ad.AnnData, monkeypatch
) -> None:
    monkeypatch.setattr(Encoder, "train", lambda *_, **__: pytest.fail("trained"))
    before = list(query.obs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScforgeWarning)
        with pytest.raises((DataError, OptionError, scforge.errors.MissingFileError), match=message):
            scforge.annotate(query, reference(), key)
    assert list(query.obs) == before
    assert not query.obsm


@pytest.mark.parametrize(
    ("adata", "error", "message"),
    [
        (lambda: renamed([f"other{i}" for i in range(60)]), GeneMismatchError, "only 0 of the 60 genes"),
        (lambda: ad.AnnData(cells().X * 0.3, obs=cells().obs, var=cells().var), DataError, "not whole numbers"),
        (lambda: cells()[:0].copy(), DataError, "cells"),
        (lambda: "cells.h5ad", OptionError, "read it with anndata.read_h5ad"),
    ],
)
def test_an_invalid_query_is_refused_before_training(
    adata: Callable[[], object], error: type[Exception], message: str, monkeypatch
) -> None:
    monkeypatch.setattr(Encoder, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(error, match=message):
        scforge.annotate(adata(), cells(240))


def test_the_same_cells_are_noticed(model: Encoder, query: ad.AnnData) -> None:
    with raises(OptionError, "query"):
        scforge.annotate(query, query)
    both = ad.concat([query, cells(240)[:10]], join="inner")
    report = scforge.annotate(both, model)
    assert "10 query cells are also labeled reference cells" in report.to_markdown()


def test_few_or_equal_cells_get_labels(model: Encoder, query: ad.AnnData) -> None:
    assert len(scforge.annotate(query[:1].copy(), model).labels) == 1
    twice = ad.concat([query, query], index_unique="-")
    table = scforge.annotate(twice, model).labels
    assert list(table["label"][:60]) == list(table["label"][60:])
    query.obs["lane"] = ["alone", *["others"] * 59]
    assert len(scforge.annotate(query, model, query_batch_key="lane").labels) == 60


def test_a_type_with_one_cell_is_named(query: ad.AnnData, quick) -> None:
    reference = cells(120)
    reference.obs["cell_type"] = ["single", *reference.obs["cell_type"][1:]]
    with pytest.warns(ScforgeWarning, match="a single reference cell can hardly be learned: 'single'"):
        table = scforge.annotate(query, reference).labels
    assert (table["label"].astype(str).to_numpy() == cells(60, seed=1).obs["cell_type"]).mean() > 0.9


def test_counts_of_a_layer(model: Encoder, query: ad.AnnData) -> None:
    expected = scforge.annotate(query.copy(), model).labels
    query.layers["counts"] = query.X.copy()
    query.X = query.X * 0.4
    query.var["name"], query.var_names = query.var_names, [f"x{i}" for i in range(60)]
    found = scforge.annotate(query, model, layer="counts", gene_key="name", query_batch_key="donor").labels
    pd.testing.assert_frame_equal(found, expected)


def test_from_files_on_the_command_line(model: Encoder, query: ad.AnnData, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    query.write_h5ad("cells.h5ad")
    model.save("model")
    assert main(["annotate", "cells.h5ad", "--reference", "model", "-o", "out.h5ad"]) == 0
    told = capsys.readouterr().out
    assert "| t0 |" in told
    assert "Written: out.h5ad" in told
    written = ad.read_h5ad("out.h5ad")
    expected = scforge.annotate(query, "model", min_probability=0.9)
    key = "scforge_cell_type_transferred"
    np.testing.assert_array_equal(written.obs[f"{key}_probability"], expected.labels["probability"])
    line = "annotate cells.h5ad --reference model -o out.csv --min-probability 0.9 --quiet"
    assert main(line.split()) == 0
    table = pd.read_csv("out.csv", index_col=0)
    assert list(table["label"]) == list(expected.labels["label"])
    assert main(line.split()) == 2
    assert "out.csv" in capsys.readouterr().err
    for wrong, message in {
        "annotate cells.h5ad --reference nowhere -o new.csv": "reference='nowhere' (--reference) does not exist",
        "annotate none.h5ad --reference model -o new.csv": "none.h5ad",
        "annotate cells.h5ad --reference none.h5ad -o new.csv": "none.h5ad",
        "annotate cells.h5ad --reference model -o new.txt": "must end with .csv or .h5ad",
        "annotate cells.h5ad --reference model -o cells.h5ad --overwrite": "cells.h5ad",
        "annotate cells.h5ad --reference model -o new.csv --plot a.pdf": "must end with .png",
    }.items():
        assert main(wrong.split()) == 2
        assert message in capsys.readouterr().err
    assert not Path("new.csv").exists()


def test_other_cells_of_a_loaded_model_are_not_its_reference(model: Encoder, query: ad.AnnData, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    expected = model.transfer_labels(query.copy())
    own = cells(90, seed=5)
    own.obs["cell_type"] = "x" + own.obs["cell_type"].astype(str)
    for attached in (own, query.copy()):
        loaded = Encoder.load(tmp_path / "model", attached)
        pd.testing.assert_frame_equal(scforge.annotate(query.copy(), loaded).labels, expected)
        loaded.save(tmp_path / "again", overwrite=True)
        assert set(Encoder.load(tmp_path / "again").reference_cells.obs["cell_type"]) == set(KINDS)
    other = Encoder.load(tmp_path / "model")
    table = model.transfer_labels(query.copy(), reference=other)
    pd.testing.assert_frame_equal(table, expected)
    other.save(tmp_path / "few", reference=6)
    assert set(Encoder.load(tmp_path / "few").reference_cells.obs["cell_type"]) == set(KINDS)


def test_columns_of_an_earlier_method_do_not_stay(model: Encoder, query: ad.AnnData) -> None:
    model.transfer_labels(query, key_added="kind")
    model.transfer_labels(query, key_added="kind", method="knn")
    assert [name for name in query.obs if name.startswith("kind")] == ["kind", "kind_probability"]


def test_options_are_checked_before_training(query: ad.AnnData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "train", lambda *_, **__: pytest.fail("trained"))
    for name, (value, message) in {
        "unknown": (5, "unknown=5"),
        "min_probability": (2, "min_probability=2"),
        "broader": ("typo", "'typo' is not a column"),
        "key_added": ("a/b", "key_added='a/b'"),
        "labels_key": ("a/b", "labels_key='a/b'"),
        "reference": (Encoder.load("scforge://pbmc3k-light", False), "neither|genes"),
    }.items():
        arguments = {"reference": cells(), name: value}
        with pytest.raises((DataError, OptionError), match=message):
            scforge.annotate(query, arguments.pop("reference"), **arguments)
    for broader, text in {"unassigned": "no label for 't2'", "nan": "no label for 't2'"}.items():
        parent = float("nan") if broader == "nan" else broader
        with pytest.raises(OptionError, match=text):
            scforge.annotate(query, cells(), broader={"t0": "T", "t1": "T", "t2": parent})
    with raises(OptionError, "broader"):
        scforge.annotate(query, cells(), broader=["T"])


def test_models_that_cannot_be_a_reference(model: Encoder, query: ad.AnnData, tmp_path: Path) -> None:
    untrained = Encoder(model.adata, n_top_genes=60, hidden_dim=8)
    with raises(OptionError, "reference"):
        scforge.annotate(query, untrained)
    with raises(OptionError, "reference"):
        scforge.annotate(query, Encoder.load_query_data(query.copy(), model))
    with raises(OptionError, "key_added"):
        scforge.annotate(query, model, key_added="X_scforge")
    with pytest.warns(ScforgeWarning, match="reference=30 has no effect"):
        Encoder.load_query_data(query.copy(), model).save(tmp_path / "query", reference=30)


def test_a_reference_with_few_cells_finds_nothing_unknown(model: Encoder, query: ad.AnnData) -> None:
    with pytest.warns(ScforgeWarning, match="unknown=0.05 has no effect"):
        table = model.transfer_labels(query, reference=cells(30), unknown=0.05)
    assert "unknown" not in set(table["label"])
    assert table["p_value"].isna().all()
