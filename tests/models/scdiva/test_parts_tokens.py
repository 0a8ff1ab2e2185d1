import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from scforge.data import GeneVocab
from scforge.errors import OptionError
from scforge.models.scdiva import what_is_seen
from scforge.models.scdiva.parts import serialize
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.tokenizers.entropy_ranked import serialization_weights

VOCAB, GENES = 60, 56


@pytest.mark.parametrize("options", [{}, {"position_embedding": "rotary"}, {"max_tokens": 7}], ids=str)
def test_profiles_and_tokens_are_the_same_cells(tokens_of, made, profiles, options):
    model = made(**options)
    profiles[2] = 0.0
    expected = model.encode(profiles)["mu"]
    torch.testing.assert_close(model.encode(**tokens_of(profiles)), expected, atol=1e-6, rtol=1e-5)
    # Tokens beyond the last one count in LAT alone.
    if "max_tokens" in options:
        assert not torch.allclose(made().encode(profiles)["mu"], expected, atol=1e-4)
        fewer = {name: tensor[:, :7] for name, tensor in tokens_of(profiles).items()}
        assert not torch.allclose(model.encode(**fewer), expected, atol=1e-4)


def test_weights_of_genes_put_profiles_in_order(made, profiles):
    model = made(max_tokens=3)
    weights = torch.zeros(GENES)
    weights[10:20] = 1.0
    plain = serialize(model, profiles).ids
    model.init_gene_weights(weights)
    ids = serialize(model, profiles).ids
    n_known = (profiles[:, 10:20] > 0).sum(dim=1).clamp(max=3)
    assert [int(((row >= 14) & (row < 24)).sum()) for row in ids] == n_known.tolist()
    assert not torch.equal(plain, ids)
    ties = serialize(model, torch.ones(1, GENES)).ids
    assert ties.tolist() == [[14, 15, 16]]
    with raises(OptionError, "weights"):
        model.init_gene_weights(weights[1:])


@pytest.mark.parametrize("options", [{}, {"position_embedding": "rotary"}, {"mode": "vector"}], ids=str)
def test_hidden_things_are_not_seen(hide, tokens_of, made, profiles, options):
    model = made(denoising=True, **options)
    _, hidden = hide(tokens_of(profiles))
    no_value = hidden["masked_values"]
    other = hidden | {
        "values": hidden["values"].masked_fill(no_value, 7.0),
        "labels": hidden["labels"].where(hidden["labels"] == -100, 59),
        "value_labels": hidden["value_labels"] + 1.0,
    }
    with torch.no_grad():
        one, two = model(**hidden), model(**other)
    for part in ("embeddings", "logits", "expression"):
        assert torch.equal(getattr(one, part), getattr(two, part)), part
    # What is not hidden is seen.
    shown = hidden | {"values": hidden["values"].masked_fill(~no_value & hidden["attention_mask"], 3.0)}
    assert not torch.allclose(model(**shown).embeddings, one.embeddings, atol=1e-4)


