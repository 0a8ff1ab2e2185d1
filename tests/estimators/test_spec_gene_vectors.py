from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import GeneMismatchError, MissingFileError, OptionError
from scforge.estimators import Encoder
from scforge.models.components import GeneVectorEmbedding
from scforge.testing import raises
from scforge.tokenizers import RankValueTokenizer

D = 6
GENES = [f"gene{i}" for i in range(80)]
VECTORS = pd.DataFrame(np.random.default_rng(0).normal(3.0, 2.0, (80, D)), index=GENES, dtype=np.float32)
SMALL = {"gene_pooling": {"hidden_dim": 8}, "transformer_encoder": {"hidden_dim": 8, "num_layers": 1, "num_heads": 2}}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    kept = VECTORS[np.arange(80) % 4 != 0]
    np.savez(tmp_path / "esm.npz", genes=kept.index.to_numpy(dtype=str), vectors=kept.to_numpy())
    return tmp_path / "esm.npz"


def tokenizer(table: object, **options: object) -> dict:
    return {"name": "gene_embedding", "table": table, **options}


def part_of(model: Encoder) -> GeneVectorEmbedding:
    (part,) = (part for part in model.module.modules() if isinstance(part, GeneVectorEmbedding))
    return part


def changed(one: Encoder, other: Encoder) -> set[str]:
    after = part_of(other).state_dict()
    return {name for name, value in part_of(one).state_dict().items() if not value.equal(after[name])}


@pytest.mark.parametrize(
    ("architecture", "objective", "pooling", "freeze", "missing"),
    [
        ("gene_pooling", "masked_gene_prediction", "mean", True, "learned"),
        ("transformer_encoder", "joint_embedding", "cls", False, "drop"),
    ],
)
def test_trained_and_saved_without_the_table(
    architecture, objective, pooling, freeze, missing, trained, build, quick, table, tiny_adata, tmp_path: Path
) -> None:
    arguments = architecture, tokenizer(str(table), freeze=freeze, missing=missing), objective
    options = SMALL[architecture] | {"pooling": pooling}
    before, model = build(*arguments, **options), trained(*arguments, **options, train={"lr": 0.05})
    assert changed(before, model) == {"projection.weight", "learned.weight"} | (set() if freeze else {"vectors.weight"})
    assert model.spec.model_options["gene_vectors"] == {"dim": D, "learned": 4 + 20, "frozen": freeze}
    embedding = model.get_latent_representation()
    model.save(tmp_path / "model")
    table.unlink()
    again = Encoder.load(tmp_path / "model", tiny_adata)
    np.testing.assert_array_equal(again.get_latent_representation(), embedding)
    assert again.tokenizer.config() == model.tokenizer.config()
    assert again.spec == model.spec
    assert str(table) not in (tmp_path / "model" / "config.json").read_text()
    again.train(**quick)
    assert again.n_epochs_ == 4


@pytest.mark.filterwarnings("ignore::scforge.errors.NotTrainedWarning")
@pytest.mark.parametrize("architecture", ["gene_pooling", "transformer_encoder"])
def test_each_gene_has_its_own_vector(architecture, build, tiny_adata: ad.AnnData) -> None:
    def embedding(frame: pd.DataFrame) -> np.ndarray:
        model = build(architecture, tokenizer(frame), **SMALL[architecture])
        return model.get_latent_representation(key_added=None)

    first = embedding(VECTORS)
    np.testing.assert_array_equal(embedding(VECTORS.sample(frac=1, random_state=0)), first)
    assert np.abs(embedding(VECTORS.set_axis(np.roll(GENES, 1), axis=0)) - first).max() > 1e-3
    np.testing.assert_allclose(embedding(100 * VECTORS + 7), first, atol=1e-4)


def test_mistakes(build, quick, custom_architecture: str, table) -> None:
    for error, message, parts in (
        (OptionError, "table=None, but the tokenizer 'gene_embedding' requires gene vectors", (None, "gene_embedding")),
        (MissingFileError, "none.npz' does not exist", (None, tokenizer("none.npz"))),
        (GeneMismatchError, "table contains none of the 40 genes", (None, tokenizer({"A": [1.0], "B": [2.0]}))),
        (
            OptionError,
            "architecture='my_pooling' does not accept the gene vectors",
            (custom_architecture, tokenizer(table)),
        ),
    ):
        with pytest.raises(error, match=message):
            build(*parts, hidden_dim=8)
    for name in ("rank_value", tokenizer(table)):
        model = build(None, name, gene_vectors={"dim": D, "learned": 14})
        for call in (lambda model=model: model.train(**quick), model.get_latent_representation):
            with raises(OptionError, "gene_vectors"):
                call()
    model = build(None, tokenizer(VECTORS[:40], missing="drop"), n_top_genes=0)
    assert "dropped=[40 items]" in repr(model)
    assert "gene50" not in repr(model)


@pytest.mark.parametrize("architecture", ["gene_pooling", "transformer_encoder"])
@pytest.mark.parametrize("name", ["rank_value", "gene_embedding"])
def test_special_tokens_are_added_to_the_vocabulary(architecture, name, build, trained, tiny_adata, tmp_path) -> None:
    parts = {"name": name} | ({"table": VECTORS} if name == "gene_embedding" else {})
    usual = build(architecture, parts, **SMALL[architecture]).vocab.special_tokens
    assert usual == ("<pad>", "<unk>", "<mask>", "<cls>")
    model = trained(architecture, {**parts, "append_eos": True}, **SMALL[architecture])
    assert model.vocab.special_tokens == (*usual, "<eos>")
    batch = model.tokenizer(model.open_cells().block(np.arange(3)))
    ends = batch["input_ids"].gather(1, batch["attention_mask"].sum(dim=1, keepdim=True) - 1)
    assert (ends == model.vocab.eos_id).all()
    before = model.get_latent_representation()
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", tiny_adata)
    assert again.vocab == model.vocab
    np.testing.assert_array_equal(again.get_latent_representation(), before)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
@pytest.mark.parametrize("objective", ["joint_embedding", "masked_gene_prediction"])
def test_published_vocabularies_train(version, architecture, objective, trained, build, tiny_adata, tmp_path) -> None:
    special = {"V1": ["<pad>", "<mask>"], "V2": ["<pad>", "<mask>", "<cls>", "<eos>"]}[version]
    tokens = {name: i for i, name in enumerate([*special, *GENES])}
    medians = dict(zip(GENES, np.random.default_rng(1).uniform(0.5, 20.0, 80).tolist(), strict=True))
    vocab, bare = RankValueTokenizer.from_geneformer((tokens, medians), version).vocab, {"append_cls": False}
    model = trained(architecture, bare | {"name": "rank_value"}, objective, vocab=vocab, n_top_genes=None)
    assert model.vocab == vocab, "ids stay those that were published"
    ids = model.tokenizer(model.open_cells().block(np.arange(60)))["input_ids"]
    assert int(ids.max()) == len(vocab) - 1
    before = model.get_latent_representation()
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(Encoder.load(tmp_path / "model", tiny_adata).get_latent_representation(), before)
    if version == "V1":
        with pytest.raises(OptionError, match="pooling='cls' needs a CLS token; set append_cls=True"):
            build("transformer_encoder", bare | {"name": "rank_value"}, vocab=vocab, pooling="cls")
        with_cls = build("transformer_encoder", "rank_value", vocab=vocab, pooling="cls").vocab
        assert (with_cls.special_tokens, with_cls.genes) == (("<pad>", "<mask>", "<cls>"), vocab.genes)
