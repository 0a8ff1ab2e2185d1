import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.metrics.pairwise import cosine_similarity

import scforge
from scforge.errors import DataError, OptionError
from scforge.eval import edges_from_attention, edges_from_embeddings, edges_from_perturbations
from scforge.eval.networks import edges_from_matrix
from scforge.testing import raises

GENES = [f"g{i}" for i in range(6)]
OTHERS = ~np.eye(6, dtype=bool)


@pytest.fixture
def vectors() -> pd.DataFrame:
    return pd.DataFrame(np.random.default_rng(0).normal(1.0, 1.0, size=(6, 4)), index=GENES)


def as_dict(edges: pd.DataFrame) -> dict[tuple[str, str], float]:
    assert not edges.duplicated(["source", "target"]).any()
    return {(row.source, row.target): row.weight for row in edges.itertuples()}


def wide(edges: pd.DataFrame, genes: list[str]) -> np.ndarray:
    edges = edges.astype({"source": str, "target": str})
    return edges.pivot(index="source", columns="target", values="weight").loc[genes, genes].to_numpy()


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("measure", ["cosine", "correlation", "dot"])
def test_similarities_are_those_of_numpy_and_scikit_learn(vectors: pd.DataFrame, measure: str, center: bool) -> None:
    used = (vectors - vectors.mean() if center else vectors).to_numpy()
    reference = {"cosine": cosine_similarity, "correlation": np.corrcoef, "dot": lambda x: x @ x.T}[measure](used)
    for absolute, expected in ((False, reference), (True, np.abs(reference))):
        edges = edges_from_embeddings(vectors, measure=measure, center=center, absolute=absolute)
        found = wide(edges, GENES)
        assert np.isnan(found[~OTHERS]).all()
        np.testing.assert_allclose(found[OTHERS], expected[OTHERS], rtol=1e-5, atol=1e-6)


def test_sources_and_targets_are_chosen_and_genes_without_a_vector_left_out(vectors: pd.DataFrame) -> None:
    vectors.loc["g1"] = np.nan
    found = edges_from_embeddings(vectors, tfs=["g2", "g1", "unheard"], targets=["g2", "g3", "g1"])
    assert found[["source", "target"]].to_numpy().tolist() == [["g2", "g3"]]
    assert found.dtypes.astype(str).tolist() == ["category", "category", "float32"]
    assert len(edges_from_embeddings(vectors)) == 5 * 4


def test_a_matrix_dense_or_sparse() -> None:
    matrix = np.array([[0.9, 0.5, 0.0], [-0.2, 0.9, np.nan], [0.1, 0.0, 0.9]])
    known = np.nan_to_num(matrix)
    dense = edges_from_matrix(matrix, list("ABC"))
    assert list(as_dict(dense)) == [("A", "B"), ("A", "C"), ("B", "A"), ("C", "A"), ("C", "B")]
    stored = edges_from_matrix(sparse.csc_matrix(known), list("ABC"))
    assert as_dict(stored) == pytest.approx({("A", "B"): 0.5, ("B", "A"): -0.2, ("C", "A"): 0.1})
    oblong = edges_from_matrix(np.ones((1, 2)), ["A"], ["A", "x"], tfs=["A"])
    assert oblong.to_numpy().tolist() == [["A", "x", 1.0]]


@pytest.fixture
def model(tiny_adata: ad.AnnData) -> scforge.models.Encoder:
    scforge.models.Encoder.setup_anndata(tiny_adata)
    sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "ffn_dim": 8}
    return scforge.models.Encoder(tiny_adata, "transformer_encoder", tokenizer="rank_value", **sizes)


