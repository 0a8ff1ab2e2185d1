"""Next-gene prediction: the order of genes, labels, classes of cells, and what can and cannot be learnt."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

from scforge.data import CellSource, GeneVocab
from scforge.errors import DataError, OptionError, TrainingError
from scforge.models import AutoregressiveTransformer, GenePoolingModel, TransformerEncoder
from scforge.tokenizers import get_tokenizer
from scforge.training import CellDataModule, NextGenePrediction, TrainingPlan, fit, get_objective
from scforge.training.objectives.next_gene_prediction import bin_means

G, TRAIN, HELD_OUT = 30, 300, 100
VOCAB = GeneVocab.from_genes([f"g{i}" for i in range(G)]).with_special_tokens("<eos>")
CLS, EOS, FIRST = 3, 4, 5


def cells_of(counts: np.ndarray, **obs) -> CellSource:
    matrix = sparse.csr_matrix(counts.astype(np.float32))
    return CellSource(matrix, counts.sum(axis=1).astype(float), vocab=VOCAB, obs=pd.DataFrame(obs) if obs else None)


def tokenizer_of(name: str = "binned_expression", **options):
    return get_tokenizer(name, VOCAB, **{"n_bins": 5, "side": "one", "append_eos": True, **options})


def random_cells(n: int = TRAIN + HELD_OUT, expressed: int = 8, highest: int = 4) -> CellSource:
    generator = np.random.default_rng(0)
    counts = np.zeros((n, G))
    for row in counts:
        row[generator.choice(G, expressed, replace=False)] = generator.integers(1, highest + 1, expressed)
    return cells_of(counts)


def held_out_loss(
    cells: CellSource, epochs: int, expression_loss_weight: float = 0.0, **options
) -> tuple[float, AutoregressiveTransformer]:
    """Train on some cells; return the lowest loss of genes on others, and the model."""
    torch.manual_seed(0)
    model = AutoregressiveTransformer(
        len(VOCAB),
        5,
        32,
        2,
        2,
        dropout=0.0,
        max_seq_len=32,
        pooling="mean",
        expression_loss_weight=expression_loss_weight,
    )
    objective, tokenizer = NextGenePrediction(**options), tokenizer_of()
    objective.initialise(model, cells, tokenizer)
    data = CellDataModule(
        cells, tokenizer, objective,
        train_rows=np.arange(TRAIN), validation_rows=np.arange(TRAIN, TRAIN + HELD_OUT), batch_size=20,
    )  # fmt: skip
    plan = TrainingPlan(model, objective, lr=5e-3)
    result = fit(plan, data, max_epochs=epochs, early_stopping=False, progress_bar=False, accelerator="cpu")
    return min(result.history["validation_loss"]), model


@pytest.mark.parametrize("order", ["rank", "random"])
def test_random_genes_cannot_be_foretold(order: str):
    """All genes that have not come are equally likely: nothing is below log of their number."""
    expressed = 8
    loss, _ = held_out_loss(random_cells(expressed=expressed), epochs=6, order=order)
    best = sum(np.log(G - i) for i in range(expressed)) / (expressed + 1)  # EOS costs nothing
    # The standard deviation of the mean is that of a softmax that is off by little; a leak goes to zero.
    assert best - 0.03 < loss < best + 0.4


def test_planted_structure_is_learnt():
    """Of a pair, which stand together by rank, the second follows on the first."""
    generator = np.random.default_rng(0)
    counts = np.zeros((TRAIN + HELD_OUT, G))
    for row in counts:
        for rank, pair in enumerate(generator.choice(G // 2, 4, replace=False)):
            row[2 * pair], row[2 * pair + 1] = 100 - 10 * rank, 95 - 10 * rank
    # Bins must tell the ranks apart.
    cells = cells_of(counts)
    torch.manual_seed(0)
    tokenizer = tokenizer_of(n_bins=40)
    model = AutoregressiveTransformer(len(VOCAB), 40, 32, 2, 2, dropout=0.0, max_seq_len=32, pooling="mean")
    objective = NextGenePrediction()
    data = CellDataModule(cells, tokenizer, objective, train_rows=np.arange(TRAIN), validation_rows=[], batch_size=20)
    plan = TrainingPlan(model, objective, lr=5e-3)
    fit(plan, data, max_epochs=10, early_stopping=False, progress_bar=False, accelerator="cpu")
    generated = model.generate(200, eos_id=EOS, n_special=FIRST)
    assert (generated.attention_mask.sum(dim=1) == 10).float().mean() > 0.9
    first, second = generated.input_ids[:, 1:9:2] - FIRST, generated.input_ids[:, 2:9:2] - FIRST
    assert ((first % 2 == 0) & (second == first + 1)).float().mean() > 0.9


def test_rank_goes_down_and_ties_change():
    cells, tokenizer = random_cells(40), tokenizer_of()
    block = cells.block(np.arange(40))
    plain, objective = tokenizer(block), NextGenePrediction()
    batch = objective.prepare(block, tokenizer, epoch=0, seed=0)
    assert (batch["input_ids"][:, 0] == CLS).all()
    assert (batch["input_ids"][:, 9] == EOS).all()
    assert (batch["values"][:, 1:9].diff(dim=1) <= 0).all()
    assert torch.equal(batch["values"], batch["bin_ids"].float())
    for row in range(40):
        before = dict(zip(plain["input_ids"][row].tolist(), plain["bin_ids"][row].tolist(), strict=True))
        after = dict(zip(batch["input_ids"][row].tolist(), batch["bin_ids"][row].tolist(), strict=True))
        assert before == after
    again = objective.prepare(block, tokenizer, epoch=0, seed=0)
    alone = objective.prepare(cells.block(np.array([7])), tokenizer, epoch=0, seed=0)
    assert torch.equal(again["input_ids"], batch["input_ids"])
    assert torch.equal(alone["input_ids"][0], batch["input_ids"][7])
    for other in ({"epoch": 1, "seed": 0}, {"epoch": 0, "seed": 1}):
        assert not torch.equal(objective.prepare(block, tokenizer, **other)["input_ids"], batch["input_ids"])
    # Ties are not in the order of the vocabulary.
    ties = batch["values"][:, 1:9].diff(dim=1) == 0
    assert 0.35 < (batch["input_ids"][:, 1:9].diff(dim=1)[ties] > 0).double().mean() < 0.65


def test_random_order():
    cells, tokenizer = random_cells(60), tokenizer_of()
    block = cells.block(np.arange(60))
    batch = NextGenePrediction(order="random").prepare(block, tokenizer, epoch=0, seed=0)
    assert (batch["input_ids"][:, 0] == CLS).all()
    assert (batch["input_ids"][:, 9] == EOS).all()
    assert 0.4 < (batch["input_ids"][:, 1:9].diff(dim=1) > 0).double().mean() < 0.6
    values = batch["values"][:, 1:9]
    assert abs(values[:, :4].mean() - values[:, 4:].mean()) < 0.3


def test_tokenizers_that_rank_keep_their_order():
    vocab = GeneVocab.from_genes(["A", "B", "C"])
    tokenizer = get_tokenizer("rank_value", vocab, use_medians=False)
    tokens = tokenizer(sparse.csr_matrix([[1, 9, 1]]))
    assert NextGenePrediction().arrange(tokens, tokenizer, np.arange(1), epoch=0, seed=0) is tokens


def test_labels_are_genes_and_the_end():
    cells = cells_of(np.array([[1, 2, 0, 3], [0, 5, 0, 0]] @ np.eye(4, G)))
    batch = NextGenePrediction().prepare(cells.block(np.arange(2)), tokenizer_of(), epoch=0, seed=0)
    assert batch["labels"].tolist() == [[-100, FIRST + 3, FIRST + 1, FIRST, EOS], [-100, FIRST + 1, EOS, -100, -100]]
    assert batch["bin_ids"][0, 0] == batch["bin_ids"][0, 4] == 0
    without = NextGenePrediction().prepare(cells.block(np.arange(2)), tokenizer_of(append_eos=False), epoch=0, seed=0)
    assert (without["labels"] != EOS).all()


def test_the_module_starts_at_the_frequencies_and_knows_the_bins():
    cells, tokenizer = random_cells(50), tokenizer_of()
    model = AutoregressiveTransformer(len(VOCAB), 5, 8, 1, 2)
    NextGenePrediction().initialise(model, cells, tokenizer)
    bias = model.head.decoder.bias.detach().exp()
    assert float(bias[EOS]) == pytest.approx(51 / (50 * 9 + len(VOCAB)))
    assert float(bias.sum()) == pytest.approx(1.0)
    means = bin_means(cells, tokenizer)
    assert model.bin_values.tolist() == means.tolist()
    tokens = tokenizer(cells.block(np.arange(50)))
    counts = cells.counts.toarray()
    values = np.log1p(counts / counts.sum(axis=1, keepdims=True) * 1e4)
    for number in range(1, 5):
        rows, places = np.nonzero(tokens["bin_ids"].numpy() == number)
        genes = tokens["input_ids"].numpy()[rows, places] - FIRST
        assert means[number] == pytest.approx(values[rows, genes].mean(), rel=1e-5)


def test_bins_that_nothing_is_in_lie_between():
    cells = cells_of(np.array([[1, 100]] @ np.eye(2, G)))
    means = bin_means(cells, tokenizer_of(n_bins=11), 13)
    assert means[0] == 0
    assert (np.diff(means) >= 0).all()
    assert means[10] == means[12] == pytest.approx(np.log1p(1e4 * 100 / 101), rel=1e-5)


def conditioned(**options) -> tuple[NextGenePrediction, CellSource]:
    cells = cells_of(random_cells(6).counts.toarray(), kind=["b", "a", None, "c", "a", "b"])
    return NextGenePrediction(condition_key="kind", **options), cells


def test_classes_of_cells():
    objective, cells = conditioned()
    found = objective.options_from(cells.column)
    assert found == {"conditions": ["a", "b", "c"]}
    objective = get_objective("next_gene_prediction", **(objective.config() | found))
    assert objective.options_from(cells.column) == {}
    assert objective.model_options() == {"n_conditions": 3}
    assert json.loads(json.dumps(objective.config())) == objective.config()
    data = CellDataModule(cells, tokenizer_of(), objective, batch_size=6, validation_size=0.4)
    batch = objective.prepare(data.bound.block(np.array([3, 2, 0, 1])), tokenizer_of(), epoch=0, seed=0)
    assert batch["condition"].tolist() == [3, 0, 2, 1]
    few, cells = conditioned(conditions=["c", "z"])
    few.bind(cells)
    batch = few.prepare(cells.block(np.arange(6)), tokenizer_of(), epoch=0, seed=0)
    assert batch["condition"].tolist() == [0, 0, 0, 1, 0, 0]


def test_classes_are_dropped_in_training_alone():
    class Recorder(torch.nn.Module):
        predicts_next = True

        def forward(self, condition, **batch):
            self.seen = condition
            return AutoregressiveTransformer(10, 5, 8, 1, 2)(torch.ones(1, 2).long(), torch.ones(1, 2), labels=None)

    module, batch = Recorder(), {"condition": torch.ones(1000, dtype=torch.int64)}
    objective = NextGenePrediction(condition_key="kind", conditions=["a"], condition_dropout=0.3)
    torch.manual_seed(0)
    with pytest.raises(TrainingError, match="no loss"):
        objective.loss(module.train(), batch)
    assert 0.6 < module.seen.double().mean() < 0.8
    assert batch["condition"].all()
    with pytest.raises(TrainingError, match="no loss"):
        objective.loss(module.eval(), batch)
    assert module.seen.all()


def test_cells_must_be_known_before_batches_are_made():
    objective, cells = conditioned(conditions=["a"])
    with pytest.raises(TrainingError, match="call bind"):
        objective.prepare(cells.block(np.arange(2)), tokenizer_of(), epoch=0, seed=0)
    with pytest.raises(TrainingError, match="conditions are not known yet"):
        conditioned()[0].bind(cells)
    with pytest.raises(DataError, match="condition_key='kind': 'kind' is not a column of obs"):
        objective.bind(random_cells(3))


@pytest.mark.parametrize("model", [TransformerEncoder(10, 8, 1, 2), GenePoolingModel(10, 8, 1)])
def test_models_that_see_the_next_token_are_refused(model: torch.nn.Module):
    for of in (model, type(model)):
        with pytest.raises(OptionError, match=f"does not see the next token, which {type(model).__name__} does"):
            NextGenePrediction().check_architecture(of)
    with pytest.raises(OptionError, match="does not see the next token"):
        NextGenePrediction().loss(model, {})


def test_tokenizers_without_bins_are_refused():
    objective = NextGenePrediction()
    with pytest.raises(OptionError, match="choose tokenizer='binned_expression'"):
        objective.check(get_tokenizer("continuous_projection", VOCAB))
    with pytest.raises(OptionError, match="include_zero_genes=True"):
        objective.check(tokenizer_of(include_zero_genes=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "up"}, "order='up' is not known"),
        ({"condition_key": 3}, "condition_key=3 is not the name of a column"),
        ({"conditions": ["a"]}, "needs condition_key"),
        ({"condition_key": "k", "conditions": "ab"}, "conditions='ab' is not a list"),
        ({"condition_key": "k", "conditions": ["a", "a"]}, "names a class twice"),
        ({"condition_dropout": 1.5}, "condition_dropout=1.5"),
        ({"token_prior": 1}, "token_prior=1"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(OptionError, match=message):
        NextGenePrediction(**options)


def test_a_column_without_values():
    cells = cells_of(random_cells(2).counts.toarray(), kind=[None, None])
    with pytest.raises(OptionError, match="condition_key='kind' has no value for any cell"):
        NextGenePrediction(condition_key="kind").options_from(cells.column)


def test_a_cell_that_was_cut_does_not_end():
    cells = random_cells(n=4, expressed=8)
    counts = cells.counts.toarray()
    counts[0, :25] = 1
    cells = cells_of(counts)
    tokenizer = tokenizer_of(max_len=12, truncation="highest")
    batch = NextGenePrediction().prepare(cells.block(np.arange(4)), tokenizer, epoch=0, seed=0)
    assert ((batch["input_ids"] == EOS).sum(dim=1) == 1).all()
    assert (batch["labels"] == EOS).sum(dim=1).tolist() == [0, 1, 1, 1]


@pytest.mark.slow
def test_lengths_of_cells_are_learnt():
    """The end of a cell comes as often as it does, also where cells of like length could share a batch."""
    generator = np.random.default_rng(0)
    counts = np.zeros((400, G))
    for row in counts:
        row[generator.choice(G, generator.integers(3, 26), replace=False)] = 1
    _, model = held_out_loss(cells_of(counts), epochs=8, expression_loss_weight=1.0)
    new = model.eval().generate(300, seed=1, eos_id=EOS, n_special=FIRST)
    n_genes = (new.input_ids >= FIRST).sum(dim=1).double()
    assert abs(n_genes.mean() - counts.sum(axis=1).mean()) < 2.0
    assert n_genes.std() > 4.0


def test_data_without_a_known_class_are_refused():
    objective = NextGenePrediction(condition_key="kind", conditions=["B", "T"])
    cells = cells_of(np.ones((3, G)), kind=["b", "t", "t"])
    with pytest.raises(DataError, match="condition_key='kind': no cell has one of the classes .*'B', 'T'"):
        objective.bind(cells)


def test_numbers_are_no_classes():
    with pytest.raises(OptionError, match="condition_key='age' holds numbers, not classes"):
        NextGenePrediction(condition_key="age").options_from(lambda name: pd.Series([0.5, 1.5]))
