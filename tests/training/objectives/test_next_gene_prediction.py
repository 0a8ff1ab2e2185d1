from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

from scforge.data import GeneVocab
from scforge.data.cells import CellSource
from scforge.errors import DataError, OptionError, TrainingError
from scforge.models import AutoregressiveTransformer, GenePoolingModel, TransformerEncoder
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training import NextGenePrediction, TrainingPlan, get_objective
from scforge.training.objectives.next_gene_prediction import bin_means

G, HELD_OUT = 30, 100
VOCAB = GeneVocab.from_genes([f"g{i}" for i in range(G)]).with_special_tokens("<eos>")
CLS, EOS, FIRST = 3, 4, 5


def cells_of(counts: np.ndarray, **obs) -> CellSource:
    matrix = sparse.csr_matrix(counts.astype(np.float32))
    return CellSource(matrix, counts.sum(axis=1).astype(float), vocab=VOCAB, obs=pd.DataFrame(obs) if obs else None)


def tokenizer_of(name: str = "binned_expression", **options):
    return get_tokenizer(name, VOCAB, **{"n_bins": 5, "side": "one", "append_eos": True, **options})


def eight_of_30(n: int = 400) -> CellSource:
    generator = np.random.default_rng(0)
    counts = np.zeros((n, G))
    for row in counts:
        row[generator.choice(G, 8, replace=False)] = generator.integers(1, 5, 8)
    return cells_of(counts)


def model_of(n_bins: int = 5, **options) -> AutoregressiveTransformer:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "max_seq_len": 32, "pooling": "mean", **options}
    return AutoregressiveTransformer(len(VOCAB), n_bins, 32, 2, 2, **options)


QUICK = {"n_held_out": HELD_OUT, "batch_size": 20, "lr": 5e-3}


@pytest.mark.parametrize("order", ["rank", "random"])
def test_random_genes_cannot_be_foretold(train_on, order: str):
    """All genes that have not come are equally likely: nothing is below log of their number."""
    model, objective = model_of(expression_loss_weight=0.0), NextGenePrediction(order=order)
    loss = min(train_on(eight_of_30(), tokenizer_of(), model, objective, epochs=6, **QUICK)["validation_loss"])
    best = sum(np.log(G - i) for i in range(8)) / 9  # EOS costs nothing
    # The standard deviation of the mean is that of a softmax that is off by little; a leak goes to zero.
    assert best - 0.03 < loss < best + 0.4


