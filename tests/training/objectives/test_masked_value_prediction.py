import numpy as np
import pytest
import torch
from scipy import sparse

from scforge._constants import EOS_TOKEN
from scforge.data import GeneVocab
from scforge.data.cells import CellSource
from scforge.errors import OptionError, TrainingError
from scforge.models import GenePoolingModel, MaskedAutoencoder, TransformerEncoder
from scforge.tokenizers import get_tokenizer
from scforge.tokenizers.continuous_projection import DEPTH_TOKENS
from scforge.training import MaskedValuePrediction

G, HELD_OUT = 60, 150
VOCAB = GeneVocab.from_genes([f"g{i}" for i in range(G)])
MEDIANS = VOCAB.with_medians(np.random.default_rng(3).uniform(0.5, 2.0, G))


def cells_of(counts: np.ndarray, measured: np.ndarray | None = None) -> CellSource:
    matrix = sparse.csr_matrix(counts.astype(np.float32))
    return CellSource(matrix, counts.sum(axis=1).astype(float), measured=measured)


@pytest.fixture
def planted_cells() -> CellSource:
    """Eight genes in pairs, of which the second has 11 - the count of the first."""
    counts = np.zeros((400 + HELD_OUT, G))
    counts[:, :4] = np.random.default_rng(0).integers(1, 11, (len(counts), 4))
    counts[:, 4:8] = 11 - counts[:, :4]
    return cells_of(counts)


def targets_of(cells: CellSource, tokenizer, objective) -> torch.Tensor:
    """The values that are to predict in the cells that are held out."""
    batch = objective.prepare(cells.block(np.arange(400, 400 + HELD_OUT)), tokenizer, epoch=0, seed=0)
    return batch["bin_labels" if "bin_labels" in batch else "value_labels"][batch["masked_positions"]].double()


def autoencoder(**options) -> MaskedAutoencoder:
    torch.manual_seed(1)
    return MaskedAutoencoder(64, 16, 16, 1, 1, 2, dropout=0.0, max_seq_len=64, **options)


def transformer(head: str, **options) -> TransformerEncoder:
    torch.manual_seed(1)
    return TransformerEncoder(64, 16, 1, 2, dropout=0.0, max_seq_len=64, expression_head=head, **options)


ARCHITECTURES = {
    "autoencoder": autoencoder,
    "autoencoder, learned positions": lambda: autoencoder(position_embedding="learned"),
    "autoencoder, rotary positions": lambda: autoencoder(position_embedding="rotary"),
    "transformer": lambda: transformer("value"),
}
TOKENIZERS = {"rank_value": {"use_medians": False}, "continuous_projection": {"order": "expression"}}


@pytest.mark.slow
@pytest.mark.parametrize("zero_targets", [0.0, 1.0])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_values_cannot_be_read_off_random_data(random_cells, train_on, tokenizer, architecture, zero_targets):
    tokenizer = get_tokenizer(tokenizer, VOCAB, **TOKENIZERS[tokenizer])
    objective, module = MaskedValuePrediction(mask_ratio=0.5, zero_targets=zero_targets), ARCHITECTURES[architecture]()
    history = train_on(random_cells, tokenizer, module, objective, epochs=8, n_held_out=HELD_OUT)
    # Whoever knows the sum of all and of what is seen knows the mean of the ten that are hidden, which is worth 3 %.
    explained = min(history["validation_loss"]) / targets_of(random_cells, tokenizer, objective).var()
    assert 0.93 < explained < 1.1


def test_hidden_bins_cannot_be_read_off_random_data(random_cells, train_on):
    tokenizer, objective = get_tokenizer("binned_expression", VOCAB, n_bins=5), MaskedValuePrediction()
    module = transformer("bin", n_bins=5)
    history = train_on(random_cells, tokenizer, module, objective, epochs=8, n_held_out=HELD_OUT)
    bins = targets_of(random_cells, tokenizer, objective)
    share = np.bincount(bins.long().numpy()) / len(bins)
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
    assert entropy - 0.05 < min(history["validation_loss"]) < entropy + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["autoencoder", "transformer", "autoencoder of counts"])