@pytest.mark.filterwarnings("ignore::scforge.errors.NotTrainedWarning")
def test_attention_that_a_model_wrote(model: scforge.models.Encoder, tiny_adata: ad.AnnData) -> None:
    graph = model.get_attention(tiny_adata, top_k=3)
    tfs = [model.vocab.genes[i] for i in np.argsort(-graph.getnnz(axis=0))[:2]]
    found = edges_from_attention(tiny_adata, tfs=tfs)
    column = {name: graph[:, model.vocab.genes.index(name)].toarray().ravel() for name in tfs}
    # A target reads its regulator: what a source gives stands in its column.
    expected = {(tf, model.vocab.genes[i]): v for tf, values in column.items() for i, v in enumerate(values) if v > 0}
    assert as_dict(found) == pytest.approx(expected)
    assert len(found) > 0
    assert len(edges_from_attention(tiny_adata, source="rows", tfs=["gene3"])) == 3
    with raises(DataError, "key"):
        edges_from_attention(tiny_adata, "attention")


@pytest.mark.filterwarnings("ignore::scforge.errors.NotTrainedWarning")
def test_pairs_that_a_model_perturbed(model: scforge.models.Encoder, tiny_adata: ad.AnnData) -> None:
    genes = [f"gene{i}" for i in range(5)]
    options = {"combinations": 2, "n_permutations": 0, "groups": "group", "max_cells": 20, "key_added": None}
    table = model.perturb_in_silico(tiny_adata, genes, "overexpress", **options)
    expected = np.full((5, 5), np.nan)
    for _, part in table.groupby("group", observed=True):
        i, j = part["gene"].str[4:].astype(int).to_numpy(), part["gene_2"].str[4:].astype(int).to_numpy()
        design = np.eye(5)[i] + np.eye(5)[j]
        rest = np.abs(part["shift"] - design @ np.linalg.lstsq(design, part["shift"], rcond=None)[0]).to_numpy()
        expected[i, j] = np.fmax(expected[i, j], rest)
    found = wide(edges_from_perturbations(table), genes)
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found, np.fmax(expected, expected.T), rtol=1e-3, atol=1e-7)
    one_a_row = model.perturb_in_silico(tiny_adata, genes, n_permutations=0, key_added=None)
    with raises(DataError, "effects"):
        edges_from_perturbations(one_a_row)


def test_predicted_effects() -> None:
    delta = np.array([[9.0, -2.0, 0.5], [0.1, 9.0, 0.2], [0.0, 3.0, 0.1], [5.0, 5.0, 5.0]], dtype=np.float32)
    obs = pd.DataFrame({"perturbation": pd.Categorical(["A", "B", "A", "A+B"])}, index=list("1234"))
    predicted = ad.AnnData(np.zeros((4, 3)), obs=obs, var=pd.DataFrame(index=list("ABC")), layers={"delta": delta})
    table = pd.DataFrame(delta[:3], index=list("ABA"), columns=list("ABC"))
    for given in (predicted, table):
        expected = {("A", "B"): 3.0, ("A", "C"): 0.5, ("B", "A"): 0.1, ("B", "C"): 0.2}
        assert as_dict(edges_from_perturbations(given)) == pytest.approx(expected)
    assert len(edges_from_perturbations(predicted, tfs=["B"])) == 2
    predicted.obs["perturbation"] = "A+B"
    with raises(DataError, "effects"):
        edges_from_perturbations(predicted)
    with raises(DataError, "effects"):
        edges_from_perturbations(ad.AnnData(np.zeros((1, 1))))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda v: edges_from_embeddings(v, measure="cos"),
            OptionError,
            r"measure='cos' is not in the measures; did you mean 'cosine'",
        ),
        (
            lambda v: edges_from_embeddings(v, tfs=["ENSG1"]),
            DataError,
            r"tfs \('ENSG1'\) has no overlap with the 6 genes",
        ),
        (
            lambda v: edges_from_embeddings(pd.concat([v, v[:1]])),
            DataError,
            "gene names are duplicated .'g0'.; keep one",
        ),
        (
            lambda v: edges_from_embeddings(v),
            OptionError,
            "6 x 6 gene pairs are more than the limit of 20; pass the .* as tfs",
        ),
    ],
)
def test_mistakes(vectors: pd.DataFrame, monkeypatch, call, error: type[Exception], message: str) -> None:
    monkeypatch.setattr("scforge.eval.networks._MAX_PAIRS", 20)
    with pytest.raises(error, match=message):
        call(vectors)
