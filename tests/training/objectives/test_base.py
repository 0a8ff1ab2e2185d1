import json

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.stats import entropy as scipy_entropy

from scforge.data import GeneVocab
from scforge.data.cells import CellSource
from scforge.errors import OptionError
from scforge.models import GenePoolingModel, TransformerEncoder
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training import (
    MaskedGenePrediction,
    Objective,
    get_objective,
    list_objectives,
    token_counts,
    token_entropy,
)
from scforge.training.objectives import token_frequencies
from scforge.training.objectives.base import OBJECTIVES
from scforge.training.predict import embed

G, EXPRESSED, HELD_OUT = 60, 20, 150
VOCAB = GeneVocab.from_genes([f"g{i}" for i in range(G)])
HIDING = {"mask_ratio": 0.2, "mask_token_prob": 1.0, "random_token_prob": 0.0}
ARCHITECTURES = {
    "transformer": lambda: TransformerEncoder(len(VOCAB), 16, 1, 2, dropout=0.0, max_seq_len=32),
    "token states": lambda: GenePoolingModel(len(VOCAB), 16, 1, dropout=0.0, max_seq_len=32),
    "weighted sum": lambda: GenePoolingModel(len(VOCAB), 16, 1, dropout=0.0, pooling="weighted_sum"),
}
TOKENIZERS = {"rank_value": {"use_medians": False}, "continuous_projection": {}}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_masked_genes_cannot_be_read_off_random_data(random_cells, train_on, tokenizer, architecture):
    tokenizer, module = get_tokenizer(tokenizer, VOCAB, **TOKENIZERS[tokenizer]), ARCHITECTURES[architecture]()
    objective = MaskedGenePrediction(**HIDING)
    history = train_on(random_cells, tokenizer, module, objective, epochs=10, n_held_out=HELD_OUT)
    loss, entropy = min(history["validation_loss"]), token_entropy(token_counts(random_cells, tokenizer))
    assert entropy == pytest.approx(np.log(G), abs=0.01)
    # Genes that are seen are not the hidden ones: who knows that alone reaches log of the number of the others.
    assert loss > np.log(G - EXPRESSED * 0.8) - 3 / np.sqrt(HELD_OUT * EXPRESSED * 0.2)
    # These models learn not even that from so few cells; a leak goes far below.
    assert loss > entropy - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "architecture"),
    [("rank_value", "transformer"), ("continuous_projection", "transformer"), ("rank_value", "weighted sum")],
)
def test_planted_structure_is_learnt(train_on, tokenizer, architecture):
    """Two groups express either half of the genes."""
    generator = np.random.default_rng(0)
    counts = np.zeros((400 + HELD_OUT, G), dtype=np.float32)
    for i, row in enumerate(counts):
        genes = generator.choice(G // 2, EXPRESSED, replace=False) + (i % 2) * (G // 2)
        row[genes] = generator.permutation(EXPRESSED) + 1
    cells = CellSource(sparse.csr_matrix(counts), counts.sum(axis=1).astype(float))
    tokenizer, module = get_tokenizer(tokenizer, VOCAB, **TOKENIZERS[tokenizer]), ARCHITECTURES[architecture]()
    history = train_on(cells, tokenizer, module, MaskedGenePrediction(**HIDING), epochs=35, n_held_out=HELD_OUT)
    # Knowing the group is worth log 2.
    assert min(history["validation_loss"]) < token_entropy(token_counts(cells, tokenizer)) - 0.4


def test_hidden_genes_stand_last_where_order_tells_them(random_cells):
    tokenizer = get_tokenizer("continuous_projection", VOCAB)
    block = random_cells.block(np.arange(40))
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


def test_loss_starts_at_the_token_entropy(masked_setup, monkeypatch):
    setup = masked_setup
    counts = token_counts(setup.cells, setup.tokenizer)
    np.testing.assert_array_equal(counts, np.append(np.zeros(4), (setup.cells.counts > 0).sum(axis=0)))
    assert token_entropy(counts) == pytest.approx(scipy_entropy(counts))
    setup.objective.initialize(setup.module, setup.cells, setup.tokenizer)
    torch.nn.init.zeros_(setup.module.head.decoder.weight)
    entropy = token_entropy(token_counts(setup.cells, setup.tokenizer))
    batch = setup.objective.prepare(setup.cells.block(np.arange(60)), setup.tokenizer, epoch=0, seed=0)
    with torch.no_grad():
        loss, _ = setup.objective.loss(setup.module, batch)
    assert float(loss) == pytest.approx(entropy, abs=0.1)
    off = MaskedGenePrediction(token_prior=False)
    bias = setup.module.head.decoder.bias.clone()
    off.initialize(setup.module, setup.cells, setup.tokenizer)
    assert torch.equal(setup.module.head.decoder.bias, bias)
    monkeypatch.setattr(token_frequencies, "_MAX_CELLS", 7)
    assert 0 < token_counts(setup.cells, setup.tokenizer).max() <= 7
    assert token_entropy(np.array([0, 3])) == 0.0
    for nothing in ([], [0, 0]):
        with raises(OptionError, "counts"):
            token_entropy(nothing)


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


OPTIONS = {
    "joint_embedding": {"per_batch": True, "batch_key": "batch", "batches": ["x", "y"]},
    "masked_diffusion": {"thinning": (0.2, 0.5), "max_genes": 20, "corrupt": "both"},
    "masked_value_prediction": {"zero_targets": 2.0},
    "neighbor_denoising": {
        "batch_key": "batch",
        "batches": ["x", "y"],
        "labels_key": "group",
        "labels": ["a", "b"],
        "alignment": 0.01,
    },
    "variational": {"thinning": (0.1, 0.9), "labels_key": "group", "labels": ("a", "b"), "kl_warmup": 3},
}


@pytest.mark.parametrize("name", list_objectives())
def test_config_makes_it_again(name):
    for options in ({}, OPTIONS.get(name, {})):
        objective = get_objective(name, **options)
        again = get_objective(name, **json.loads(json.dumps(objective.config())))
        assert repr(again) == repr(objective)
        assert again.config() == objective.config()
        assert set(objective.config()) == set(objective.option_names())
        assert objective.defaults.max_epochs > 0


@pytest.mark.parametrize("name", list_objectives())
def test_what_happens_to_a_cell_depends_on_epoch_seed_and_cell_alone(name, cells, tiny_vocab):
    objective = get_objective(name, **OPTIONS.get(name, {}))
    objective.bind(cells, np.arange(60))
    of_bins = name == "next_gene_prediction"
    kind = "binned_expression" if of_bins else "continuous_projection"
    tokenizer = get_tokenizer(kind, tiny_vocab, append_cls=of_bins)

    def prepared(rows, *, epoch=0, seed=0):
        batch = objective.prepare(cells.block(rows), tokenizer, epoch=epoch, seed=seed)
        # One or several views of the cells.
        return {key: tensor.unflatten(0, (-1, 60)) for key, tensor in batch.items() if key != "batch_shares"}

    order = np.random.default_rng(0).permutation(60)
    first, again, moved = (prepared(rows) for rows in (np.arange(60), np.arange(60), order))
    for key, tensor in first.items():
        assert torch.equal(tensor, again[key])
        assert torch.equal(tensor[:, order], moved[key])
    for change in ({"epoch": 1}, {"seed": 1}):
        other = prepared(np.arange(60), **change)
        # Padding is zero, and does not count.
        one, two = (
            [(batch[key] * torch.arange(batch[key].shape[2])).sum(dim=2) for key in ("input_ids", "values")]
            for batch in (first, other)
        )
        assert not all(map(torch.equal, one, two))


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("joint_embedding", {"weigth": 0.1}, "weigth"),
        ("joint_embedding", {"views": 1}, "views"),
        ("joint_embedding", {"keep_min": 0.9, "keep_max": 0.5}, "keep_min"),
        ("joint_embedding", {"per_batch": True}, "per_batch"),
        ("joint_embedding", {"batch_key": "batch"}, "batch_key"),
        ("joint_embedding", {"batches": ["x"]}, "batches"),
        ("joint_embedding", {"projector": 0}, "projector"),
        ("joint_embedding", {"per_batch": True, "batch_key": "donor", "clusters": "many"}, "clusters"),
        ("joint_embedding", {"clusters": 4}, "clusters"),
        ("masked_gene_prediction", {"mask_ratio": 0}, "mask_ratio"),
        ("masked_value_prediction", {"zero_targets": float("inf")}, "zero_targets"),
        ("masked_diffusion", {"corrupt": "all"}, "corrupt"),
        ("variational", {"free_bits": "some"}, "free_bits"),
        ("variational", {"thinning": (0, 1)}, "thinning"),
        ("variational", {"labels": ["a"]}, "labels"),
        ("variational", {"batch_key": "b", "batches": ["x", "x"]}, "batches"),
        ("variational", {"reconstruction_weight": 0.0}, "reconstruction_weight"),
        ("next_gene_prediction", {"order": "up"}, "order"),
        ("next_gene_prediction", {"conditions": ["a"]}, "conditions"),
        ("next_gene_prediction", {"condition_key": "k", "conditions": "ab"}, "conditions"),
        ("next_gene_prediction", {"condition_dropout": 1.5}, "condition_dropout"),
        ("neighbor_denoising", {"across": -1}, "across"),
        ("neighbor_denoising", {"temperature": "hot"}, "temperature"),
        ("neighbor_denoising", {"alignment": -1}, "alignment"),
        ("neighbor_denoising", {"labels_weight": -1}, "labels_weight"),
        ("neighbor_denoising", {"labels_key": "t", "labels": ["a"]}, "labels_key"),
    ],
)
def test_bad_options(name, options, argument):
    with raises(OptionError, argument):
        get_objective(name, **options)


def test_a_class_that_is_no_whole_objective_is_refused(monkeypatch):
    class WithoutLoss(Objective):
        defaults = MaskedGenePrediction.defaults

        def prepare(self, block, tokenizer, *, epoch, seed):
            return dict(tokenizer(block))

    monkeypatch.setattr(OBJECTIVES, "_entries", dict(OBJECTIVES._entries))
    for cls, message in (
        (type("NoObjective", (), {}), "NoObjective, which is not a subclass of scforge.training.Objective; derive it"),
        (WithoutLoss, "WithoutLoss, which lacks 'loss'; add it"),
    ):
        OBJECTIVES.register(cls.__name__)(cls)
        with pytest.raises(OptionError, match=message):
            get_objective(cls.__name__)