def test_planted_structure_is_learnt(planted_cells, train_on, architecture):
    tokenizer = get_tokenizer("continuous_projection", VOCAB, transform="counts")
    objective, of_counts = MaskedValuePrediction(mask_ratio=0.25), architecture == "autoencoder of counts"
    likelihood = {"value_loss": "zero_truncated_negative_binomial"}
    module = autoencoder(**likelihood) if of_counts else ARCHITECTURES[architecture]()
    options = {"epochs": 80 if of_counts else 60, "lr": 5e-3, "n_held_out": HELD_OUT}
    loss = min(train_on(planted_cells, tokenizer, module, objective, **options)["validation_loss"])
    # Counts are even from 1 to 10: less than their entropy takes knowledge of the cell. Of two hidden genes of eight,
    # one time in seven they are of one pair.
    variance = targets_of(planted_cells, tokenizer, objective).var()
    assert loss < (np.log(10) - 0.1 if of_counts else 0.4 * variance)


TARGETS = [("values", "value_labels", 0), ("bin_ids", "bin_labels", -100), ("attention_bias", None, 0)]


@pytest.mark.parametrize(
    ("tokenizer", "options"),
    [
        ("rank_value", {"append_eos": True}),
        ("continuous_projection", {"attention_bias": True}),
        ("continuous_projection", {"target_depth": "t4", "append_cls": False}),
        ("binned_expression", {"n_bins": 5}),
    ],
)
@pytest.mark.parametrize("zero_targets", [0.0, 0.8])
def test_batches(random_cells, tokenizer, options, zero_targets):
    special = DEPTH_TOKENS if "target_depth" in options else (EOS_TOKEN,) if "append_eos" in options else ()
    vocab = MEDIANS.with_special_tokens(*special) if special else MEDIANS
    tokenizer = get_tokenizer(tokenizer, vocab, **options)
    measured = np.arange(G) < 50
    counts = random_cells.counts.toarray() * measured
    counts[3] = 0
    block = cells_of(counts, measured).block(np.arange(40))
    plain = tokenizer(block)
    batch = MaskedValuePrediction(mask_ratio=0.6, zero_targets=zero_targets).prepare(block, tokenizer, epoch=0, seed=0)
    assert "labels" not in batch
    assert len({tensor.shape for tensor in batch.values()}) == 1
    for cell in range(40):
        hidden, there = batch["masked_positions"][cell], batch["attention_mask"][cell]
        known = {int(i): p for p, i in enumerate(plain["input_ids"][cell]) if plain["attention_mask"][cell, p]}
        shown = batch["input_ids"][cell, there].tolist()
        added = set(shown) - set(known)
        n_hidden = round(0.6 * (counts[cell] > 0).sum() + 1e-9)
        assert len(shown) == len(known) + len(added)
        assert set(known) < set(shown) or set(known) == set(shown)
        assert len(added) == round(zero_targets * n_hidden)
        assert int(hidden.sum()) == n_hidden + len(added)
        assert not hidden[~there].any()
        assert added <= set(batch["input_ids"][cell, hidden].tolist())
        assert all(counts[cell, gene - vocab.n_special] == 0 and measured[gene - vocab.n_special] for gene in added)
        for name, label, ignored in TARGETS:
            if name in plain:
                truth = torch.zeros_like(batch[name][cell])
                truth[there] = torch.stack([plain[name][cell, known[i]] if i in known else truth[0] * 0 for i in shown])
                assert torch.equal(batch[name][cell, there], truth.masked_fill(hidden, 0)[there])
                if label is not None:
                    assert torch.equal(batch[label][cell], truth.masked_fill(~hidden, ignored).to(batch[label].dtype))
        assert not batch["values"][cell, ~there].any()
        assert not batch["input_ids"][cell, ~there].any()


