import pytest
import torch
from torch import nn

from scforge.models import TransformerEncoder
from scforge.testing import raises

MASK = torch.arange(6) < torch.tensor([6, 4, 1])[:, None]


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_pooling_is_what_it_says(pooling):
    ids = torch.randint(4, 50, (3, 6))
    model = TransformerEncoder(50, 8, 1, 2, pooling=pooling).eval()
    hidden = model(ids, MASK, output_hidden_states=True).hidden_states[-1]
    kept = {"mean": hidden[1, :4].mean(dim=0), "cls": hidden[1, 0], "last": hidden[1, 3]}[pooling]
    torch.testing.assert_close(model.encode(ids, MASK)[1], kept)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_heads": 3}, "hidden_dim"),
        ({"pooling": "max"}, "pooling"),
        ({"activation": "tanh"}, "activation"),
        ({"expression_head": "bin"}, "n_bins"),
        (
            {"tie_head": True, "gene_vectors": {"dim": 3, "learned": 4}},
            "tie_head",
        ),
        ({"tie_head": True, "gene_head": False}, "tie_head"),
    ],
)
def test_bad_options(options, argument):
    with raises(ValueError, argument):
        TransformerEncoder(**{"vocab_size": 50, "hidden_dim": 8, "num_layers": 1, "num_heads": 2, **options})


def test_bad_batches():
    batch = {"input_ids": torch.randint(4, 50, (3, 6)), "attention_mask": MASK}
    for name in ("attention_mask", "values", "attention_bias"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(3, 5\), but input_ids has shape \(3, 6\)"):
            TransformerEncoder(50, 8, 1, 2).encode(**batch | {name: torch.ones(3, 5)})
    with pytest.raises(ValueError, match="a cell has 6 tokens, but max_seq_len=5"):
        TransformerEncoder(50, 8, 1, 2, max_seq_len=5)(**batch)


def test_token_prior_sets_the_first_loss():
    model = TransformerEncoder(50, 8, 1, 2).eval()
    counts = torch.zeros(50)
    counts[10] = 1e6
    model.init_token_prior(counts)
    ids = torch.full((2, 5), 10)
    with torch.no_grad():
        assert float(model(ids, torch.ones(2, 5), labels=ids).loss) < 0.5


def test_tied_head_shares_the_gene_embedding():
    model = TransformerEncoder(50, 8, 1, 2, tie_head=True).eval()
    assert model.num_parameters() == TransformerEncoder(50, 8, 1, 2).num_parameters() - 50 * 8
    ids = torch.randint(4, 20, (3, 6))
    before = model(ids, MASK, labels=ids)
    torch.testing.assert_close(model(ids, MASK, labels=ids, return_logits=False).loss, before.loss)
    with torch.no_grad():
        model.embedding.gene_embedding.weight[40] += 1.0  # no token of these cells
        moved = (model(ids, MASK).logits - before.logits)[MASK].abs().amax(dim=0)
    assert moved.nonzero().flatten().tolist() == [40]


@pytest.mark.parametrize("head", ["value", "bin"])
def test_expression_head_predicts(head):
    model = TransformerEncoder(50, 8, 1, 2, expression_head=head, n_bins=5 if head == "bin" else None)
    ids, bins = torch.randint(4, 50, (3, 6)), torch.randint(0, 5, (3, 6))
    hidden = torch.rand(3, 6) < 0.5
    out = model(
        ids, torch.ones(3, 6), masked_positions=hidden, value_labels=bins.float(),
        bin_labels=bins.masked_fill(~hidden, -100),
    )  # fmt: skip
    if head == "bin":
        assert out.expression.shape == (3, 6, 5)
        expected = nn.functional.cross_entropy(out.expression[hidden], bins[hidden])
    else:
        assert out.expression.shape == (3, 6)
        expected = (out.expression - bins)[hidden].square().mean()
    torch.testing.assert_close(out.loss, expected)
