from functools import partial

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab, convert
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeError, ScforgeWarning
from scforge.estimators import Encoder, ScDiVa
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer

BERT, JOINT = "transformer_encoder", {"name": "joint_embedding"}


def fails(call, error: type[ScforgeError], *parts: str) -> None:
    """Check that `call` raises exactly `error`, with one line that holds `parts`."""
    with pytest.raises(ScforgeError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error
    assert "\n" not in message
    assert len(message) < 500
    for part in parts:
        assert part in message


SETUP = [
    ({"label_key": "group"}, OptionError, "'label_key' is unknown to 'setup_anndata'; did you mean 'labels_key'? (kno"),
    ({"categorical_covariate_keys": ["batch"]}, OptionError, "scforge does not support covariates, so use batch_key."),
    (
        {"size_factor_key": "group"},
        OptionError,
        "sum of the counts of a cell as its size factor, so omit size_factor_key.",
    ),
    ({"labels_key": "zzz"}, DataError, "labels_key='zzz' is not in adata.obs (available: 'group', 'batch"),
    ({"gene_key": "ensemble"}, DataError, "gene_key='ensemble' is not in adata.var; did you mean 'ensembl'?"),
    ({"layer": "count"}, DataError, "'count' is not in adata.layers; did you mean 'counts'? (available: 'count"),
]


@pytest.mark.parametrize("front", [Encoder, ScDiVa])
def test_arguments_of_a_set_up(tiny_adata: ad.AnnData, front) -> None:
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    for options, error, part in SETUP:
        fails(lambda options=options: front.setup_anndata(tiny_adata, **options), error, part)
    fails(lambda: front.setup_anndata("cells.h5ad"), OptionError, "'str'; read it with anndata.read_h5ad first.")
    fails(lambda: front.setup_anndata(pd.DataFrame()), OptionError, "adata is of type 'DataFrame'; pass an anndata.")
    fails(lambda: front.setup_anndata(tiny_adata[:10]), DataError, "adata is a view", "adata = adata.copy()")


COUNTS = [
    (lambda x: -x, "adata.X contains negative values (smallest: -"),
    (lambda x: x + np.where(np.arange(80) == 3, np.nan, 0), "adata.X contains 60 missing or infinite values"),
    (np.log1p, "adata.X contains values that are not whole numbers (first: "),
    (lambda x: x.astype(object), "adata.X has dtype object"),
    (lambda x: None, "adata.X is None"),
    (lambda x: x[:, :0], "adata is empty ("),
    (lambda x: x * ~np.isin(np.arange(60), [3, 5])[:, None], "adata.X has 2 cells without counts (first: '3', '5')"),
]


@pytest.mark.parametrize(("change", "part"), COUNTS, ids=[part for _, part in COUNTS])
def test_no_counts(tiny_adata: ad.AnnData, model: Encoder, change, part: str) -> None:
    values = change(tiny_adata.X.toarray())
    bad = ad.AnnData(values) if values is not None else ad.AnnData(obs=tiny_adata.obs, var=tiny_adata.var)
    fails(lambda: Encoder.setup_anndata(bad), DataError, part)
    if bad.n_vars:
        bad.var_names = tiny_adata.var_names
    fails(lambda: model.get_latent_representation(bad), DataError, part)


def test_where_counts_are_is_told(tiny_adata: ad.AnnData) -> None:
    counts, setup = tiny_adata.copy(), partial(Encoder.setup_anndata, tiny_adata)
    tiny_adata.X = tiny_adata.X * 0.5
    fails(setup, DataError, "undo the normalization")
    tiny_adata.raw = counts
    fails(setup, DataError, "pass adata.raw.to_adata(), because adata.raw contains raw counts")
    tiny_adata.layers["counts"] = counts.X
    fails(setup, DataError, "pass layer='counts', because adata.layers['counts'] contains raw counts")
    Encoder.setup_anndata(tiny_adata, layer="counts")


def test_not_set_up(tiny_adata: ad.AnnData) -> None:
    fails(Encoder, OptionError, "adata is of type 'NoneType'; pass an anndata.AnnData.")
    fails(lambda: Encoder("cells.h5ad"), OptionError, "'str'; read it with anndata.read_h5ad first.")
    fails(lambda: Encoder(tiny_adata), OptionError, "adata is not set up; call Encoder.setup_anndata(adata) first.")
    Encoder.setup_anndata(tiny_adata)
    for other in (tiny_adata.copy(), tiny_adata[:10]):
        hint = "adata is not set up, because it is a copy of an AnnData that was set up; call Encoder.setup_anndata"
        fails(lambda o=other: Encoder(o), OptionError, hint)
    ScDiVa.setup_anndata(other := tiny_adata.copy())
    fails(lambda: Encoder(other), OptionError, "adata is not set up; call Encoder.setup_anndata")


def test_setting_up_a_copy_leaves_the_first_as_it_was(tiny_adata: ad.AnnData, tmp_path) -> None:
    Encoder.setup_anndata(tiny_adata)
    tiny_adata.write_h5ad(tmp_path / "cells.h5ad")
    for other in (tiny_adata.copy(), ad.read_h5ad(tmp_path / "cells.h5ad")):
        Encoder.setup_anndata(other)
        assert Encoder(other).adata is other
        assert Encoder(tiny_adata).adata is tiny_adata
    ScDiVa.setup_anndata(tiny_adata.copy())
    ScDiVa.setup_anndata(tiny_adata)
    for front in (Encoder, ScDiVa):
        assert front(tiny_adata).adata is tiny_adata


@pytest.mark.filterwarnings("ignore:Setting element .* of view, initializing view as actual")
def test_a_view_may_be_embedded(model: Encoder, tiny_adata: ad.AnnData) -> None:
    whole = model.get_latent_representation(key_added=None)
    view = tiny_adata[5:9]
    np.testing.assert_allclose(model.get_latent_representation(view), whole[5:9], atol=1e-6)
    np.testing.assert_allclose(view.obsm["X_scforge"], whole[5:9], atol=1e-6)
    assert "X_scforge" not in tiny_adata.obsm


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix, sparse.csc_matrix])
def test_backed(tiny_adata: ad.AnnData, form, tmp_path) -> None:
    tiny_adata.X = form(tiny_adata.X.toarray())
    tiny_adata.copy().write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    embeddings = []
    for adata in (tiny_adata, backed):
        Encoder.setup_anndata(adata, batch_key="batch", labels_key="group")
        model = Encoder(adata, n_top_genes=30, hidden_dim=8)
        model.train(1, batch_size=16, progress_bar=False)
        embeddings.append(model.get_latent_representation())
        np.testing.assert_array_equal(adata.obsm["X_scforge"], embeddings[-1])
        tuned = model.finetune("annotation", max_epochs=1, batch_size=16, progress_bar=False)
        tuned.predict(key_added="predicted")
    np.testing.assert_array_equal(embeddings[0], embeddings[1])
    assert backed.obs["predicted"].tolist() == tiny_adata.obs["predicted"].tolist()
    np.testing.assert_array_equal(model.get_latent_representation(tiny_adata, key_added=None), embeddings[0])
    hint = "adata is a view of an AnnData backed by '", "load the AnnData with adata.to_memory()"
    fails(lambda: model.get_latent_representation(backed[:10]), DataError, *hint)
    assert backed.isbacked
    backed.file.close()