def test_place_and_number_do_not_tell_which_hidden_genes_are_zero(random_cells):
    tokenizer = get_tokenizer("rank_value", VOCAB, use_medians=False)
    block = random_cells.block(np.arange(400))
    batch = MaskedValuePrediction(mask_ratio=0.5, zero_targets=1.0).prepare(block, tokenizer, epoch=0, seed=0)
    hidden = batch["masked_positions"]
    assert hidden[:, 11:].all()
    assert not hidden[:, :11].any()
    share = (batch["value_labels"][:, 11:] == 0).double().mean(dim=0)
    assert (share - 0.5).abs().max() < 0.12  # five standard errors of 400 cells
    drawn = torch.bincount(batch["input_ids"][:, 11:][batch["value_labels"][:, 11:] == 0], minlength=64)[4:]
    assert drawn.sum() == 4000
    assert (drawn - 4000 / G).abs().max() < 45


def test_training_starts_at_the_mean(random_cells):
    tokenizer, objective = get_tokenizer("continuous_projection", VOCAB), MaskedValuePrediction()
    module = autoencoder().eval()
    objective.initialize(module, random_cells, tokenizer)
    torch.nn.init.zeros_(module.head.decoder.weight)
    batch = objective.prepare(random_cells.block(np.arange(400)), tokenizer, epoch=0, seed=0)
    with torch.no_grad():
        loss, _ = objective.loss(module, batch)
    targets = batch["value_labels"][batch["masked_positions"]]
    torch.testing.assert_close(loss, targets.var(), rtol=0.01, atol=0.0)
    with pytest.raises(OptionError, match="value_loss='poisson' requires integer counts"):
        objective.initialize(autoencoder(value_loss="poisson"), random_cells, tokenizer)


def test_what_cannot_predict_values(random_cells):
    tokenizer, objective = get_tokenizer("continuous_projection", VOCAB), MaskedValuePrediction()
    batch = objective.prepare(random_cells.block(np.arange(4)), tokenizer, epoch=0, seed=0)
    message = "returned no loss for masked values; choose the architecture 'masked_autoencoder', or .*='value'"
    for module in (GenePoolingModel(64, 16, 1), TransformerEncoder(64, 16, 1, 2)):
        with pytest.raises(TrainingError, match=message):
            objective.loss(module, batch)
    with pytest.raises(OptionError, match="GenePoolingModel, which does not predict token values"):
        objective.check_architecture(GenePoolingModel(64, 16, 1))

    class Own(torch.nn.Module):
        def forward(self, input_ids, attention_mask, values=None, labels=None, value_labels=None, **kwargs): ...

    objective.check_architecture(Own)
    objective.check_architecture(Own())
    for name in ("continuous_projection", "binned_expression"):
        whole = get_tokenizer(name, VOCAB, include_zero_genes=True)
        objective.check(whole)
        with pytest.raises(OptionError, match=r"zero_targets=0.5 adds genes .*, but include_zero_genes=True"):
            MaskedValuePrediction(zero_targets=0.5).check(whole)


@pytest.mark.parametrize("zero_targets", [0.0, 0.25, 1.5, 4.0])
@pytest.mark.parametrize("length", [3, 4, 7, 10, 11, 13, 33, None])
def test_no_cell_has_more_tokens_than_promised(random_cells, zero_targets, length):
    """Of cells that express from 5 to 100 percent of the genes, and of those that express as many each."""
    tokenizer = get_tokenizer("continuous_projection", VOCAB, max_len=length)
    uneven = cells_of(np.random.default_rng(0).random((50, G)) < np.linspace(0.05, 1, 50)[:, None])
    for cells, mask_ratio in ((uneven, [0.2, 0.7]), (random_cells, 0.5)):
        objective = MaskedValuePrediction(mask_ratio=mask_ratio, zero_targets=zero_targets)
        batch = objective.prepare(cells.block(np.arange(50)), tokenizer, epoch=0, seed=0)
        longest = batch["attention_mask"].sum(dim=1).max()
        assert longest == batch["input_ids"].shape[1] <= objective.max_tokens(tokenizer)
    if length is None and zero_targets == 4.0:  # no more zeros than there are
        assert longest == 61 == objective.max_tokens(tokenizer)
