import pytest
import torch
from torch.nn import functional as F

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models import AutoregressiveTransformer
from scforge.models.components.attention import token_positions
from scforge.models.components.pooling import POOLINGS as POOL_FUNCTIONS
from scforge.testing import raises
from scforge.training.objectives.base import get_objective

V, BINS, S = 40, 6, 9
POOLINGS = ["cls", "mean", "last"]


def make(**options) -> AutoregressiveTransformer:
    torch.manual_seed(0)
    options = {"hidden_dim": 16, "num_layers": 2, "num_heads": 4, "n_bins": BINS, **options}
    return AutoregressiveTransformer(V, **options).eval()


def batch(lengths: tuple[int, ...] = (9, 6, 4), width: int = S) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.stack([4 + torch.randperm(V - 4, generator=generator)[:width] for _ in lengths])
    ids[:, 0] = 3
    bins = torch.randint(1, BINS, ids.shape, generator=generator)
    bins[:, 0] = 0
    bins = bins * mask
    labels = ids.masked_fill(~mask | (ids == 3), -100)
    return {
        "input_ids": ids * mask, "attention_mask": mask, "values": bins.float(), "bin_ids": bins, "labels": labels,
    }  # fmt: skip


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_state_sees_what_it_predicts(pooling: str, positions: str):
    model, tokens = make(pooling=pooling, position_embedding=positions), batch((S, S, S))
    with torch.no_grad():
        before = model(**tokens)
        for t in range(1, S):
            changed = {name: tensor.clone() for name, tensor in tokens.items()}
            changed["input_ids"][:, t:] = (tokens["input_ids"][:, t:] + 11 - 4) % (V - 4) + 4
            changed["values"][:, t:] += 3.0
            after = model(**changed)
            assert torch.equal(after.logits[:, :t], before.logits[:, :t])
            assert torch.equal(after.expression[:, :t], before.expression[:, :t])
            assert not torch.allclose(after.logits[:, t:], before.logits[:, t:])


def test_loss_is_that_of_the_next_token():
    model, tokens = make(pooling="mean", gene_loss_weight=0.7, expression_loss_weight=0.3), batch()
    output = model(**tokens)
    genes, bins = [], []
    for cell, length in enumerate((9, 6, 4)):
        for t in range(length - 1):
            genes.append(F.cross_entropy(output.logits[cell, t], tokens["input_ids"][cell, t + 1]))
            bins.append(F.cross_entropy(output.expression[cell, t], tokens["bin_ids"][cell, t + 1]))
    torch.testing.assert_close(output.loss, 0.7 * torch.stack(genes).mean() + 0.3 * torch.stack(bins).mean())
    torch.testing.assert_close(model(**tokens, return_logits=False).loss, output.loss)
    without_bins = {name: tensor for name, tensor in tokens.items() if name != "bin_ids"}
    torch.testing.assert_close(model(**without_bins).loss, 0.7 * torch.stack(genes).mean())
    del without_bins["labels"]
    assert model(**without_bins).loss is None
    # Labels of bins count before the bins.
    other = torch.full_like(tokens["bin_ids"], -100)
    other[0, 3] = 2
    loss = 0.7 * torch.stack(genes).mean() + 0.3 * F.cross_entropy(output.expression[0, 2], torch.tensor(2))
    torch.testing.assert_close(model(**tokens, bin_labels=other).loss, loss)


def test_cell_loss_is_that_of_the_genes_given_the_read_out():
    tokens = batch()
    with_cells, without = make(cell_loss_weight=0.5), make(cell_loss_weight=0.0)
    log_p = with_cells.head(with_cells.encode(**tokens)).log_softmax(dim=-1)
    of_cells = [-log_p[i, tokens["input_ids"][i, 1:n]].mean() for i, n in enumerate((9, 6, 4))]
    difference = with_cells(**tokens).loss - without(**tokens).loss
    torch.testing.assert_close(difference, 0.5 * torch.stack(of_cells).mean())


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_any_padding_means_nothing(pooling: str, positions: str):
    """Two cells with gaps between their tokens, and one behind its padding."""
    model, tokens = make(pooling=pooling, position_embedding=positions), batch()
    places = torch.tensor([[0, 1, 3, 4, 7, 8, 9, 11, 13]] * 2 + [list(range(5, 14))])
    scattered = {
        name: torch.full((3, 14), -100 if name == "labels" else 0, dtype=tensor.dtype).scatter(1, places, tensor)
        for name, tensor in tokens.items()
    }
    one, two = model(**tokens), model(**scattered)
    torch.testing.assert_close(two.loss, one.loss)
    torch.testing.assert_close(two.embeddings, one.embeddings)
    torch.testing.assert_close(two.logits[:2, places[0]], one.logits[:2])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_tell_cells_apart_and_are_those_of_the_training(pooling: str):
    model, tokens = make(pooling=pooling), batch((S, S, S))
    embeddings, output = model.encode(**tokens), model(**tokens, output_hidden_states=True)
    assert torch.pdist(embeddings).min() > 1e-3
    torch.testing.assert_close(embeddings, output.embeddings)
    if pooling != "cls":  # of causal states
        hidden = output.hidden_states[-1]
        torch.testing.assert_close(embeddings, hidden.mean(dim=1) if pooling == "mean" else hidden[:, -1])
    # The last token counts, too.
    changed = tokens | {"values": tokens["values"].clone()}
    changed["values"][:, -1] = changed["values"][:, -1] % (BINS - 1) + 1
    assert (model.encode(**changed) - embeddings).abs().amax(dim=1).min() > 1e-5