def test_planted_structure_is_learnt(train_on):
    """Of a pair, which stand together by rank, the second follows on the first."""
    generator = np.random.default_rng(0)
    counts = np.zeros((400, G))
    for row in counts:
        for rank, pair in enumerate(generator.choice(G // 2, 4, replace=False)):
            row[2 * pair], row[2 * pair + 1] = 100 - 10 * rank, 95 - 10 * rank
    # Bins must tell the ranks apart.
    model = model_of(40)
    train_on(cells_of(counts), tokenizer_of(n_bins=40), model, NextGenePrediction(), epochs=10, **QUICK)
    generated = model.generate(200, eos_id=EOS, n_special=FIRST)
    assert (generated.attention_mask.sum(dim=1) == 10).float().mean() > 0.9
    first, second = generated.input_ids[:, 1:9:2] - FIRST, generated.input_ids[:, 2:9:2] - FIRST
    assert ((first % 2 == 0) & (second == first + 1)).float().mean() > 0.9


def test_rank_goes_down_and_ties_change():
    cells, tokenizer = eight_of_30(40), tokenizer_of()
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
    alone = objective.prepare(cells.block(np.array([7])), tokenizer, epoch=0, seed=0)
    assert torch.equal(alone["input_ids"][0], batch["input_ids"][7])
    # Ties are not in the order of the vocabulary.
    ties = batch["values"][:, 1:9].diff(dim=1) == 0
    assert 0.35 < (batch["input_ids"][:, 1:9].diff(dim=1)[ties] > 0).double().mean() < 0.65
    shuffled = NextGenePrediction(order="random").prepare(block, tokenizer, epoch=0, seed=0)
    assert torch.equal(shuffled["input_ids"][:, [0, 9]], batch["input_ids"][:, [0, 9]])
    assert 0.4 < (shuffled["input_ids"][:, 1:9].diff(dim=1) > 0).double().mean() < 0.6
    assert abs(shuffled["values"][:, 1:5].mean() - shuffled["values"][:, 5:9].mean()) < 0.3


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
    # A cell that was cut does not end.
    counts = eight_of_30(4).counts.toarray()
    counts[0, :25] = 1
    tokenizer = tokenizer_of(max_len=12, truncation="highest")
    batch = NextGenePrediction().prepare(cells_of(counts).block(np.arange(4)), tokenizer, epoch=0, seed=0)
    assert ((batch["input_ids"] == EOS).sum(dim=1) == 1).all()
    assert (batch["labels"] == EOS).sum(dim=1).tolist() == [0, 1, 1, 1]


def test_the_module_starts_at_the_frequencies_and_knows_the_bins():
    cells, tokenizer = eight_of_30(50), tokenizer_of()
    model = AutoregressiveTransformer(len(VOCAB), 5, 8, 1, 2)
    NextGenePrediction().initialize(model, cells, tokenizer)
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
    # Bins that nothing is in lie between.
    means = bin_means(cells_of(np.array([[1, 100]] @ np.eye(2, G))), tokenizer_of(n_bins=11), 13)
    assert means[0] == 0
    assert (np.diff(means) >= 0).all()
    assert means[10] == means[12] == pytest.approx(np.log1p(1e4 * 100 / 101), rel=1e-5)


def conditioned(**options) -> tuple[NextGenePrediction, CellSource]:
    cells = cells_of(eight_of_30(6).counts.toarray(), kind=["b", "a", None, "c", "a", "b"])
    return NextGenePrediction(condition_key="kind", **options), cells


def test_classes_of_cells(monkeypatch):
    objective, cells = conditioned()
    found = objective.options_from(cells.column)
    assert found == {"conditions": ["a", "b", "c"]}
    objective = get_objective("next_gene_prediction", **(objective.config() | found))
    assert objective.options_from(cells.column) == {}
    assert objective.model_options() == {"n_conditions": 3}
    objective.bind(cells)
    batch = objective.prepare(cells.block(np.array([3, 2, 0, 1])), tokenizer_of(), epoch=0, seed=0)
    assert batch["condition"].tolist() == [3, 0, 2, 1]
    few, _ = conditioned(conditions=["c", "z"], condition_dropout=0.3)
    few.bind(cells)
    batch = few.prepare(cells.block(np.arange(6)), tokenizer_of(), epoch=0, seed=0)
    assert batch["condition"].tolist() == [0, 0, 0, 1, 0, 0]
    # Classes are dropped in training alone.
    batch = {name: tensor[[3] * 1000] for name, tensor in batch.items()}
    model, seen = model_of(n_conditions=2), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: seen.append(given["condition"]) or forward(**given))
    for training in (True, False):
        few.loss(model.train(training), batch)
    assert 0.6 < seen[0].double().mean() < 0.8
    assert seen[1].all()
    assert batch["condition"].all()


def test_columns_that_are_no_classes():
    objective, cells = conditioned(conditions=["a"])
    with pytest.raises(TrainingError, match="call the bind method"):
        objective.prepare(cells.block(np.arange(2)), tokenizer_of(), epoch=0, seed=0)
    with raises(TrainingError, "conditions"):
        conditioned()[0].bind(cells)
    with raises(DataError, "condition_key"):
        objective.bind(eight_of_30(3))
    with raises(DataError, "condition_key"):
        conditioned(conditions=["B", "T"])[0].bind(cells)
    for values, message in (
        ([None, None], "is missing for all cells"),
        ([0.5, 1.5], "contains non-integer numbers"),
    ):
        with pytest.raises((DataError, OptionError), match=f"condition_key='kind' {message}"):
            conditioned()[0].options_from(lambda name, values=values: pd.Series(values))


def test_what_cannot_predict_the_next_token_is_refused():
    objective = NextGenePrediction()
    for model in (TransformerEncoder(10, 8, 1, 2), GenePoolingModel(10, 8, 1)):
        for of in (model, type(model)):
            with pytest.raises(OptionError, match=f"{type(model).__name__}, which receives the token"):
                objective.check_architecture(of)
        with pytest.raises(OptionError, match="which receives the token"):
            TrainingPlan(model, objective)
    module = model_of()
    batch = objective.prepare(eight_of_30(2).block(np.arange(2)), tokenizer_of(), epoch=0, seed=0)
    module.forward = lambda **given: SimpleNamespace(loss=None)
    with pytest.raises(TrainingError, match="forward returned no loss, although labels were passed"):
        objective.loss(module, batch)
    with pytest.raises(OptionError, match="choose tokenizer='binned_expression'"):
        objective.check(get_tokenizer("continuous_projection", VOCAB))
    with raises(OptionError, "include_zero_genes"):
        objective.check(tokenizer_of(include_zero_genes=True))
