import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab, select_genes
from scforge.errors import DataError, GeneMismatchError, OptionError
from scforge.estimators import Encoder


def test_only_scvi_entries_are_added(tiny_adata: ad.AnnData) -> None:
    before = tiny_adata.copy()
    Encoder.setup_anndata(tiny_adata, labels_key="batch")
    Encoder.setup_anndata(tiny_adata, batch_key="batch", labels_key="group", gene_key="ensembl")
    assert set(tiny_adata.obs) - set(before.obs) == {"_scvi_batch", "_scvi_labels"}
    assert all(key.startswith("_scvi") for key in tiny_adata.uns)
    assert (list(tiny_adata.var), list(tiny_adata.layers)) == (list(before.var), list(before.layers))
    np.testing.assert_array_equal(tiny_adata.obs["group"], before.obs["group"])
    np.testing.assert_array_equal(tiny_adata.obs["_scvi_labels"], before.obs["group"].cat.codes)
    assert Encoder(tiny_adata, n_top_genes=20, hidden_dim=8).registry_["setup_args"]["labels_key"] == "group"
    tiny_adata.obs.loc["cell3", "batch"] = np.nan
    with pytest.raises(DataError, match=r"adata.obs\['batch'\] has no value for 1 of 60 cells; fill it in"):
        Encoder.setup_anndata(tiny_adata, batch_key="batch")


@pytest.mark.parametrize("missing", [None, np.nan])
@pytest.mark.parametrize("dtype", [object, "category"])
def test_labels_may_be_missing(trained, tiny_adata: ad.AnnData, missing, dtype) -> None:
    labels = tiny_adata.obs["group"].astype(object)
    labels.iloc[[3, 7]] = missing
    tiny_adata.obs["group"] = labels.astype(dtype)
    model = trained(setup={"labels_key": "group"})
    codes = tiny_adata.obs["_scvi_labels"].to_numpy()
    assert (codes[[3, 7]] == -1).all()
    assert (np.delete(codes, [3, 7]) >= 0).all()
    assert model.get_latent_representation().shape == (60, 4)


KINDS = [np.arange(60) % 3, np.arange(60) % 2 == 0, pd.Categorical(["b", "a"] * 30, categories=["b", "a"])]


@pytest.mark.parametrize("values", KINDS, ids=["numbers", "booleans", "ordered as said"])
def test_labels_of_any_kind(trained, tiny_adata: ad.AnnData, tmp_path, values) -> None:
    tiny_adata.obs["label"] = values
    trained(setup={"labels_key": "label"}).save(tmp_path / "model")
    Encoder.load(tmp_path / "model", tiny_adata)
    np.testing.assert_array_equal(tiny_adata.obs["_scvi_labels"], pd.Categorical(values).codes)


def test_batches_choose_the_genes(build, tiny_adata: ad.AnnData) -> None:
    counts = tiny_adata.X.toarray()
    counts[:30, 20:40] += 20
    tiny_adata.X = counts
    expected = select_genes(tiny_adata, n_top_genes=20, batch_key="batch").genes
    assert build(adata=tiny_adata.copy(), n_top_genes=20, setup={"batch_key": "batch"}).vocab.genes == expected
    assert build(adata=tiny_adata.copy(), n_top_genes=20).vocab.genes != expected


def test_gene_key_names_the_genes(trained, tiny_adata: ad.AnnData) -> None:
    plain = trained(adata=tiny_adata.copy())
    by_id = trained(setup={"gene_key": "ensembl"})
    assert plain.vocab.genes[0].startswith("gene")
    assert by_id.vocab.genes[0].startswith("ENSG")
    np.testing.assert_array_equal(by_id.get_latent_representation(), plain.get_latent_representation())


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("layer", "layer='counts', where the training data have them, is not in adata.layers of these cells"),
        ("gene_key", "gene_key='ensembl', where .* is not in adata.var of these cells; did you mean 'ensembl_id'"),
    ],
)
def test_new_cells_with_counts_or_names_elsewhere(trained, tiny_adata: ad.AnnData, argument: str, told: str) -> None:
    new = tiny_adata.copy()
    new.var = new.var.rename(columns={"ensembl": "ensembl_id"})
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    model = trained(setup={argument: {"layer": "counts", "gene_key": "ensembl"}[argument]})
    with pytest.raises(DataError, match=told + r".*call Encoder.setup_anndata\(adata, ...\) on them"):
        model.get_latent_representation(new)
    Encoder.setup_anndata(new, gene_key="ensembl_id" if argument == "gene_key" else None)
    np.testing.assert_array_equal(model.get_latent_representation(new), model.get_latent_representation())


def test_kept_genes_and_genes_that_were_not_chosen(build, tiny_adata):
    usual = build(adata=tiny_adata.copy(), n_top_genes=20)
    usual.train(1, progress_bar=False)
    left_out = next(name for name in tiny_adata.var_names if name not in usual.vocab)
    said = f"genes names '{left_out}', in adata but not among the model's 20 genes; build .* keep_genes=..{left_out}'"
    with pytest.raises(GeneMismatchError, match=said):
        usual.perturb_in_silico(genes=[left_out])
    with pytest.raises(GeneMismatchError, match="genes names 'GCG', not among the model's 20 genes; build the model"):
        usual.perturb_in_silico(genes=["GCG"])
    kept = build(adata=tiny_adata.copy(), n_top_genes=20, keep_genes=[left_out])
    assert left_out in kept.vocab
    assert kept.vocab.n_genes == 20
    with pytest.raises(OptionError, match="keep_genes names 'gone', not among the genes of adata"):
        build(adata=tiny_adata.copy(), n_top_genes=20, keep_genes=["gone"])


def test_variable_genes_are_chosen_within_an_annotation_but_not_within_a_list(tiny_adata):
    adata = ad.AnnData(sparse.csr_matrix(sparse.hstack([tiny_adata.X] * 30)))
    adata.var_names = [f"gene{i}" for i in range(adata.n_vars)]
    whole = GeneVocab(tuple(adata.var_names), release="some annotation")
    Encoder.setup_anndata(adata)
    chosen = Encoder(adata, vocab=whole, hidden_dim=8).vocab
    assert (chosen.n_genes, chosen.release) == (2_000, "some annotation, from_data")
    assert Encoder(adata, vocab=whole, n_top_genes=0, hidden_dim=8).vocab.n_genes == 2_400
    assert Encoder(adata, vocab=GeneVocab.from_genes(whole.genes), hidden_dim=8).vocab.n_genes == 2_400