def test_condition():
    model, tokens = make(n_conditions=2, pooling="mean"), batch()
    plain = model.encode(**tokens)
    none, some = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2])
    torch.testing.assert_close(model.encode(**tokens, condition=none), plain)
    told = model.encode(**tokens, condition=some)
    torch.testing.assert_close(told[0], plain[0])
    assert (told - plain)[1:].abs().amax(dim=1).min() > 1e-5
    plain_model = make()
    plain_model(**tokens, condition=none)
    with raises(OptionError, "condition"):
        plain_model(**tokens, condition=some)


def test_configuration_and_bins():
    options = {"vocab_size": V, "hidden_dim": 16, "num_layers": 1, "num_heads": 2, "n_bins": 7}
    config = ModelConfig(**options, gene_loss_weight=1.0, expression_loss_weight=0.5)
    model = AutoregressiveTransformer.from_config(config)
    assert (model.n_bins, model.expression_loss_weight, model.pooling) == (7, 0.5, "cls")
    assert model.bin_values.tolist() == [0, 1, 2, 3, 4, 5, 6]
    model.init_bin_values(torch.linspace(0, 3, 7))
    assert model.state_dict()["bin_values"][-1] == 3
    with raises(OptionError, "bin_values"):
        model.init_bin_values(torch.zeros(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling='max' is not known"),
        (
            {"gene_loss_weight": 0, "expression_loss_weight": 0, "pooling": "mean"},
            "all loss weights are 0, so the model",
        ),
        ({"n_bins": 1}, "n_bins=1"),
        ({"cell_loss_weight": -1.0}, "cell_loss_weight=-1.0"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(OptionError, match=message):
        make(**options)


def test_bad_batches():
    for name in ("attention_mask", "values", "attention_bias", "condition"):
        tokens = batch() | {name: torch.ones(2, S, dtype=torch.int64)}
        for method in (make().forward, make().encode):
            with pytest.raises(OptionError, match=rf"{name} has shape \(2, 9\)"):
                method(**tokens)
    for name in ("labels", "bin_ids", "bin_labels"):
        with pytest.raises(OptionError, match=rf"{name} has shape \(3, 8\), but input_ids has shape \(3, 9\)"):
            make()(**batch() | {name: torch.zeros(3, 8, dtype=torch.int64)})
    with pytest.raises(OptionError, match="a cell has 9 tokens, but max_seq_len=8"):
        make(max_seq_len=8)(**batch())


def test_values_at_padding_may_be_anything():
    model, tokens = make(), batch()
    blank = tokens["values"].masked_fill(~tokens["attention_mask"], float("nan"))
    output, expected = model(**tokens | {"values": blank}), model(**tokens)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.embeddings, expected.embeddings)
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_aligned_two_term_loss():
    """The loss and the embedding of scModelForge's reference."""
    options = {"gene_loss_weight": 0.7, "expression_loss_weight": 0.3}
    model, tokens = make(shift_labels=False, causal_encode=False, **options), batch()
    output = model(**tokens)
    logits, bins, labeled = output.logits, output.expression, tokens["labels"] != -100
    expected = 0.7 * F.cross_entropy(logits[labeled], tokens["labels"][labeled])
    expected = expected + 0.3 * F.cross_entropy(bins[labeled], tokens["bin_ids"][labeled])
    torch.testing.assert_close(output.loss, expected)
    assert model.readout is None
    with pytest.raises(OptionError, match="shift_labels=False predicts each token itself"):
        model.generate(2, max_len=5)
    with pytest.raises(OptionError, match="receives the token that it has to predict"):
        get_objective("next_gene_prediction").check_architecture(model)
    with raises(OptionError, "pooling"):
        make(shift_labels=False)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_encode_without_the_causal_mask(pooling: str):
    model, causal, tokens = make(causal_encode=False, pooling=pooling), make(pooling=pooling), batch()
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask", "values")}
    torch.testing.assert_close(model(**tokens).loss, causal(**tokens).loss)
    full = model.decoder(
        model._embed(*(inputs[name] for name in inputs), token_positions(inputs["attention_mask"]), None),
        inputs["attention_mask"],
    ).hidden
    torch.testing.assert_close(model.encode(**inputs), POOL_FUNCTIONS[pooling](full, inputs["attention_mask"]))
    assert not torch.allclose(model.encode(**inputs), causal.encode(**inputs))