def test_what_is_hardly_counts_of_one_species() -> None:
    counts = np.random.default_rng(0).poisson(5.0, size=(60, 12)).astype(np.float32)
    names = ["CD3D", "LYZ", "MS4A1", "NKG7", "GNLY", "ENSG00000105374"]
    names += ["Cd3d", "Lyz2", "Ms4a1", "Nkg7", "ENSMUSG00000032094", "no gene"]
    adata = ad.AnnData(counts, var=pd.DataFrame(index=names))
    Encoder.setup_anndata(adata)
    with pytest.warns(ScforgeWarning, match="adata.var_names contains 6 human genes and 5 mouse .*'human_mouse'"):
        Encoder(adata, hidden_dim=4)
    wide = ad.AnnData((np.random.default_rng(0).random((60, 200)) < 0.3).astype(np.float32))
    with pytest.warns(ScforgeWarning, match="adata.X contains only 0 and 1"):
        Encoder.setup_anndata(wide)


OPTIONS = [
    (("transformer_encodr",), {}, OptionError, "architecture='transformer_encodr' is not known; did you mean 'transf"),
    ((None, "rank_vale"), {}, OptionError, "tokenizer='rank_vale' is not known; did you mean 'rank_value'?"),
    ((None, {"name": "rank_value", "maxlen": 3}), {}, OptionError, "'maxlen' is unknown to 'rank_value'; did you mean"),
    ((None, 3), {}, OptionError, "tokenizer=3 must be a name, or a dict"),
    ((None, {"max_len": 0}), {}, OptionError, "max_len=0 leaves no token for genes"),
    ((None, None, "joint"), {}, OptionError, "objective='joint' is not known (known: 'joint_embedding', 'masked_diff"),
    ((None, None, JOINT | {"view": 3}), {}, OptionError, "objective option 'view' is unknown to 'joint_embedding'; di"),
    ((None, None, JOINT | {"keep_max": "1"}), {}, OptionError, "keep_max='1' is not a number from 0 to 1."),
    ((BERT, None, {"mask_ratio": 1.5}), {}, OptionError, "mask_ratio=1.5 is not between 0 and 1"),
    ((BERT,), {"hidden_dim": 10, "num_heads": 4}, OptionError, "hidden_dim=10 is not divisible by num_heads=4"),
    ((BERT,), {"pooling": "max"}, OptionError, "pooling='max' is not known (known: 'cls', 'depths', 'genes',"),
    ((BERT, {"max_len": 50}), {"max_seq_len": 20}, OptionError, "max_seq_len=20 is smaller than the 50 tokens"),
    ((), {"latent_dim": 0}, OptionError, "latent_dim=0 is not a positive number"),
    ((), {"seed": 10**25}, OptionError, f"seed={10**25} is too large; pass a number below 2^63."),
    ((), {"vocab": ["gene1"]}, OptionError, "vocab is a list; pass a name, a file, or GeneVocab.from_genes(names)."),
    ((), {"vocab": "human_protein_coding", "n_top_genes": 0}, GeneMismatchError, "has only 0 of the 20120 genes"),
]


