"""The tokenizer `gene_embedding` in the front class: vectors reach the model, and a saved model needs no table."""

from __future__ import annotations

import json
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.config import load_config
from scforge.data import GeneVocab
from scforge.errors import GeneMismatchError, MissingFileError, NotTrainedWarning, OptionError
from scforge.estimators import Encoder, train_from_config
from scforge.models import list_models
from scforge.models.components import GeneVectorEmbedding
from scforge.models.registry import option_names

D = 6
GENES = [f"gene{i}" for i in range(80)]
VECTORS = pd.DataFrame(np.random.default_rng(0).normal(3.0, 2.0, (80, D)), index=GENES, dtype=np.float32)
SMALL = {"gene_pooling": {"hidden_dim": 8}, "transformer_encoder": {"hidden_dim": 8, "num_layers": 1, "num_heads": 2}}
CASES = [
    ("gene_pooling", "joint_embedding", {}),
    ("gene_pooling", "masked_gene_prediction", {}),
    ("gene_pooling", "masked_gene_prediction", {"pooling": "mean"}),
    ("transformer_encoder", "masked_gene_prediction", {}),
    ("transformer_encoder", "joint_embedding", {"pooling": "cls"}),
]
every_case = pytest.mark.parametrize(("architecture", "objective", "options"), CASES)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A file with the vectors of three quarters of the genes."""
    kept = VECTORS[np.arange(80) % 4 != 0]
    np.savez(tmp_path / "esm.npz", genes=kept.index.to_numpy(dtype=str), vectors=kept.to_numpy())
    return tmp_path / "esm.npz"


def tokenizer(table: object, **options: object) -> dict:
    return {"name": "gene_embedding", "table": table, **options}


def part_of(model: Encoder) -> GeneVectorEmbedding:
    (part,) = (part for part in model.module.modules() if isinstance(part, GeneVectorEmbedding))
    return part


def state(model: Encoder) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in part_of(model).state_dict().items()}


def options_of(architecture: str, options: dict) -> dict:
    return SMALL[architecture] | options


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("freeze", [True, False])
def test_training(architecture, objective, options, freeze, trained, build, table) -> None:
    arguments = architecture, tokenizer(table, freeze=freeze), objective
    options = options_of(architecture, options)
    before, model = state(build(*arguments, **options)), trained(*arguments, **options, train={"lr": 0.05})
    changed = {name for name, value in state(model).items() if not torch.equal(value, before[name])}
    assert changed == {"projection.weight", "learned.weight"} | (set() if freeze else {"vectors.weight"})
    vectors = {"dim": D, "learned": 4 + 20, "frozen": freeze}
    assert model._spec.model_options["gene_vectors"] == vectors
    assert np.isfinite(model.get_latent_representation()).all()
    assert "gene_vectors={'dim': 6" in repr(model)


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("missing", ["learned", "drop"])
def test_a_saved_model_needs_no_table(
    architecture, objective, options, missing, trained, table, tiny_adata: ad.AnnData, tmp_path: Path
) -> None:
    model = trained(
        architecture, tokenizer(str(table), missing=missing), objective, **options_of(architecture, options)
    )
    before = model.get_latent_representation()
    model.save(tmp_path / "model")
    table.unlink()
    for again in (Encoder.load(tmp_path / "model", tiny_adata.copy()), Encoder.load(tmp_path / "model")):
        np.testing.assert_array_equal(again.get_latent_representation(tiny_adata, key_added=None), before)
        assert again.tokenizer.config() == model.tokenizer.config()
        assert again._spec == model._spec
        assert all(torch.equal(value, state(model)[name]) for name, value in state(again).items())
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["tokenizer"]["table"] is None
    assert str(table) not in json.dumps(saved)


def test_training_goes_on_after_loading(trained, quick, table, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    model = trained(None, tokenizer(table))
    model.save(tmp_path / "model")
    table.unlink()
    again = Encoder.load(tmp_path / "model", tiny_adata)
    again.train(**quick)
    assert again.n_epochs_ == 4
    assert torch.equal(state(again)["vectors.weight"], state(model)["vectors.weight"])
    assert not torch.equal(state(again)["projection.weight"], state(model)["projection.weight"])


@pytest.mark.filterwarnings("ignore::scforge.errors.NotTrainedWarning")
@pytest.mark.parametrize("architecture", ["gene_pooling", "transformer_encoder"])
def test_each_gene_has_its_own_vector(architecture, build, tiny_adata: ad.AnnData) -> None:
    def embedding(frame: pd.DataFrame) -> np.ndarray:
        model = build(architecture, tokenizer(frame), **SMALL[architecture])
        return model.get_latent_representation(key_added=None)

    first = embedding(VECTORS)
    np.testing.assert_array_equal(embedding(VECTORS.sample(frac=1, random_state=0)), first)
    assert np.abs(embedding(VECTORS.set_axis(np.roll(GENES, 1), axis=0)) - first).max() > 1e-3
    # A common part and the unit of the vectors do not matter.
    np.testing.assert_allclose(embedding(100 * VECTORS + 7), first, atol=1e-4)


def test_the_vectors_are_those_of_the_genes(build, table) -> None:
    model = build(None, tokenizer(table))
    part, given = part_of(model), VECTORS.to_numpy()
    for token, gene in enumerate(model.vocab.genes, start=4):
        number, row = int(gene[4:]), int(part.row[token])
        assert (row < part.n_learned) == (number % 4 == 0)
        if row >= part.n_learned:
            raw = part.vectors.weight[row - part.n_learned] / part.scale + part.center
            np.testing.assert_allclose(raw.detach(), given[number], atol=1e-5)


def test_from_a_configuration(tiny_adata: ad.AnnData, table, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_adata.write_h5ad("cells.h5ad")
    Path("recipe.yaml").write_text(
        "data: {paths: cells.h5ad}\n"
        "tokenizer: {strategy: gene_embedding, table: esm.npz, missing: drop, freeze: false}\n"
        "model: {hidden_dim: 8, ffn_dim: 8}\n"
        "training: {max_epochs: 1, batch_size: 16, accelerator: cpu}\n"
        "output: {checkpoint_dir: ck}\n"
    )
    model = train_from_config(load_config("recipe.yaml"), progress_bar=False)
    assert model.tokenizer.dropped == GENES[::4]
    assert part_of(model).vectors.weight.requires_grad
    table.unlink()
    embedding = Encoder.load("ck/final", tiny_adata).get_latent_representation()
    np.testing.assert_array_equal(embedding, model.get_latent_representation())
    with pytest.raises(MissingFileError, match=r"table='esm.npz' does not exist"):
        train_from_config(load_config("recipe.yaml"), progress_bar=False, overwrite=True)


def test_many_dropped_genes_do_not_flood_the_screen(build) -> None:
    model = build(None, tokenizer(VECTORS[:40], missing="drop"), n_top_genes=0)
    assert "dropped=[40 items]" in repr(model)
    assert "gene50" not in repr(model)


def test_vectors_with_an_attention_bias(trained, table, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    """As TranscriptFormer: the count of a gene draws attention to it."""
    options = SMALL["transformer_encoder"]
    embeddings = []
    for bias in (True, False):
        parts = tokenizer(table, transform="counts", clip=30.0, attention_bias=bias)
        model = trained("transformer_encoder", parts, adata=tiny_adata.copy(), **options)
        model.save(tmp_path / str(bias))
        embeddings.append(Encoder.load(tmp_path / str(bias)).get_latent_representation(tiny_adata, key_added=None))
        np.testing.assert_array_equal(embeddings[-1], model.get_latent_representation())
    assert np.abs(embeddings[0] - embeddings[1]).max() > 1e-3


def test_an_architecture_that_cannot_use_them(build, custom_architecture: str, table) -> None:
    message = "architecture='my_pooling' cannot use the gene vectors of the tokenizer 'gene_embedding'"
    with pytest.raises(OptionError, match=message):
        build(custom_architecture, tokenizer(table), hidden_dim=8)


def test_errors(build, quick, table) -> None:
    with pytest.raises(OptionError, match="table=None but the tokenizer 'gene_embedding' needs gene vectors"):
        build(None, "gene_embedding")
    with pytest.raises(MissingFileError, match="none.npz' does not exist"):
        build(None, tokenizer("none.npz"))
    with pytest.raises(GeneMismatchError, match="table has none of the 40 genes of the vocabulary"):
        build(None, tokenizer({"A": [1.0], "B": [2.0]}))
    for parts in ({"tokenizer": "rank_value"}, {"tokenizer": tokenizer(table)}):
        model = build(None, parts["tokenizer"], gene_vectors={"dim": D, "learned": 14})
        with pytest.raises(OptionError, match="gene_vectors is set but the model was given no vectors; leave it out"):
            model.train(**quick)


def test_every_architecture_of_the_package_can_use_them() -> None:
    assert {name for name in list_models() if "gene_vectors" in option_names(name)} >= set(SMALL)


@pytest.mark.parametrize("architecture", ["gene_pooling", "transformer_encoder"])
@pytest.mark.parametrize(
    "name",
    ["rank_value", "continuous_projection", {"name": "gene_embedding", "table": VECTORS}],
    ids=["rank_value", "continuous_projection", "gene_embedding"],
)
def test_special_tokens_are_added_to_the_vocabulary(architecture, name, trained, tiny_adata, tmp_path: Path) -> None:
    name = {"name": name} if isinstance(name, str) else name
    model = trained(architecture, {**name, "append_eos": True}, **SMALL[architecture])
    assert model.vocab.special_tokens == ("<pad>", "<unk>", "<mask>", "<cls>", "<eos>")
    batch = model.tokenizer(model.cells().block(np.arange(3)))
    ends = batch["input_ids"].gather(1, batch["attention_mask"].sum(dim=1, keepdim=True) - 1)
    assert (ends == model.vocab.eos_id).all()
    before = model.get_latent_representation()
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", tiny_adata)
    assert again.vocab == model.vocab
    np.testing.assert_array_equal(again.get_latent_representation(), before)


def test_no_token_is_added_that_is_not_needed(build, caplog) -> None:
    caplog.set_level("INFO", logger="scforge")
    assert build(None, "rank_value").vocab.special_tokens == ("<pad>", "<unk>", "<mask>", "<cls>")
    assert not caplog.text
    build(None, {"name": "rank_value", "append_eos": True})
    assert "adds the special tokens '<eos>' to the vocabulary" in caplog.text


def geneformer_vocab(version: str = "V1") -> GeneVocab:
    from scforge.tokenizers import RankValueTokenizer

    special = {"V1": ["<pad>", "<mask>"], "V2": ["<pad>", "<mask>", "<cls>", "<eos>"]}[version]
    tokens = {name: i for i, name in enumerate([*special, *GENES])}
    medians = dict(zip(GENES, np.random.default_rng(1).uniform(0.5, 20.0, 80).tolist(), strict=True))
    return RankValueTokenizer.from_geneformer((tokens, medians), version).vocab


@pytest.mark.slow
@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
@pytest.mark.parametrize("objective", ["joint_embedding", "masked_gene_prediction"])
def test_published_vocabularies_train(version, architecture, objective, trained, tiny_adata, tmp_path: Path) -> None:
    vocab = geneformer_vocab(version)
    model = trained(architecture, {"name": "rank_value", "append_cls": False}, objective, vocab=vocab, n_top_genes=None)
    assert model.vocab == vocab, "ids stay those that were published"
    ids = model.tokenizer(model.cells().block(np.arange(60)))["input_ids"]
    assert int(ids.max()) == len(vocab) - 1
    before = model.get_latent_representation()
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(Encoder.load(tmp_path / "model", tiny_adata).get_latent_representation(), before)


def test_a_vocabulary_without_cls(build) -> None:
    vocab = geneformer_vocab()
    bare = {"name": "rank_value", "append_cls": False}
    with pytest.raises(
        OptionError, match="pooling='cls' needs a CLS token; pass append_cls=True to the tokenizer, or p"
    ):
        build("transformer_encoder", bare, vocab=vocab, pooling="cls")
    model = build("transformer_encoder", "rank_value", vocab=vocab, pooling="cls")
    assert model.vocab.special_tokens == ("<pad>", "<mask>", "<cls>")
    assert model.vocab.genes == vocab.genes
    with pytest.warns(NotTrainedWarning):
        assert model.get_latent_representation().shape == (60, 8)