def test_the_loss_is_what_is_documented(hide, tokens_of, made, profiles, monkeypatch):
    model = made(denoising=True)
    _, hidden = hide(tokens_of(profiles))
    output = model(**hidden)
    no_gene, no_value, weights = (hidden[name] for name in ("masked_positions", "masked_values", "loss_weights"))
    log_p = -output.logits.log_softmax(dim=-1).gather(2, hidden["labels"].clamp(min=0)[..., None])[..., 0]
    identity = torch.stack([of_cell[hid].mean() for of_cell, hid in zip(log_p, no_gene, strict=True)])
    assert set(output.losses) == {"identity", "value"}
    torch.testing.assert_close(output.losses["identity"], (weights * identity).mean())
    torch.testing.assert_close(output.loss, output.losses["identity"] + output.losses["value"])
    # Where the gene is seen the value that is returned is the one that is learned.
    known = no_value & ~no_gene
    known_output = model(**hidden | {"masked_values": known})
    error = (known_output.expression - hidden["value_labels"]).square()
    value = torch.stack([of_cell[hid].mean() for of_cell, hid in zip(error, known, strict=True)])
    torch.testing.assert_close(known_output.losses["value"], (weights * value).mean())
    # Where it is not, it is learned of that gene.
    other = hidden | {"labels": hidden["labels"].where(hidden["labels"] == -100, 59)}
    assert not torch.allclose(output.losses["value"], model(**other).losses["value"])

    def gradients(loss) -> list[torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(output.loss)
    monkeypatch.setattr("scforge.models.scdiva.parts._LOGITS_AT_ONCE", {"cpu": 3 * VOCAB})  # in parts
    without = model(**hidden, return_logits=False)
    for part in output.losses:
        torch.testing.assert_close(without.losses[part], output.losses[part])
    for one, two in zip(gradients(without.loss), expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


def test_logits_leave_out_what_cannot_be(hide, tokens_of, made, profiles):
    model = made()
    batch, hidden = hide(tokens_of(profiles))
    with torch.no_grad():
        logits = model(**hidden).logits
    for cell in range(len(logits)):
        seen = hidden["input_ids"][cell][hidden["attention_mask"][cell] & ~hidden["masked_positions"][cell]]
        for place in hidden["masked_positions"][cell].nonzero()[:, 0].tolist():
            never = logits[cell, place] == -100.0
            assert set(never.nonzero()[:, 0].tolist()) == {0, 1, 2, 3, *seen.tolist()}
    own = logits.gather(2, hidden["input_ids"].unsqueeze(-1)).squeeze(-1)
    shown = hidden["attention_mask"] & ~hidden["masked_positions"]
    assert bool((own[shown] > -50).all())


def test_hidden_values_are_predicted_by_name(tokens_of, made, profiles):
    model = made(denoising=True)
    batch = tokens_of(profiles)
    hidden = torch.zeros_like(batch["attention_mask"])
    hidden[:, 1] = True
    with torch.no_grad():
        values = model.predict_values(**batch, masked_values=hidden)
        expected = model(**batch, masked_values=hidden, masked_positions=torch.zeros_like(hidden)).expression
    torch.testing.assert_close(values[:, 1], expected[:, 1])
    assert not values[:, [0, *range(2, values.shape[1])]].any()
    with raises(OptionError, "masked_values"):
        made(denoising=True, max_tokens=2).predict_values(**batch, masked_values=batch["attention_mask"])
    with pytest.raises(OptionError, match="denoising=False"):
        made().predict_values(**batch, masked_values=hidden)
    # Where there are too many tokens, hidden ones go before others.
    last = torch.zeros_like(hidden)
    last[:, -3:] = batch["attention_mask"][:, -3:]
    model = made(max_tokens=6)
    attended = model.states(what_is_seen(*batch.values(), last, None, model.n_special)).attended
    assert bool(attended[last].all())
    assert torch.equal(attended.sum(dim=1), batch["attention_mask"].sum(dim=1).clamp(max=6))


@pytest.mark.parametrize("weighting", ["complement", "inverse"])
def test_profiles_become_the_tokens_of_the_tokenizer(made, weighting):
    rng = np.random.default_rng(0)
    # Few counts make ties, and a gene that all cells share has no weight.
    counts = rng.poisson(rng.gamma(0.3, 3.0, GENES), (40, GENES)).astype(np.float32)
    counts[:, 7] = counts.sum(axis=1)
    entropies = rng.uniform(0.2, 1.0, GENES)
    entropies[[7, 9]] = 1.0
    vocab = GeneVocab.from_genes([f"gene{i}" for i in range(GENES)]).with_entropies(entropies)
    batch = get_tokenizer("entropy_ranked", vocab, weighting=weighting)(csr_matrix(counts))
    x = torch.zeros(40, GENES)
    for row in range(40):
        genes = batch["input_ids"][row][batch["attention_mask"][row]] - 4
        x[row, genes] = batch["values"][row][batch["attention_mask"][row]]
    torch.testing.assert_close(x, torch.from_numpy(np.log1p(counts / counts.sum(axis=1, keepdims=True) * 1e4)))
    model = made(max_tokens=15)
    model.init_gene_weights(torch.from_numpy(serialization_weights(vocab, weighting)))
    part = serialize(model, x)
    width = part.ids.shape[1]
    assert torch.equal(part.ids, batch["input_ids"][:, :width])
    assert torch.equal(part.values, batch["values"][:, :width])
    expected = model.encode(**{name: batch[name] for name in ("input_ids", "attention_mask", "values")})
    torch.testing.assert_close(model.encode(x)["mu"], expected, atol=1e-6, rtol=1e-5)
