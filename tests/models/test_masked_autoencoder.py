import pytest
import torch

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models import MaskedAutoencoder
from scforge.models.components.heads import COUNT_LOSSES
from scforge.testing import raises

SMALL = {"encoder_dim": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_heads": 2}
POSITIONS = ["none", "learned", "rotary"]
TOKENS = ("input_ids", "attention_mask", "values")


def make(**options) -> MaskedAutoencoder:
    torch.manual_seed(0)
    model = MaskedAutoencoder(60, **{**SMALL, **options}).eval()
    with torch.no_grad():  # biases start at zero, which hides what hangs on them
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Five cells of up to 12 genes with whole-numbered values; about half of them hidden, anywhere."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(12) < torch.tensor([12, 12, 9, 5, 3])[:, None]
    ids = torch.stack([torch.randperm(56, generator=generator)[:12] + 4 for _ in range(5)])
    values = torch.randint(1, 9, (5, 12), generator=generator).float()
    hidden = (torch.rand(5, 12, generator=generator) < 0.5) & mask
    hidden[:, 0], hidden[:, 1] = True, False
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "values": values * mask,
        "masked_positions": hidden,
        "value_labels": values * hidden,
    }


def test_defaults_and_names_that_configurations_share():
    model = MaskedAutoencoder(50)
    assert (model.encoder_dim, model.decoder_dim, model.pooling, model.uses_order) == (512, 256, "mean", False)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (12, 4)
    assert [stack.layers[0].attention.num_heads for stack in (model.encoder, model.decoder)] == [8, 8]
    assert [stack.layers[0].ffn_in.out_features for stack in (model.encoder, model.decoder)] == [2048, 1024]
    assert model.embedding.max_seq_len == 2048
    assert model.embedding.position_embedding is None
    assert not make(pooling="cls").uses_order
    assert make(pooling="last").uses_order
    assert make(position_embedding="rotary").uses_order
    config = ModelConfig(vocab_size=60, hidden_dim=8, num_layers=1, num_heads=4, decoder_dim=4, decoder_layers=3)
    model = MaskedAutoencoder.from_config(config)
    assert (model.encoder_dim, model.decoder_dim, model.pooling) == (8, 4, "mean")
    assert model.num_parameters() == MaskedAutoencoder(60, 8, 4, 1, 3, 4).num_parameters()
    with raises(ValueError, "hidden_dim"):
        MaskedAutoencoder.from_config(ModelConfig(vocab_size=60, hidden_dim=8, encoder_dim=8))


@pytest.mark.parametrize("position_embedding", POSITIONS)
@pytest.mark.parametrize("value_loss", ["mse", "zero_truncated_negative_binomial"])
def test_hidden_values_do_not_reach_the_prediction(batch, position_embedding, value_loss):
    model = make(position_embedding=position_embedding, value_loss=value_loss)
    hidden = batch["masked_positions"]
    other = batch | {
        "values": batch["values"].masked_fill(hidden, 777.0),
        "attention_bias": torch.zeros(5, 12).masked_fill(hidden, 9.0),
    }
    plain = batch | {"attention_bias": torch.zeros(5, 12)}
    with torch.no_grad():
        one, two = model(**plain), model(**other)
    assert all(torch.equal(getattr(one, part), getattr(two, part)) for part in ("logits", "embeddings", "loss"))


@pytest.mark.parametrize("position_embedding", POSITIONS)
def test_the_id_at_a_hidden_token_does_not_matter_where_labels_tell_it(batch, position_embedding):
    model = make(position_embedding=position_embedding)
    hidden, ids = batch["masked_positions"], batch["input_ids"]
    labels = ids.masked_fill(~hidden, -100)
    with torch.no_grad():
        kept = model(**batch)
        masked = model(**batch | {"input_ids": ids.masked_fill(hidden, 2), "labels": labels})
        drawn = model(**batch | {"input_ids": ids.masked_fill(hidden, 33), "labels": labels})
        inferred = model(ids.masked_fill(hidden, 2), batch["attention_mask"], batch["values"], labels)
    for other in (masked, drawn, inferred):
        for part in ("logits", "embeddings", "loss"):
            torch.testing.assert_close(getattr(other, part), getattr(kept, part))


def test_the_decoder_knows_which_gene_it_predicts(batch):
    model = make()
    swapped = batch["input_ids"].clone()
    swapped[0, 0] = next(gene for gene in range(4, 60) if gene not in swapped[0])
    with torch.no_grad():
        one, two = model(**batch), model(**batch | {"input_ids": swapped})
    assert (one.logits[0, 0] - two.logits[0, 0]).abs() > 1e-4
    assert torch.equal(one.embeddings, two.embeddings)
    assert torch.equal(one.logits[1:], two.logits[1:])


