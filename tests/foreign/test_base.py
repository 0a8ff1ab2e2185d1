from pathlib import Path

import anndata as ad
import pytest
import torch

from scforge.data import GeneVocab
from scforge.errors import MissingFileError, ModelFileError, OptionError
from scforge.estimators import Encoder
from scforge.foreign import Foreign, LeftOut, NameMap, Rule, register_family, stacked
from scforge.foreign.base import (
    AS_IS,
    FAMILIES,
    TRANSPOSED,
    folded_row,
    read_checkpoint,
    read_weights,
    rows_in_order,
)
from scforge.models import TransformerEncoder
from scforge.testing import raises


def test_parts_there_and_back() -> None:
    for transform, n_parts in ((TRANSPOSED, 1), (stacked(3), 3), (AS_IS, 1)):
        parts = [torch.randn(3, 4) for _ in range(n_parts)]
        assert all(map(torch.equal, transform.split(transform.join(parts)), parts))
    table = torch.arange(6.0).reshape(3, 2)
    ours = rows_in_order((2, -1, 0, 1)).join([table])
    assert ours.tolist() == [[4, 5], [0, 0], [0, 1], [2, 3]]
    assert torch.equal(rows_in_order((2, -1, 0, 1)).split(ours)[0], table)
    with pytest.raises(ValueError, match="the vocabulary has 2 tokens, but the embedding table has 3 rows"):
        rows_in_order((1, 0)).join([table])
    folded = folded_row(2).join([table, torch.tensor([[10.0, 20.0], [7.0, 7.0]])])
    assert folded.tolist() == [[10, 21], [12, 23], [14, 25]]
    assert folded_row(2).split(folded)[1].tolist() == [[0, 0], [0, 0]]


NAMES = NameMap(
    "Tiny",
    (Rule("layer.{i}.{p}", "layers.{i}.{p}"), Rule(("a", "b"), "ab", stacked(2))),
    (LeftOut("old.*", "an optimizer's"),),
)


def test_layers_of_two_digits_and_left_out() -> None:
    theirs = {f"layer.{i}.bias": torch.full((1,), float(i)) for i in (0, 12)}
    theirs |= {"a": torch.zeros(1), "b": torch.ones(1), "old.step": torch.tensor(3)}
    shapes = {f"layers.{i}.bias": torch.Size([1]) for i in (0, 12)} | {"ab": torch.Size([2])}
    ours = NAMES.convert(theirs, shapes, where="x")
    found = {name: weight.tolist() for name, weight in ours.items()}
    assert found == {"layers.0.bias": [0.0], "layers.12.bias": [12.0], "ab": [0.0, 1.0]}
    assert set(NAMES.invert(ours)) == set(theirs) - {"old.step"}
    with pytest.raises(ModelFileError):
        NAMES.invert({"head": torch.ones(1)})


QKV = NameMap("Tiny", (Rule(("q", "k", "v"), "qkv", stacked(3)),))
FOLDED = NameMap("Tiny", (Rule(("positions", "types"), "p", folded_row(2)),))


@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        (QKV, {"q": (3, 4), "k": (4, 3), "v": (4, 3)}),
        (QKV, {"q": (2, 4), "k": (6, 4), "v": (4, 4)}),  # twelve rows, too
        *((FOLDED, {"positions": (5, 4), "types": types}) for types in [(2, 7), (), (0, 4)]),
    ],
)
def test_shapes_that_do_not_go_together(names: NameMap, shapes: dict) -> None:
    (rule,) = names.rules
    named = ".*".join(f"'{name}'" for name in shapes)
    with pytest.raises(ModelFileError, match=rf"x has weights that cannot be converted to '{rule.target}' .*{named}"):
        names.convert({n: torch.ones(s) for n, s in shapes.items()}, {rule.target: (12, 4)}, where="x")


OPTIONS = {"hidden_dim": 4, "num_layers": 1, "num_heads": 2, "use_expression_values": False, "tie_head": True}


def test_a_family_of_somebody_else(tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    vocab = GeneVocab.from_adata(tiny_adata)
    module = TransformerEncoder(len(vocab), max_seq_len=85, pooling="mean", **OPTIONS)
    turned = [name for name in module.state_dict() if "ffn_in.weight" in name]
    weights = {f"net.{name}": w.T if name in turned else w for name, w in module.state_dict().items()}
    torch.save(weights, tmp_path / "mine.bin")

    @register_family("mine")
    class Mine:
        def recognizes(self, source: Path) -> bool:
            return source.suffix == ".bin"

        def read(self, source: Path, *, pooling: str = "mean") -> Foreign:
            rules = [Rule(f"net.{name}", name) for name in module.state_dict() if name not in turned]
            rules += [Rule(f"net.{name}", name, TRANSPOSED) for name in turned]
            options = {"name": "transformer_encoder", "max_seq_len": 85, "pooling": pooling, **OPTIONS}
            tokenizer = {"name": "rank_value", "max_len": 85, "use_medians": False}
            objective = {"name": "masked_gene_prediction"}
            names = NameMap("Mine", tuple(rules))
            return Foreign("mine", None, options, tokenizer, objective, vocab, names, read_weights(source), str(source))

    try:
        model = Encoder.from_checkpoint(tmp_path / "mine.bin")
        for name, weight in module.state_dict().items():
            assert torch.equal(weight, model.module.state_dict()[name]), name
        assert model.get_latent_representation(tiny_adata).shape == (60, 4)
        with raises(OptionError, "poling"):
            read_checkpoint(tmp_path / "mine.bin", poling="cls")
    finally:
        FAMILIES._entries.pop("mine")


@pytest.mark.parametrize(
    ("source", "family", "error", "message"),
    [
        ("nowhere", None, MissingFileError, "the checkpoint 'nowhere' does not exist"),
        (".", None, OptionError, "has an unknown family; pass one of 'geneformer', 'scdiva', 'scfoundation', 'scgpt'"),
        (".", "genformer", OptionError, "family='genformer' is not known; did you mean 'geneformer'?"),
    ],
)
def test_what_is_no_checkpoint(source, family, error, message, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        read_checkpoint(source, family)