@pytest.mark.parametrize(("parts", "options", "error", "message"), OPTIONS, ids=[o[-1][:40] for o in OPTIONS])
def test_options_of_the_model(build, parts, options, error, message) -> None:
    fails(lambda: build(*parts, **options), error, message)


def test_a_tokenizer_in_place_of_its_options(build) -> None:
    vocab = GeneVocab.from_genes([f"gene{i}" for i in range(40)]).with_medians(np.ones(40))
    tokenizer = get_tokenizer("rank_value", vocab, max_len=30)
    wrong = "must be a name, or a dict with 'name' and options"
    fails(lambda: build("transformer_encoder", tokenizer), OptionError, wrong)
    parts = {"name": "rank_value", **tokenizer.config()}
    model = build("transformer_encoder", parts, vocab=tokenizer.vocab)
    assert model.vocab == vocab
    assert model.tokenizer.config() == tokenizer.config()


TRAINING = [
    ({"max_epochs": 0}, "max_epochs=0 must be at least 1."),
    (
        {"validation_size": 0.999},
        "validation_size=0.999 leaves none of the 60 cells for training; reduce validation_size.",
    ),
    ({"optimizer": "adm"}, "optimizer='adm' is not known; did you mean 'adam'?"),
    ({"checkpoint_dir": __file__}, "is a file; choose another path."),
    ({"accelerator": "gpuu"}, "invalid training option: You selected an invalid accelerator name"),
    ({"epochs": 3}, "training option 'epochs' is unknown to 'train'; did you mean 'max_epochs'?"),
    ({"enable_checkpointing": True}, "'enable_checkpointing' is unknown to 'train'; pass checkpoint_dir=FOLDER"),
    ({"seed": 1}, "'seed' is unknown to 'train'; set the seed of the model, Encoder(adata, seed=...)."),
    (
        {"plan_kwargs": {"lr": 0.1}, "lr": 0.2},
        "lr is set both in plan_kwargs and as an argument; remove one of the two.",
    ),
    ({"plan_kwargs": {"lrate": 0.1}}, "training option 'lrate' is unknown to 'train'"),
    ({"use_gpu": True}, "'use_gpu' is unknown to 'train'; pass accelerator='gpu' or accelerator='cpu'."),
    ({"learning_rate": 0.1}, "'learning_rate' is unknown to 'train'; pass lr."),
]


@pytest.mark.parametrize(("options", "message"), TRAINING, ids=[message[:40] for _, message in TRAINING])
def test_options_of_training(build, quick, options, message) -> None:
    model = build()
    fails(lambda: model.train(**(quick | options)), OptionError, message)
    assert not model.is_trained_


def test_options_of_an_embedding(model: Encoder) -> None:
    for options, error, message in (
        ({"batch_size": 0}, OptionError, "batch_size=0 is not"),
        ({"adata": "cells.h5ad"}, MissingFileError, "'cells.h5ad' does not exist"),
        ({"adata": pd.DataFrame()}, OptionError, "adata is of type 'DataFrame'"),
    ):
        fails(lambda options=options: model.get_latent_representation(**options), error, message)


def test_columns_of_another_byte_order_and_huge_counts(tiny_adata, tmp_path, quick) -> None:
    """Any column may be of another byte order; a count beyond the integers is read from a file as from memory."""
    adata = tiny_adata.copy()
    adata.obs["foreign"] = np.arange(adata.n_obs).astype(">f8")
    adata.obs["lane"] = np.arange(adata.n_obs).astype(">i4") % 2
    Encoder.setup_anndata(adata, batch_key="lane")
    model = Encoder(adata, hidden_dim=8)
    model.train(**quick)
    huge = tiny_adata.copy()
    huge.X = sparse.csr_matrix(huge.X).astype(np.float32)
    huge.X.data[0] = 1e30
    huge.write_h5ad(tmp_path / "huge.h5ad")
    np.testing.assert_allclose(
        model.get_latent_representation(tmp_path / "huge.h5ad"),
        model.get_latent_representation(huge, key_added=None),
        atol=1e-5,
    )


def test_lists_and_stores_get_advice(tiny_adata, tmp_path) -> None:
    adata = tiny_adata.copy()
    Encoder.setup_anndata(adata)
    model = Encoder(adata, hidden_dim=8)
    model.is_trained_ = True
    with raises(OptionError, "adata"):
        model.get_latent_representation(["a.h5ad", "b.h5ad"])
    convert(adata, tmp_path / "a.zarr", progress=False)
    with pytest.raises(DataError, match=r"a\.zarr' is a store already"):
        convert(tmp_path / "a.zarr", tmp_path / "b.zarr", progress=False)
