"""The Census: a real SOMA collection, laid out as the Census is, is written here and read with the real clients."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.config import load_config
from scforge.data import CensusQuery, GeneVocab, convert, open_cells
from scforge.data.store import StoreCells
from scforge.errors import DataError, MissingFileError, OptionError, ScforgeWarning
from scforge.workflows.train import train_from_config

tiledbsoma = pytest.importorskip("tiledbsoma", reason="the clients of the Census have an environment of their own")
import pyarrow as pa  # noqa: E402 -- comes with them

N_CELLS, N_GENES = 600, 300


@pytest.fixture(scope="module")
def adata():
    """Counts shaped like the Census, in some genes of its annotation and a few others."""
    rng = np.random.default_rng(0)
    vocab = GeneVocab.named("human_protein_coding")
    counts = sparse.random(N_CELLS, N_GENES, density=0.2, format="csr", random_state=rng, dtype=np.float32)
    counts.data = rng.integers(1, 30, counts.nnz).astype(np.float32)
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(rng.choice(["T cell", "B cell", "monocyte"], N_CELLS)),
            "tissue": pd.Categorical(rng.choice(["lung", "heart", "Crohn's gut"], N_CELLS)),
            "is_primary_data": rng.random(N_CELLS) < 0.7,
            "nnz": np.diff(counts.indptr).astype(np.int64),
            "raw_sum": np.asarray(counts.sum(axis=1)).ravel(),
        },
        index=np.arange(N_CELLS).astype(str),
    )
    genes = [*vocab.genes[: N_GENES - 20], *(f"ENSG0099{i:07d}" for i in range(20))]
    symbols = [*vocab.symbols[: N_GENES - 20], *(f"NOVEL{i}" for i in range(20))]
    return anndata.AnnData(counts, obs=obs, var=pd.DataFrame({"feature_name": symbols}, index=genes))


def write_experiment(parent, organism, adata, *, obs=None):
    """Create an experiment as the builders of the Census do, and write its parts."""
    obs = (adata.obs if obs is None else obs).reset_index(drop=True)
    obs.insert(0, "soma_joinid", np.arange(len(obs)))
    var = adata.var.rename_axis("feature_id").reset_index()
    var.insert(0, "soma_joinid", np.arange(len(var)))
    parts = []
    with parent.add_new_collection(organism, kind=tiledbsoma.Experiment) as experiment:
        tables = {"obs": (experiment, obs)}
        with (
            experiment.add_new_collection("ms") as ms,
            ms.add_new_collection("RNA", kind=tiledbsoma.Measurement) as rna,
        ):
            tables["var"] = (rna, var)
            for key, (holder, frame) in tables.items():
                table = pa.Table.from_pandas(frame, preserve_index=False)
                holder.add_new_dataframe(key, schema=table.schema, domain=[(0, len(frame) - 1)]).close()
                parts.append((holder[key].uri, table))
            with rna.add_new_collection("X") as layers:
                layers.add_new_sparse_ndarray("raw", type=pa.float32(), shape=adata.shape).close()
                parts.append((layers["raw"].uri, pa.SparseCOOTensor.from_scipy(adata.X.tocoo())))
    return parts


@pytest.fixture(scope="module")
def uri(adata, tmp_path_factory):
    """A folder laid out as the Census is, with one organism."""
    return write_census(tmp_path_factory.mktemp("soma") / "census", adata)


def write_census(path, adata, **options):
    with tiledbsoma.Collection.create(str(path)) as root, root.add_new_collection("census_data") as data:
        parts = write_experiment(data, "homo_sapiens", adata, **options)
    for part, content in parts:
        with tiledbsoma.open(part, "w") as array:
            array.write(content)
    return str(path)


@pytest.fixture
def vocab(adata):
    return GeneVocab.from_genes(list(adata.var_names[10:250]))


def same_cells(block, expected):
    """Compare a block with that of an AnnData; positions in the two sources differ."""
    for part in ("indptr", "genes", "counts", "totals", "measured"):
        np.testing.assert_array_equal(getattr(block, part), getattr(expected, part))
        assert getattr(block, part).dtype == getattr(expected, part).dtype


@pytest.mark.parametrize("below", ["", "/census_data", "/census_data/homo_sapiens"])
def test_blocks_are_those_of_the_anndata(uri, adata, vocab, below):
    cells = open_cells(CensusQuery(uri=uri + below, obs=["cell_type"]), vocab)
    expected = open_cells(adata, vocab)
    assert len(cells) == N_CELLS
    rows = np.array([5, 599, 5, 17, 0])
    same_cells(cells.block(rows), expected.block(rows))
    np.testing.assert_array_equal(cells.block(rows).rows, rows)
    same_cells(cells.block(np.arange(N_CELLS)), expected.block(np.arange(N_CELLS)))
    assert len(cells.block(np.array([], dtype=np.int64))) == 0
    assert cells.column("cell_type").tolist() == adata.obs["cell_type"].tolist()
    assert cells.overlap == expected.overlap
    assert cells.counts_kept == pytest.approx(expected.counts_kept)


@pytest.mark.parametrize(
    "filters",
    [
        {"tissue": ["lung", "heart"], "is_primary_data": True},
        {"tissue": "Crohn's gut"},
        {"is_primary_data": [True, False], "nnz": 60},
        {"raw_sum": [800.0, 900.0, 850.0]},
        "tissue == 'lung' and nnz > 55",
    ],
)
@pytest.mark.filterwarnings("ignore:filters")
def test_filters_choose_the_same_cells_as_pandas(uri, adata, vocab, filters):
    obs = adata.obs
    if isinstance(filters, str):
        keep = (obs["tissue"] == "lung") & (obs["nnz"] > 55)
    else:
        keep = np.logical_and.reduce([obs[key].isin(np.atleast_1d(value)) for key, value in filters.items()])
    assert keep.any()
    cells = open_cells(CensusQuery(uri=uri, filters=filters, obs=["tissue"]), vocab)
    part = adata[np.asarray(keep)].copy()
    assert cells.obs.index.tolist() == np.flatnonzero(keep).astype(str).tolist()
    same_cells(cells.block(np.arange(len(cells))), open_cells(part, vocab).block(np.arange(len(part))))
    assert cells.column("tissue").cat.categories.tolist() == part.obs["tissue"].cat.categories.tolist()


def test_symbols_find_their_column(uri, adata):
    vocab = GeneVocab.from_genes(list(adata.var["feature_name"][:200]))
    expected = open_cells(adata, vocab, gene_key="feature_name")
    same_cells(open_cells(CensusQuery(uri=uri), vocab).block(np.arange(9)), expected.block(np.arange(9)))
    with pytest.warns(ScforgeWarning, match="200 human Ensembl ids were matched with human gene symbols"):
        cells = open_cells(CensusQuery(uri=uri, gene_key="feature_id"), vocab)
    same_cells(cells.block(np.arange(9)), expected.block(np.arange(9)))


def test_without_a_vocabulary_all_genes_are_taken(uri, adata):
    cells = open_cells(CensusQuery(uri=uri))
    assert cells.vocab.genes == tuple(adata.var_names)
    assert cells.measured.all()


def test_without_nnz_counts_are_estimated(adata, tmp_path):
    plain = write_census(tmp_path / "plain", adata, obs=adata.obs[["cell_type"]])
    (stream,) = CensusQuery(uri=plain).streams()
    assert stream.n_entries == pytest.approx(adata.X.nnz, rel=0.1)


def test_more_than_fits_into_memory_is_converted_once(uri, adata, vocab, tmp_path):
    query = CensusQuery(uri=uri, filters={"is_primary_data": True}, obs=["cell_type"])
    with pytest.raises(DataError, match=r"need about .* the limit set by memory is .*; .*cache="):
        open_cells(query, vocab, memory="10kB")
    for _ in range(2):
        cells = open_cells(query, vocab, cache=tmp_path / "store.zarr")
        assert isinstance(cells, StoreCells)
        assert len(cells) == adata.obs["is_primary_data"].sum()
        assert list(cells.obs) == ["cell_type"]


def test_a_query_is_converted_into_a_store(uri, adata, tmp_path):
    query = CensusQuery(uri=uri, filters={"is_primary_data": True}, obs=["cell_type", "tissue"])
    (stream,) = query.streams()
    kept = adata[adata.obs["is_primary_data"]].copy()
    assert (stream.n_cells, stream.n_entries) == (len(kept), kept.X.nnz)
    assert stream.obs(["tissue"])["tissue"].tolist() == kept.obs["tissue"].tolist()
    first, part = next(stream.chunks())
    assert (first, (part != kept.X[: part.shape[0]]).nnz) == (0, 0)
    assert stream.fingerprint() == query.streams()[0].fingerprint()
    assert stream.fingerprint() != CensusQuery(uri=uri).streams()[0].fingerprint()
    info = convert(query, tmp_path / "store.zarr", shuffle=False, progress=False)
    assert info.n_cells == len(kept)
    cells = open_cells(tmp_path / "store.zarr")
    assert cells.vocab.genes == tuple(adata.var_names)
    assert cells.column("tissue").tolist() == kept.obs["tissue"].tolist()
    rows = np.arange(0, len(kept), 11)
    same_cells(cells.block(rows), open_cells(kept, cells.vocab).block(rows))


def test_the_proposal_trains_on_the_census(uri, adata, tmp_path, monkeypatch):
    atlas = adata[adata.obs["tissue"] != "lung"].copy()
    atlas.obs["donor_id"] = atlas.obs["tissue"]
    for name in ("tabula_sapiens", "immune_atlas"):
        atlas.write_h5ad(tmp_path / f"{name}.h5ad")
    monkeypatch.setenv("SCFORGE_DATA", str(tmp_path))
    overrides = [
        f"data.uri={uri}",
        "training.num_gpus=0",
        "training.max_steps=2",
        "training.batch_size=8",
        "model.num_layers=1",
        "model.hidden_dim=16",
    ]
    recipe = Path(__file__).parents[1] / "config" / "proposal.yaml"
    with pytest.warns(ScforgeWarning, match="'liver', but no cell that matches"):
        model = train_from_config(load_config(recipe, overrides), progress_bar=False)
    assert model.spec.objective == "masked_gene_prediction"
    assert {"cell_type_annotation_macro_f1", "batch_integration_silhouette_label"} <= set(model.history)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"organism": "mus_musculus"}, OptionError, r"organism='mus_musculus' is not in .*available: 'homo_sapiens'"),
        ({"obs": ["celltype"]}, DataError, "obs of .* has no column 'celltype'; did you mean 'cell_type'"),
        ({"filters": {"is_primary_data": "true"}}, DataError, "Cannot cast `true` to bool; check the filters"),
        ({"filters": "tissue =="}, DataError, "obs of .* cannot be read: Could not parse"),
        (
            {"filters": {"tissue": "lung", "cell_type": "neuron"}},
            DataError,
            r"no cell of .*of 600 cells, 'tissue' alone matches \d+, 'cell_type' alone matches 0; relax the filters",
        ),
        ({"filters": {"tissu": "lung"}}, DataError, "has no column 'tissu'; did you mean 'tissue'"),
        ({"gene_key": "symbol"}, DataError, "gene_key='symbol' is not in var of .*available: .*'feature_name'"),
        ({"layer": "counts"}, DataError, "layer='counts' is not in .*available: 'raw'"),
    ],
)
def test_mistakes_are_one_sentence(uri, vocab, options, error, message):
    with pytest.raises(error, match=message) as caught:
        open_cells(CensusQuery(uri=uri, **options))
    assert "\n" not in str(caught.value)
    with pytest.warns(ScforgeWarning, match="'livr', but no cell that matches"):
        open_cells(CensusQuery(uri=uri, filters={"tissue": ["lung", "livr"]}), vocab)


@pytest.mark.parametrize(
    ("change", "message"),
    [(0.5, "not whole numbers"), (-40, "negative values"), (None, "without counts .*row 7")],
)
def test_values_that_are_no_counts(adata, vocab, tmp_path, change, message):
    bad = adata.copy()
    if change is None:
        bad.X.data[bad.X.indptr[7] : bad.X.indptr[8]] = 0
    else:
        bad.X.data[-1] += change
    uri = write_census(tmp_path / "bad", bad)
    with pytest.raises(DataError, match=message):
        open_cells(CensusQuery(uri=uri), vocab)


def test_what_is_no_experiment(uri, tmp_path):
    with pytest.raises(MissingFileError, match=r"uri='.*nowhere' does not exist"):
        open_cells(CensusQuery(uri=tmp_path / "nowhere"))
    with pytest.raises(DataError, match="is a SOMA DataFrame"):
        open_cells(CensusQuery(uri=f"{uri}/census_data/homo_sapiens/obs"))
    config = {"vfs.s3.endpoint_override": "127.0.0.1:1", "vfs.s3.scheme": "http", "vfs.s3.region": "us-east-1"}
    with pytest.raises(DataError, match=r"uri='s3://bucket/soma' cannot be read: .*127\.0\.0\.1") as caught:
        open_cells(CensusQuery(uri="s3://bucket/soma", tiledb_config=config))
    assert "\n" not in str(caught.value)


@pytest.fixture
def directory(uri, monkeypatch):
    """The directory of releases, served here: the client looks it up at fixed places."""
    release = {
        "release_date": None,
        "release_build": "2025-01-30",
        "soma": {"uri": uri, "relative_uri": uri, "s3_region": None},
        "h5ads": {"uri": uri, "relative_uri": uri, "s3_region": None},
    }
    mirrors = {"default": "here", "here": {"provider": "file", "base_uri": "file://", "region": None}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = {"stable": "2025-01-30", "2025-01-30": release} if "release" in self.path else mirrors
            body = pd.io.json.ujson_dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            """Keep the output of the tests clean."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    import cellxgene_census._release_directory as places

    root = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(places, "CELL_CENSUS_RELEASE_DIRECTORY_URL", f"{root}/release.json")
    monkeypatch.setattr(places, "CELL_CENSUS_MIRRORS_DIRECTORY_URL", f"{root}/mirrors.json")
    yield root
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_census_is_opened_by_version(directory, adata, vocab, monkeypatch):
    import cellxgene_census._release_directory as places

    cells = open_cells(CensusQuery(filters={"is_primary_data": True}), vocab)
    assert len(cells) == adata.obs["is_primary_data"].sum()
    assert CensusQuery().streams()[0].name == "census:2025-01-30/homo_sapiens"
    with pytest.raises(OptionError, match=r"census_version='2025-01-31' is unknown; did you mean '2025-01-30'"):
        open_cells(CensusQuery(census_version="2025-01-31"))
    monkeypatch.setattr(places, "CELL_CENSUS_RELEASE_DIRECTORY_URL", "http://127.0.0.1:1/release.json")
    with pytest.raises(DataError, match=r"census_version='stable'\) cannot be read: .*; check the connection"):
        open_cells(CensusQuery())
