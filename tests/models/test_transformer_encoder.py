"""TransformerEncoder by the examples of its reference documentation, on smaller batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.models import ModelOutput, TransformerEncoder


def test_model_output_example():
    model = TransformerEncoder(vocab_size=5000, hidden_dim=512, num_layers=6, num_heads=8)
    input_ids = torch.randint(0, 5000, (2, 32))
    attention_mask = torch.ones(2, 32)
    labels = torch.randint(0, 5000, (2, 32))
    output: ModelOutput = model(input_ids, attention_mask, labels=labels)
    assert output.loss.shape == ()
    assert output.logits.shape == (2, 32, 5000)
    assert output.embeddings.shape == (2, 512)
    assert model(input_ids, attention_mask).loss is None


def test_reference_example():
    config = ModelConfig(
        architecture="transformer_encoder",
        vocab_size=5000,
        hidden_dim=64,
        num_layers=3,
        num_heads=8,
        dropout=0.1,
        pooling="mean",
    )
    model = TransformerEncoder.from_config(config)
    direct = TransformerEncoder(vocab_size=5000, hidden_dim=64, num_layers=3, num_heads=8, pooling="mean")
    assert model.num_parameters() == direct.num_parameters() > 0

    batch = {
        "input_ids": torch.randint(0, 5000, (16, 32)),
        "attention_mask": torch.ones(16, 32),
        "values": torch.randn(16, 32),
        "labels": torch.randint(0, 5000, (16, 32)),
    }
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        values=batch["values"],
        labels=batch["labels"],
    )
    output.loss.backward()
    embeddings = model.encode(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], values=batch["values"]
    )
    assert embeddings.shape == (16, 64)


def test_defaults_are_the_documented_ones():
    model = TransformerEncoder(50, 8, 1, 2)
    assert model.pooling == "cls"
    assert model.embedding.max_seq_len == 2048
    assert model.embedding.expression_projection is not None
    assert model.encoder.layers[0].ffn_in.out_features == 32
    assert model.encoder.final_norm.eps == 1e-12
    assert model.embedding.dropout.p == 0.1


def test_pooling_is_what_it_says():
    ids, mask = torch.randint(4, 50, (3, 6)), torch.ones(3, 6)
    mask[0, 4:] = 0
    for pooling in ("cls", "mean", "last"):
        model = TransformerEncoder(50, 8, 1, 2, pooling=pooling).eval()
        hidden = model(ids, mask, output_hidden_states=True).hidden_states[-1]
        kept = {"mean": hidden[0, :4].mean(dim=0), "cls": hidden[0, 0], "last": hidden[0, 3]}[pooling]
        torch.testing.assert_close(model.encode(ids, mask)[0], kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "hidden_dim=8 is not divisible by num_heads=3"),
        ({"pooling": "max"}, "pooling='max' is not known .known: 'cls', 'depths', 'genes', 'last', 'mean'"),
        ({"activation": "tanh"}, "activation='tanh' is not known"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerEncoder(**{"vocab_size": 50, "hidden_dim": 8, "num_layers": 1, "num_heads": 2, **options})


def test_too_long_cells():
    model = TransformerEncoder(50, 8, 1, 2, max_seq_len=5)
    with pytest.raises(ValueError, match="a cell has 6 tokens but max_seq_len=5"):
        model(torch.randint(4, 50, (2, 6)), torch.ones(2, 6))


def test_each_token_sees_all_others():
    model = TransformerEncoder(50, 8, 1, 2).eval()
    ids, mask = torch.randint(4, 50, (1, 6)), torch.ones(1, 6)
    before = model(ids, mask).logits
    for position in range(6):
        changed = ids.clone()
        changed[0, position] = 4 + (ids[0, position] - 4 + 1) % 46
        moved = (model(changed, mask).logits - before).abs().amax(dim=-1)[0]
        assert (moved > 1e-6).all()


def test_token_prior_sets_the_first_loss():
    model = TransformerEncoder(50, 8, 1, 2).eval()
    counts = torch.zeros(50)
    counts[10] = 1e6
    model.init_token_prior(counts)
    ids = torch.full((2, 5), 10)
    with torch.no_grad():
        assert float(model(ids, torch.ones(2, 5), labels=ids).loss) < 0.5


def test_without_logits_the_head_runs_at_labels_only():
    model = TransformerEncoder(50, 8, 1, 2)
    shapes = []
    model.head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    ids = torch.randint(4, 50, (2, 6))
    labels = torch.full((2, 6), -100)
    labels[0, 1:4] = ids[0, 1:4]
    model(ids, torch.ones(2, 6), labels=labels, return_logits=False)
    assert shapes == [(3, 8)]


MASK = torch.arange(6) < torch.tensor([6, 4, 1])[:, None]


@pytest.mark.parametrize("position_embedding", ["learned", "rotary", "none"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("unpad", [None, True, False])
def test_left_padding_means_the_same(position_embedding, pooling, unpad):
    model = TransformerEncoder(50, 8, 1, 2, position_embedding=position_embedding, pooling=pooling, unpad=unpad).eval()
    ids, values = torch.randint(4, 50, (3, 6)), torch.rand(3, 6)
    expected = model.encode(ids, MASK, values)
    shifts = [6, 4, 1]
    left = [torch.stack([row.roll(6 - n) for row, n in zip(x, shifts, strict=True)]) for x in (ids, MASK, values)]
    torch.testing.assert_close(model.encode(*left), expected, atol=1e-5, rtol=1e-5)
    assert torch.pdist(expected).min() > 1e-3


@pytest.mark.parametrize("head", [None, "value", "bin"])
@pytest.mark.parametrize("return_logits", [True, False])
def test_labels_at_padding_do_not_count(head, return_logits):
    model = TransformerEncoder(50, 8, 1, 2, expression_head=head, n_bins=5 if head == "bin" else None).eval()
    ids, bins = torch.randint(4, 50, (3, 6)), torch.randint(0, 5, (3, 6))
    targets = {"labels": ids, "masked_positions": torch.ones(3, 6), "value_labels": bins.float(), "bin_labels": bins}
    expected = model(
        ids,
        MASK,
        return_logits=return_logits,
        labels=ids.masked_fill(~MASK, -100),
        masked_positions=MASK,
        value_labels=bins * MASK,
        bin_labels=bins.masked_fill(~MASK, -100),
    ).loss
    for wider in (0, 4):
        padded = {name: nn.functional.pad(x, (0, wider), value=3) for name, x in targets.items()}
        mask, wide_ids = nn.functional.pad(MASK, (0, wider)), nn.functional.pad(ids, (0, wider))
        loss = model(wide_ids, mask, return_logits=return_logits, **padded).loss
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_values_at_padding_may_be_anything():
    model = TransformerEncoder(50, 8, 1, 2).eval()
    ids, values = torch.randint(4, 50, (3, 6)), torch.rand(3, 6)
    broken = values.masked_fill(~MASK, torch.nan)
    torch.testing.assert_close(model.encode(ids, MASK, broken), model.encode(ids, MASK, values))


@pytest.mark.parametrize("name", ["attention_mask", "values", "attention_bias"])
def test_shapes_are_checked(name):
    model = TransformerEncoder(50, 8, 1, 2)
    batch = {"input_ids": torch.randint(4, 50, (3, 6)), "attention_mask": MASK, name: torch.ones(3, 5)}
    with pytest.raises(ValueError, match=rf"{name} has the shape \(3, 5\) but input_ids \(3, 6\)"):
        model.encode(**batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expression_loss_weight": 2.0}, "expression_loss_weight=2.0 has no use without expression_head"),
        ({"expression_head": "bin"}, "n_bins=None does not go with expression_head='bin'"),
        ({"expression_head": "bin", "n_bins": 1}, "n_bins=1"),
        ({"tie_head": True, "gene_vectors": {"dim": 3, "learned": 4}}, "tie_head=True needs a learned gene embedding"),
        ({"position_embedding": "absolute"}, "position_embedding='absolute' is not known"),
        ({"use_expression_values": "no"}, "use_expression_values='no'"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerEncoder(50, 8, 1, 2, **options)


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
