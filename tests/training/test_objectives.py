"""What the objectives learn, and what they must not be able to learn."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.data import CellSource, GeneVocab
from scforge.errors import OptionError
from scforge.models import GenePoolingModel, TransformerEncoder
from scforge.tokenizers import get_tokenizer
from scforge.training import (
    CellDataModule,
    JointEmbedding,
    MaskedGenePrediction,
    Objective,
    TrainingPlan,
    embed,
    fit,
    get_objective,
    list_objectives,
    token_counts,
    token_entropy,
)
from scforge.training.objectives.registry import OBJECTIVES

G, EXPRESSED, TRAIN, HELD_OUT = 60, 20, 400, 150
VOCAB = GeneVocab.from_genes([f"g{i}" for i in range(G)])


def cells_of(counts: np.ndarray) -> CellSource:
    matrix = sparse.csr_matrix(counts.astype(np.float32))
    return CellSource(matrix, counts.sum(axis=1).astype(float))


def random_cells() -> CellSource:
    """Any genes with any ranks: nothing about a gene follows from the others."""
    generator = np.random.default_rng(0)
    counts = np.zeros((TRAIN + HELD_OUT, G))
    for row in counts:
        row[generator.choice(G, EXPRESSED, replace=False)] = generator.permutation(EXPRESSED) + 1
    return cells_of(counts)


def planted_cells() -> CellSource:
    """Two groups that express either half of the genes."""
    generator = np.random.default_rng(0)
    counts = np.zeros((TRAIN + HELD_OUT, G))
    for i, row in enumerate(counts):
        genes = generator.choice(G // 2, EXPRESSED, replace=False) + (i % 2) * (G // 2)
        row[genes] = generator.permutation(EXPRESSED) + 1
    return cells_of(counts)


def held_out_loss(cells: CellSource, tokenizer, module, epochs: int) -> tuple[float, float, float]:
    """Train on some cells; return the lowest loss on others, their number of labels, and the entropy of tokens."""
    torch.manual_seed(0)
    objective = MaskedGenePrediction(mask_ratio=0.2, mask_token_prob=1.0, random_token_prob=0.0)
    objective.initialise(module, cells, tokenizer)
    data = CellDataModule(
        cells, tokenizer, objective,
        train_rows=np.arange(TRAIN), validation_rows=np.arange(TRAIN, TRAIN + HELD_OUT), batch_size=50,
    )  # fmt: skip
    plan = TrainingPlan(module, objective, lr=1e-2)
    result = fit(plan, data, max_epochs=epochs, early_stopping=False, progress_bar=False, accelerator="cpu")
    entropy = token_entropy(token_counts(cells, tokenizer))
    return min(result.history["validation_loss"]), HELD_OUT * EXPRESSED * 0.2, entropy


ARCHITECTURES = {
    "transformer": lambda: TransformerEncoder(len(VOCAB), 16, 1, 2, dropout=0.0, max_seq_len=32),
    "token states": lambda: GenePoolingModel(len(VOCAB), 16, 1, dropout=0.0, max_seq_len=32),
    "weighted sum": lambda: GenePoolingModel(len(VOCAB), 16, 1, dropout=0.0, pooling="weighted_sum"),
}
TOKENIZERS = {"rank_value": {"use_medians": False}, "continuous_projection": {}}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_masked_genes_cannot_be_read_off_random_data(tokenizer, architecture):
    tokenizer = get_tokenizer(tokenizer, VOCAB, **TOKENIZERS[tokenizer])
    loss, n, entropy = held_out_loss(random_cells(), tokenizer, ARCHITECTURES[architecture](), epochs=10)
    assert entropy == pytest.approx(np.log(G), abs=0.01)
    # Genes that are seen are not the hidden ones: who knows that alone reaches log of the number of the others.
    assert loss > np.log(G - EXPRESSED * 0.8) - 3 / np.sqrt(n)
    # These models learn not even that from so few cells; a leak goes far below.
    assert loss > entropy - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "architecture"),
    [("rank_value", "transformer"), ("continuous_projection", "transformer"), ("rank_value", "weighted sum")],
)
def test_planted_structure_is_learnt(tokenizer, architecture):
    tokenizer = get_tokenizer(tokenizer, VOCAB, **TOKENIZERS[tokenizer])
    loss, _, entropy = held_out_loss(planted_cells(), tokenizer, ARCHITECTURES[architecture](), epochs=35)
    assert loss < entropy - 0.4  # knowing the group is worth log 2


def test_hidden_genes_stand_last_where_order_tells_them():
    tokenizer = get_tokenizer("continuous_projection", VOCAB)
    cells = random_cells()
    block = cells.block(np.arange(40))
    batch = MaskedGenePrediction(mask_ratio=0.3).prepare(block, tokenizer, epoch=0, seed=0)
    plain = tokenizer(block)
    n_hidden = round(EXPRESSED * 0.3)
    labels, ids = batch["labels"], batch["input_ids"]
    assert (labels[:, -n_hidden:] >= 4).all()
    assert (labels[:, :-n_hidden] == -100).all()
    assert (ids[:, 0] == 3).all()
    seen = ids[:, 1:-n_hidden]
    assert (seen.diff(dim=1) > 0).all()
    assert not batch["values"][:, -n_hidden:].any()
    for i in range(40):
        assert sorted([*seen[i].tolist(), *labels[i, -n_hidden:].tolist()]) == plain["input_ids"][i, 1:].tolist()
        by_gene = dict(zip(plain["input_ids"][i].tolist(), plain["values"][i].tolist(), strict=True))
        assert batch["values"][i, 1:-n_hidden].tolist() == [by_gene[gene] for gene in seen[i].tolist()]
    steps = labels[:, -n_hidden:].diff(dim=1)
    assert 0.4 < (steps > 0).double().mean() < 0.6, "hidden genes must be in random order"
    assert torch.equal(batch["masked_positions"], labels != -100)


def test_loss_starts_at_the_token_entropy(masked_setup):
    setup = masked_setup
    setup.objective.initialise(setup.module, setup.cells, setup.tokenizer)
    torch.nn.init.zeros_(setup.module.head.decoder.weight)
    entropy = token_entropy(token_counts(setup.cells, setup.tokenizer))
    batch = setup.objective.prepare(setup.cells.block(np.arange(60)), setup.tokenizer, epoch=0, seed=0)
    with torch.no_grad():
        loss, _ = setup.objective.loss(setup.module, batch)
    assert float(loss) == pytest.approx(entropy, abs=0.1)
    off = MaskedGenePrediction(token_prior=False)
    bias = setup.module.head.decoder.bias.clone()
    off.initialise(setup.module, setup.cells, setup.tokenizer)
    assert torch.equal(setup.module.head.decoder.bias, bias)


@pytest.mark.slow
def test_joint_embedding_separates_groups_and_does_not_collapse(setup, tiny_adata):
    result = setup.fit(setup.plan(schedule="one_cycle"), max_epochs=150, early_stopping=False)
    z = embed(setup.module, setup.cells, setup.tokenizer)
    a, b = (z[tiny_adata.obs["group"] == group] for group in ("a", "b"))
    axis = a.mean(axis=0) - b.mean(axis=0)
    gap = np.linalg.norm(axis)
    within = max((part @ axis).std() / gap for part in (a, b))
    assert gap > 4 * within
    assert result.history["validation_spread"][-1] > 0.5
    assert np.linalg.matrix_rank(np.cov(z.T), tol=1e-4) == 4
    assert result.history["train_agreement"][-1] < 0.5 * result.history["validation_spread"][-1] ** 2


def test_joint_embedding_loss_by_hand(setup):
    setup.module.eval()
    block = setup.cells.block(np.arange(12))
    batch = setup.objective.prepare(block, setup.tokenizer, epoch=0, seed=0)
    with torch.no_grad():
        torch.manual_seed(5)
        loss, figures = setup.objective.loss(setup.module, batch)
        z = setup.module.encode(**batch)
        # Outside of training the directions are always the same.
        noise = torch.randn(z.shape[1], 32, generator=torch.Generator().manual_seed(0))
        sigreg = setup.objective._sigreg.compute(torch.stack([z[:12], z[12:]]), noise)
    middle = (z[:12] + z[12:]) / 2
    agreement = ((z[:12] - middle).square().mean() + (z[12:] - middle).square().mean()) / 2
    torch.testing.assert_close(loss, 0.95 * agreement + 0.05 * sigreg)
    torch.testing.assert_close(figures["agreement"], agreement)


@pytest.mark.parametrize("name", list_objectives())
def test_config_makes_it_again(name):
    objective = get_objective(name)
    again = get_objective(name, **json.loads(json.dumps(objective.config())))
    assert repr(again) == repr(objective)
    assert set(objective.config()) == set(objective.option_names())
    assert objective.defaults.max_epochs > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JointEmbedding(views=1), "views=1"),
        (lambda: JointEmbedding(keep_min=0.0), "keep_min=0.0"),
        (lambda: JointEmbedding(keep_min=0.9, keep_max=0.5), "keep_min=0.9 and keep_max=0.5"),
        (lambda: JointEmbedding(gene_dropout=1.0), "gene_dropout=1.0"),
        (lambda: JointEmbedding(weight=1.0), "weight=1.0"),
        (lambda: MaskedGenePrediction(mask_ratio=0), "mask_ratio=0"),
        (lambda: get_objective("joint_embeddin"), "did you mean 'joint_embedding'"),
        (lambda: get_objective("joint_embedding", weigth=0.1), "did you mean 'weight'"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_a_class_that_is_no_whole_objective_is_refused(monkeypatch):
    class NoObjective:
        pass

    class WithoutLoss(Objective):
        defaults = MaskedGenePrediction.defaults

        def prepare(self, block, tokenizer, *, epoch, seed):
            return dict(tokenizer(block))

    monkeypatch.setattr(OBJECTIVES, "_entries", dict(OBJECTIVES._entries))
    for name, cls, message in (
        ("nothing_of_it", NoObjective, "NoObjective, which is no subclass of scforge.training.Objective; derive it"),
        ("half_of_it", WithoutLoss, "WithoutLoss, which does not define 'loss'; add it"),
    ):
        OBJECTIVES.register(name)(cls)
        with pytest.raises(OptionError, match=message):
            get_objective(name)
