"""Mistakes of a newcomer: each is one sentence of scforge's own, with the argument, its value and the fix."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab
from scforge.errors import (
    ConfigError,
    DataError,
    GeneMismatchError,
    MissingFileError,
    NotTrainedWarning,
    OptionError,
    ScforgeError,
    ScforgeWarning,
)
from scforge.estimators import Encoder, ScDiVa
from scforge.tokenizers import get_tokenizer


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


def changed(adata: ad.AnnData, **parts: object) -> ad.AnnData:
    for name, value in parts.items():
        setattr(adata, name, value)
    return adata


SETUP = [
    ("label_key", "is unknown to 'setup_anndata'; did you mean 'labels_key'? (known: 'layer', 'gene_key', "),
    ("batchkey", "did you mean 'batch_key'?"),
    ("categorical_covariate_keys", "'setup_anndata'; scforge has no covariates, use batch_key."),
    ("continuous_covariate_keys", "'setup_anndata'; scforge has no covariates, use batch_key."),
    ("size_factor_key", "'setup_anndata'; the size of a cell is the sum of its counts, leave it out."),
]


@pytest.mark.parametrize("front", [Encoder, ScDiVa])
@pytest.mark.parametrize(("name", "part"), SETUP, ids=[name for name, _ in SETUP])
def test_arguments_of_a_set_up(tiny_adata: ad.AnnData, front, name: str, part: str) -> None:
    fails(lambda: front.setup_anndata(tiny_adata, **{name: "group"}), OptionError, f"argument {name!r}", part)


COUNTS = [
    ("negative", lambda x: -x, "holds negative values (smallest: -"),
    ("missing", lambda x: x + np.where(np.arange(80) == 3, np.nan, 0), "holds 60 missing or infinite values"),
    ("infinite", lambda x: x + np.where(np.arange(80) == 3, np.inf, 0), "holds 60 missing or infinite values"),
    ("fractions", lambda x: x / 2, "holds values that are not whole numbers (first: "),
    ("log", np.log1p, "holds values that are not whole numbers"),
    ("text", lambda x: x.astype(object), "has the dtype object"),
]


@pytest.mark.parametrize(("name", "change", "part"), COUNTS, ids=[name for name, *_ in COUNTS])
def test_no_counts(tiny_adata: ad.AnnData, name: str, change, part: str) -> None:
    values = change(tiny_adata.X.toarray())
    bad = changed(tiny_adata, X=values)
    fails(lambda: Encoder.setup_anndata(bad), DataError, "adata.X", part, "raw counts are needed")


def test_the_layer_that_holds_counts_is_named(tiny_adata: ad.AnnData) -> None:
    counts = tiny_adata.X.copy()
    tiny_adata.X = tiny_adata.X * 0.5
    tiny_adata.layers["scaled"] = tiny_adata.X.copy()
    fails(lambda: Encoder.setup_anndata(tiny_adata), DataError, "undo the normalisation")
    tiny_adata.layers["counts"] = counts
    fails(lambda: Encoder.setup_anndata(tiny_adata), DataError, "layer='counts' holds counts")
    fails(lambda: Encoder.setup_anndata(tiny_adata, layer="scaled"), DataError, "layer='counts' holds counts")
    fails(
        lambda: Encoder.setup_anndata(tiny_adata, layer="count"),
        DataError,
        "layer='count' is not in adata.layers; did you mean 'counts'? (adata.layers has: 'scaled', 'counts'; ",
    )
    Encoder.setup_anndata(tiny_adata, layer="counts")


def test_counts_in_raw_are_pointed_at(tiny_adata: ad.AnnData) -> None:
    tiny_adata.raw = tiny_adata.copy()
    tiny_adata.X = tiny_adata.X * 0.5
    fails(lambda: Encoder.setup_anndata(tiny_adata), DataError, "adata.raw holds counts, pass adata.raw.to_adata()")


@pytest.mark.parametrize("cut", [np.s_[:0, :], np.s_[:, :0]], ids=["no cells", "no genes"])
def test_empty(tiny_adata: ad.AnnData, model: Encoder, cut) -> None:
    empty = tiny_adata[cut].copy()
    fails(lambda: Encoder.setup_anndata(empty), DataError, "adata is empty (", "it needs cells and genes")
    fails(lambda: model.get_latent_representation(empty), DataError, "adata is empty (")


def test_no_matrix(tiny_adata: ad.AnnData) -> None:
    bare = ad.AnnData(obs=tiny_adata.obs, var=tiny_adata.var)
    fails(lambda: Encoder.setup_anndata(bare), DataError, "adata.X is None")


def test_a_cell_without_counts(tiny_adata: ad.AnnData, model: Encoder) -> None:
    counts = tiny_adata.X.toarray()
    counts[[3, 5]] = 0
    bad = changed(tiny_adata.copy(), X=sparse.csr_matrix(counts))
    parts = "adata.X has 2 cells without any count (first: 'cell3', 'cell5')", "sc.pp.filter_cells"
    fails(lambda: Encoder.setup_anndata(bad), DataError, *parts)
    fails(lambda: model.get_latent_representation(bad), DataError, *parts)


@pytest.mark.filterwarnings("ignore:(Variable|Observation) names are not unique")
def test_duplicate_gene_names(tiny_adata: ad.AnnData, model: Encoder) -> None:
    expected = model.get_latent_representation(key_added=None)
    counts = tiny_adata.X.toarray()
    more = ad.AnnData(sparse.csr_matrix(np.hstack([counts[:, :2] // 2, counts])), obs=tiny_adata.obs)
    more.X = more.X - sparse.csr_matrix(np.hstack([0 * counts[:, :2], counts[:, :2] // 2, 0 * counts[:, 2:]]))
    more.var_names = ["gene0", "gene1", *tiny_adata.var_names]
    told = "counts of 2 columns .first: 'gene0'. are summed"
    with pytest.warns(ScforgeWarning, match=told):
        np.testing.assert_allclose(model.get_latent_representation(more, key_added=None), expected, atol=1e-6)
    Encoder.setup_anndata(more)
    with pytest.warns(ScforgeWarning, match=told):
        assert set(Encoder(more, n_top_genes=40).vocab.genes) == set(model.vocab.genes)


def test_columns_that_are_not_there(tiny_adata: ad.AnnData) -> None:
    known = "(adata.obs has: 'group', 'batch')"
    for argument, value, near in [("batch_key", "Batch", "batch"), ("labels_key", "groups", "group")]:
        hint = f"{argument}={value!r} is not a column of adata.obs; did you mean {near!r}? {known}"
        fails(lambda a=argument, v=value: Encoder.setup_anndata(tiny_adata, **{a: v}), DataError, hint)
    fails(lambda: Encoder.setup_anndata(tiny_adata, labels_key="zzz"), DataError, f"adata.obs {known}")
    hint = "gene_key='ensemble' is not a column of adata.var; did you mean 'ensembl'?"
    fails(lambda: Encoder.setup_anndata(tiny_adata, gene_key="ensemble"), DataError, hint)


def test_not_an_anndata(model: Encoder, tmp_path) -> None:
    hint = "adata is of type 'str'; read it with anndata.read_h5ad first."
    for call in (Encoder.setup_anndata, Encoder):
        fails(lambda c=call: c("cells.h5ad"), OptionError, hint)
    # Paths are opened, wherever they lead.
    fails(lambda: model.get_latent_representation("cells.h5ad"), MissingFileError, "'cells.h5ad' does not exist")
    fails(lambda: model.get_latent_representation(pd.DataFrame()), OptionError, "adata is of type 'DataFrame'")
    fails(lambda: Encoder.setup_anndata(pd.DataFrame()), OptionError, "adata is of type 'DataFrame'; pass an anndata.")
    fails(Encoder, OptionError, "adata=None; pass an AnnData that Encoder.setup_anndata(adata) was called on.")


def test_not_set_up(tiny_adata: ad.AnnData) -> None:
    fails(lambda: Encoder(tiny_adata), OptionError, "adata is not set up; call Encoder.setup_anndata(adata) first.")
    Encoder.setup_anndata(tiny_adata)
    for other in (tiny_adata.copy(), tiny_adata[:10]):
        hint = "adata is not set up, because it is a copy of the one that was set up; call Encoder.setup_anndata"
        fails(lambda o=other: Encoder(o), OptionError, hint)


def test_a_copy_that_is_set_up_leaves_the_other_as_it_was(tiny_adata: ad.AnnData, tmp_path) -> None:
    Encoder.setup_anndata(tiny_adata)
    tiny_adata.write_h5ad(tmp_path / "cells.h5ad")
    for other in (tiny_adata.copy(), ad.read_h5ad(tmp_path / "cells.h5ad")):
        Encoder.setup_anndata(other)
        assert Encoder(other).adata is other
        assert Encoder(tiny_adata).adata is tiny_adata


def test_a_copy_that_another_class_sets_up_leaves_the_first_as_it_was(tiny_adata: ad.AnnData) -> None:
    Encoder.setup_anndata(tiny_adata)
    ScDiVa.setup_anndata(tiny_adata.copy())
    ScDiVa.setup_anndata(tiny_adata)
    assert Encoder(tiny_adata).adata is tiny_adata
    assert ScDiVa(tiny_adata).adata is tiny_adata


def test_a_view(tiny_adata: ad.AnnData) -> None:
    fails(lambda: Encoder.setup_anndata(tiny_adata[:10]), DataError, "adata is a view", "adata = adata.copy()")


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
    hint = "adata is a part of an AnnData backed by '", "read it with adata = adata.to_memory()"
    fails(lambda: model.get_latent_representation(backed[:10]), DataError, *hint)
    assert backed.isbacked
    backed.file.close()


def test_what_is_hardly_counts_of_one_species() -> None:
    human = ["CD3D", "LYZ", "MS4A1", "NKG7", "GNLY", "ENSG00000105374"]
    counts = np.random.default_rng(0).poisson(5.0, size=(60, 12)).astype(np.float32)
    names = [*human, "Cd3d", "Lyz2", "Ms4a1", "Nkg7", "ENSMUSG00000032094", "no gene"]
    adata = ad.AnnData(counts, var=pd.DataFrame(index=names))
    Encoder.setup_anndata(adata)
    with pytest.warns(ScforgeWarning, match="adata.var_names holds 6 human genes and 5 mouse genes, .*'human_mouse'"):
        Encoder(adata, hidden_dim=4)
    wide = ad.AnnData((np.random.default_rng(0).random((60, 200)) < 0.3).astype(np.float32))
    with pytest.warns(ScforgeWarning, match="adata.X holds only 0 and 1"):
        Encoder.setup_anndata(wide)


TR = ("transformer_encoder",)
OPTIONS = [
    (("transformer_encodr",), {}, OptionError, "architecture='transformer_encodr' is not known; did you mean 'transf"),
    (
        ("bert",),
        {},
        OptionError,
        "architecture='bert' is not known (known: 'autoregressive_transformer', 'gene_po",
    ),
    ((None, "rank_vale"), {}, OptionError, "tokenizer='rank_vale' is not known; did you mean 'rank_value'?"),
    ((None, {"name": "rank_value", "maxlen": 3}), {}, OptionError, "'maxlen' is unknown to 'rank_value'; did you mean"),
    ((None, 3), {}, OptionError, "tokenizer=3 is neither a name nor a dict"),
    ((None, None, "joint"), {}, OptionError, "objective='joint' is not known (known: 'joint_embedding', 'masked_diff"),
    (
        (None, None, {"view": 3}),
        {},
        OptionError,
        "objective option 'view' is unknown to 'joint_embedding'; did you mea",
    ),
    ((None, None, {"views": 1}), {}, OptionError, "views=1 is not at least 2; give a number of views of a cell."),
    ((None, None, {"views": "4"}), {}, OptionError, "views='4' is not a whole number of views"),
    ((None, None, {"views": 2.5}), {}, OptionError, "views=2.5 is not a whole number of views"),
    ((None, None, {"views": True}), {}, OptionError, "views=True is not a whole number of views"),
    ((None, None, {"keep_min": None}), {}, OptionError, "keep_min=None is not a number from 0 to 1."),
    ((None, None, {"keep_min": 0}), {}, OptionError, "keep_min=0 and keep_max=1.0 must satisfy 0 < keep_min"),
    ((None, None, {"keep_max": "1"}), {}, OptionError, "keep_max='1' is not a number from 0 to 1."),
    ((None, None, {"gene_dropout": None}), {}, OptionError, "gene_dropout=None is not a number from 0 to 1."),
    ((None, None, {"gene_dropout": float("nan")}), {}, OptionError, "gene_dropout=nan is not a number from 0 to 1."),
    ((None, None, {"gene_dropout": 1}), {}, OptionError, "gene_dropout=1 is not in [0, 1)."),
    ((None, None, {"weight": "x"}), {}, OptionError, "weight='x' is not a number from 0 to 1."),
    ((None, None, {"weight": 0}), {}, OptionError, "weight=0 is not between 0 and 1."),
    ((None, None, {"slices": 0}), {}, OptionError, "slices=0 is not a positive number"),
    ((*TR, None, {"mask_ratio": 1.5}), {}, OptionError, "mask_ratio=1.5 is not between 0 and 1"),
    ((None, {"max_len": 0}), {}, OptionError, "max_len=0 leaves no room for a gene"),
    ((None, {"max_len": "8"}), {}, OptionError, "max_len='8' is not a whole number"),
    (
        TR,
        {"hiden_dim": 8},
        OptionError,
        "option 'hiden_dim' is unknown to 'transformer_encoder'; did you mean 'hidden_",
    ),
    (TR, {"hidden_dim": 10, "num_heads": 4}, OptionError, "hidden_dim=10 is not divisible by num_heads=4"),
    (TR, {"hidden_dim": -8}, ConfigError, "hidden_dim=-8 is out of range; it must be at least 1"),
    (TR, {"hidden_dim": "big"}, ConfigError, "hidden_dim='big' is not an integer"),
    (TR, {"num_heads": 0}, ConfigError, "num_heads=0 is out of range"),
    (TR, {"dropout": 2.0}, ConfigError, "dropout=2.0 is out of range; it must be less than 1"),
    (TR, {"pooling": "max"}, OptionError, "pooling='max' is not known (known: 'cls', 'depths', 'genes',"),
    ((*TR, {"max_len": 50}), {"max_seq_len": 20}, OptionError, "max_seq_len=20 is smaller than the 50 tokens"),
    ((), {"latent_dim": 0}, OptionError, "latent_dim=0 is not a positive number"),
    ((), {"n_top_genes": -5}, OptionError, "n_top_genes=-5 is not a positive number of genes"),
    ((), {"n_top_genes": 10.5}, OptionError, "n_top_genes=10.5 is not a whole number"),
    ((), {"seed": -1}, OptionError, "seed=-1 is not at least 0"),
    ((), {"seed": 10**25}, OptionError, f"seed={10**25} is too large; give a number below 2^63."),
    ((), {"seed": None}, OptionError, "seed=None is not a whole number"),
    ((), {"vocab": "human"}, OptionError, "vocab='human' is neither a shipped vocabulary nor a file"),
    ((), {"vocab": ["gene1"]}, OptionError, "vocab is a list; pass a name, a file, or GeneVocab.from_genes(names)."),
    ((), {"vocab": GeneVocab.from_genes(["X"]), "n_top_genes": 0}, GeneMismatchError, "only 0 of the 1 genes"),
    ((), {"vocab": "human_protein_coding", "n_top_genes": 0}, GeneMismatchError, "has only 0 of the 20120 genes"),
]


@pytest.mark.parametrize(("parts", "options", "error", "message"), OPTIONS, ids=[o[-1][:40] for o in OPTIONS])
def test_options_of_the_model(build, parts, options, error, message) -> None:
    if len(parts) > 2 and parts[0] is None and isinstance(parts[2], dict):
        parts = (*parts[:2], {"name": "joint_embedding", **parts[2]})
    if "objective" in options and isinstance(options["objective"], dict):
        options = {**options, "objective": {"name": "joint_embedding", **options["objective"]}}
    fails(lambda: build(*parts, **options), error, message)


def test_a_tokenizer_in_place_of_its_options(build) -> None:
    vocab = GeneVocab.from_genes([f"gene{i}" for i in range(40)]).with_medians(np.ones(40))
    tokenizer = get_tokenizer("rank_value", vocab, max_len=30)
    line = 'Encoder(adata, vocab=tokenizer.vocab, tokenizer={"name": "rank_value", **tokenizer.config()}).'
    parts = "tokenizer is a RankValueTokenizer, but a model makes its own from a name and options; call " + line
    fails(lambda: build("transformer_encoder", tokenizer), OptionError, parts)
    parts = {"name": "rank_value", **tokenizer.config()}
    model = build("transformer_encoder", parts, vocab=tokenizer.vocab)
    assert model.vocab == vocab
    assert model.tokenizer.config() == tokenizer.config()


@pytest.mark.filterwarnings("error")
def test_a_model_that_waits_for_gene_vectors(build, quick, tmp_path) -> None:
    vectors = {f"gene{i}": [float(i), 1.0, i % 3] for i in range(80)}
    hint = "gene_vectors is set but the model was given no vectors; leave it out and pass them with tokenizer="
    waiting = build("transformer_encoder", gene_vectors={"dim": 3, "learned": 5})
    fails(waiting.get_latent_representation, OptionError, hint)
    fails(lambda: waiting.train(**quick), OptionError, hint)
    filled = build("transformer_encoder", {"name": "gene_embedding", "table": vectors})
    with pytest.warns(NotTrainedWarning):
        expected = filled.get_latent_representation(key_added=None)
    filled.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    with pytest.warns(NotTrainedWarning):
        np.testing.assert_array_equal(loaded.get_latent_representation(filled.adata, key_added=None), expected)


def test_the_largest_seed(trained) -> None:
    for architecture in (None, "transformer_encoder"):
        assert trained(architecture, seed=2**63 - 1).is_trained_


def test_too_few_cells_for_any_gene(build, tiny_adata: ad.AnnData) -> None:
    hint = "no gene is detected in 3 cells, of 1; use more cells, or name the genes, e.g. vocab="
    fails(lambda: build(adata=tiny_adata[:1].copy()), DataError, hint, "vocab=GeneVocab.from_adata(adata)")


TRAINING = [
    ({"max_epochs": 0}, "max_epochs=0 is not a positive number of epochs."),
    ({"max_epochs": 1.5}, "max_epochs=1.5 is not a whole number of epochs."),
    ({"max_epochs": True}, "max_epochs=True is not a whole number of epochs."),
    ({"max_steps": 0}, "max_steps=0 is not a positive number of steps."),
    ({"batch_size": 0}, "batch_size=0 is not a positive number of cells."),
    ({"batch_size": "8"}, "batch_size='8' is neither a number of cells nor 'auto'."),
    ({"validation_size": 1.5}, "validation_size=1.5 is not in [0, 1)."),
    ({"validation_size": float("nan")}, "validation_size=nan is not in [0, 1)."),
    ({"validation_size": 0.999}, "validation_size=0.999 leaves no cell of 60 for training; lower it."),
    ({"lr": -1}, "lr=-1 is not a positive number."),
    ({"lr": 0}, "lr=0 is not a positive number."),
    ({"lr": float("nan")}, "lr=nan is not a positive number."),
    ({"lr": float("inf")}, "lr=inf is not a positive number."),
    ({"lr": "1e-3"}, "lr='1e-3' is not a positive number."),
    ({"weight_decay": -1}, "weight_decay=-1 is not zero or a positive number."),
    ({"warmup_steps": -1}, "warmup_steps=-1 is not at least 0"),
    ({"schedule": "cosin"}, "schedule='cosin' is not known; did you mean 'cosine'?"),
    ({"optimizer": "adm"}, "optimizer='adm' is not known; did you mean 'adam'?"),
    ({"early_stopping_patience": 0}, "early_stopping_patience=0 is not a positive number of epochs."),
    ({"num_threads": -1}, "num_threads=-1 is not at least 0"),
    ({"save_top_k": -2}, "save_top_k=-2 is not at least -1"),
    ({"accelerator": "gpuu"}, "an option of training cannot be used: You selected an invalid accelerator name"),
    ({"precision": "bf17"}, "an option of training cannot be used: Precision 'bf17' is invalid"),
    ({"epochs": 3}, "training option 'epochs' is unknown to 'train'; did you mean 'max_epochs'?"),
    ({"enable_checkpointing": True}, "'enable_checkpointing' is unknown to 'train'; pass checkpoint_dir=FOLDER"),
    ({"plan_kwargs": {}}, "'plan_kwargs' is unknown to 'train'; pass its options, e.g. lr=1e-3, to train itself."),
    ({"learning_rate": 1e-3}, "'learning_rate' is unknown to 'train'; pass lr"),
    ({"use_gpu": True}, "'use_gpu' is unknown to 'train'; pass accelerator='gpu' or accelerator='cpu'."),
    ({"seed": 1}, "'seed' is unknown to 'train'; it is that of the model, Encoder(adata, seed=...)."),
    ({"shuffle": True}, "'shuffle' is unknown to 'train'; cells come in a new order in each epoch"),
    ({"datasplitter_kwargs": {}}, "'datasplitter_kwargs' is unknown to 'train'; pass validation_size"),
    ({"gradient_clip_val": -1}, "gradient_clip_val=-1 is not zero or a positive number; 0 does not clip."),
    ({"early_stopping": "validation_loss"}, "early_stopping='validation_loss' is neither True nor False."),
]


@pytest.mark.parametrize(("options", "message"), TRAINING, ids=[message[:40] for _, message in TRAINING])
def test_options_of_training(build, quick, options, message) -> None:
    model = build()
    fails(lambda: model.train(**(quick | options)), OptionError, message)
    assert not model.is_trained_


def test_a_checkpoint_folder_that_is_a_file(build, quick, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    hint = "is a file; give the name of a folder."
    fails(lambda: build().train(**quick, checkpoint_dir=tmp_path / "file"), OptionError, "checkpoint_dir='", hint)


@pytest.mark.parametrize("batch_size", [0, -3, 1.5])
def test_batch_size_of_an_embedding(model: Encoder, batch_size) -> None:
    fails(
        lambda: model.get_latent_representation(batch_size=batch_size), OptionError, f"batch_size={batch_size} is not"
    )


@pytest.mark.parametrize("key", ["", 3])
def test_key_added_that_is_no_name(model: Encoder, key) -> None:
    fails(lambda: model.get_latent_representation(key_added=key), OptionError, f"key_added={key!r} is not a name")