@pytest.mark.parametrize("position_embedding", ["none", "learned"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_the_embedding_is_that_of_the_visible_tokens(batch, position_embedding, pooling):
    model = make(position_embedding=position_embedding, pooling=pooling)
    visible = batch["attention_mask"] & ~batch["masked_positions"]
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True, output_attentions=True)
    plain, mask = model(**batch), batch["attention_mask"]
    torch.testing.assert_close(output.logits[mask], plain.logits[mask])
    for cell in range(5):
        places = visible[cell].nonzero().squeeze(1)
        ids, values = (batch[name][cell : cell + 1, places] for name in ("input_ids", "values"))
        alone = model.encoder(model.embedding(ids, values, places), output_attentions=True)
        states = alone.hidden[0]
        pooled = {"mean": states.mean(dim=0), "cls": states[0], "last": states[-1]}[pooling]
        torch.testing.assert_close(output.embeddings[cell], pooled, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.hidden_states[-1][cell, places], states, atol=1e-5, rtol=1e-5)
        for weights, expected in zip(output.attentions, alone.attentions, strict=True):
            torch.testing.assert_close(weights[cell][:, places][:, :, places], expected[0], atol=1e-5, rtol=1e-5)
    assert [states.shape for states in output.hidden_states] == [(5, 12, 16)] * 2
    assert not any(states[~visible].any() for states in output.hidden_states)
    for weights in output.attentions:
        torch.testing.assert_close(weights.sum(dim=-1), visible[:, None].float().expand(5, 2, 12))
        assert not weights.transpose(-1, -2)[~visible[:, None].expand(5, 2, 12)].any()


@pytest.mark.parametrize("value_loss", ["mse", "negative_binomial"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_no_cells_and_no_tokens(shape, pooling, value_loss):
    model = make(pooling=pooling, value_loss=value_loss)
    ids = torch.zeros(shape, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "values": ids.float(), "masked_positions": ids}
    output = model(**batch, value_labels=ids.float(), output_attentions=True, output_hidden_states=True)
    assert (output.logits.shape, output.embeddings.shape) == (shape, (shape[0], 16))
    assert output.loss == 0.0
    assert not output.embeddings.any()
    assert output.attentions[0].shape == (shape[0], 2, shape[1], shape[1])
    assert output.hidden_states[0].shape == (*shape, 16)
    assert torch.equal(model.encode(**batch), output.embeddings)


@pytest.mark.parametrize("value_loss", ["mse", *COUNT_LOSSES])
def test_the_loss_by_hand(batch, value_loss):
    model = make(value_loss=value_loss)
    hidden, target = batch["masked_positions"], batch["value_labels"]
    output = model(**batch)
    found = output.logits[hidden]
    if value_loss == "mse":
        torch.testing.assert_close(output.loss, (found - target[hidden]).square().mean())
    else:
        assert (found > float("truncated" in value_loss)).all()
    if value_loss == "poisson":
        loss = torch.nn.functional.poisson_nll_loss(found, target[hidden], log_input=False)
        torch.testing.assert_close(output.loss, loss + torch.lgamma(target[hidden] + 1).mean())
    short = model(**batch, return_logits=False)
    assert short.logits is None
    torch.testing.assert_close(short.loss, output.loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(**batch).loss
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, output.loss, rtol=0.05, atol=0.05)


def test_counts_are_predicted_relative_to_the_depth_of_the_cell(batch):
    model = make(value_loss="poisson")
    model.embedding.expression_scale.data.zero_()
    deep = batch | {"values": batch["values"] * 10}
    torch.testing.assert_close(model(**deep).logits, model(**batch).logits * 10, atol=1e-4, rtol=1e-4)


def test_when_there_is_a_loss(batch):
    model = make()
    tokens = {name: batch[name] for name in TOKENS}
    hidden = {"masked_positions": batch["masked_positions"]}
    nothing = torch.full_like(batch["input_ids"], -100)
    assert model(**tokens).loss is None
    assert model(**tokens, **hidden).loss is None
    assert model(batch["input_ids"], batch["attention_mask"], labels=nothing, **hidden).loss is None
    asked = model(**tokens, **hidden, labels=nothing)
    torch.testing.assert_close(asked.loss, model(**batch).loss)
    assert model(**tokens, labels=nothing).loss.item() == 0.0
    torch.testing.assert_close(model.encode(**batch), model(**tokens).embeddings)


def test_bad_batches(batch):
    for name in ("attention_mask", "values", "labels", "attention_bias", "masked_positions", "value_labels"):
        with pytest.raises(OptionError, match=rf"{name} has shape \(5, 11\), but input_ids has shape \(5, 12\)"):
            make()(**{**batch, name: torch.ones(5, 11)})
    model = make(value_loss="poisson")
    with pytest.raises(
        OptionError, match="value_loss='poisson' requires integer counts of at least 0, but a target is 1.5"
    ):
        model(**batch | {"value_labels": torch.full_like(batch["values"], 1.5)})
    beyond = batch["values"].masked_fill(~batch["attention_mask"], -7.0)
    torch.testing.assert_close(model.encode(**batch | {"values": beyond}), model.encode(**batch))
    wrong = batch | {"values": batch["values"].masked_fill(~batch["masked_positions"], -3.0)}
    for run in (model, model.encode):
        with raises(OptionError, "value_loss"):
            run(**wrong)
    # Only visible tokens need a position.
    model = make(position_embedding="learned", max_seq_len=8)
    batch["masked_positions"] = batch["attention_mask"] & (torch.arange(12) >= 8)
    assert model(**batch).loss.isfinite()
    batch["masked_positions"][:, 11] = False
    with pytest.raises(OptionError, match="a cell has 12 tokens, but max_seq_len=8"):
        model(**batch)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"pooling": "max"}, "pooling"),
        ({"value_loss": "mae"}, "value_loss"),
        ({"encoder_heads": 3}, "decoder_dim"),
        ({"encoder_heads": 3, "decoder_heads": 2}, "hidden_dim"),
    ],
)
def test_bad_options(options, argument):
    with raises(OptionError, argument):
        MaskedAutoencoder(60, **{**SMALL, **options})
