import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.data import GeneVocab
from scforge.data.cells import CellSource
from scforge.data.sampling import cell_keys
from scforge.errors import DataError, OptionError, ScforgeWarning, TrainingError
from scforge.models import ScDiVaModel, TransformerEncoder
from scforge.tokenizers import get_tokenizer
from scforge.training import MaskedDiffusion, Variational
from scforge.training.objectives.masked_diffusion import diffusion_times

SMALL = {"num_layers": 1, "num_heads": 2, "latent_dim": 4, "norm_style": "pre", "dropout": 0.0}


@pytest.fixture
def tokenizer(entropy_ranked):
    return entropy_ranked


def prepared(cells, tokenizer, rows=None, *, epoch=0, seed=0, **options):
    rows = np.arange(len(cells)) if rows is None else rows
    return MaskedDiffusion(**options).prepare(cells.block(rows), tokenizer, epoch=epoch, seed=seed)


def test_nothing_hidden_is_left_in_the_batch(cells, tokenizer):
    batch = prepared(cells, tokenizer)
    gene, value, there = batch["masked_positions"], batch["masked_values"], batch["attention_mask"]
    assert (batch["input_ids"][gene] == tokenizer.vocab.mask_id).all()
    assert not batch["values"][value].any()
    assert torch.equal(batch["labels"] >= tokenizer.vocab.n_special, gene)
    assert torch.equal(batch["value_labels"] > 0, value)
    assert not (gene | value)[~there].any()
    assert (batch["input_ids"][there] > 0).all()
    assert not batch["input_ids"][~there].any()
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        **dict.fromkeys(("input_ids", "labels", "profile_genes"), torch.int64),
        **dict.fromkeys(("values", "value_labels", "loss_weights", "profile_values"), torch.float32),
        **dict.fromkeys(("attention_mask", "masked_positions", "masked_values"), torch.bool),
    }


def test_without_thinning_the_tokens_are_those_of_the_cell(cells, tokenizer):
    whole = tokenizer(cells.block(np.arange(60)))
    batch = prepared(cells, tokenizer, thinning=None)
    for row in range(60):
        there = batch["attention_mask"][row]
        genes = torch.where(batch["masked_positions"], batch["labels"], batch["input_ids"])[row][there]
        values = torch.where(batch["masked_values"], batch["value_labels"], batch["values"])[row][there]
        seen = whole["attention_mask"][row]
        expected = dict(zip(whole["input_ids"][row][seen].tolist(), whole["values"][row][seen].tolist(), strict=True))
        assert dict(zip(genes.tolist(), values.tolist(), strict=True)) == expected
        clear = ~(batch["masked_positions"] | batch["masked_values"])[row][there]
        order = [gene for gene in whole["input_ids"][row].tolist() if gene in genes[clear].tolist()]
        assert genes[clear].tolist() == order  # what is seen keeps its order
        assert clear.tolist() == sorted(clear.tolist(), reverse=True)  # and stands first


@pytest.mark.parametrize("n_genes", [1, 5])
def test_the_loss_of_genes_is_the_bound(n_genes):
    """Against the integral over t of 1 / t times the expected sum over hidden tokens, by enumeration of all states."""
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(n_genes)]).with_entropies(np.ones(n_genes))
    tokenizer = get_tokenizer("entropy_ranked", vocab)
    cells = CellSource(sparse.csr_matrix(np.ones((4000, n_genes), dtype=np.float32)), np.full(4000, float(n_genes)))
    # Any loss of a token that depends on all that is hidden; large where one token or all are.
    n_hidden = np.array([state.bit_count() for state in range(2**n_genes)])
    losses = np.random.default_rng(0).exponential(size=(2**n_genes, n_genes))
    losses += 10.0 * (n_hidden == 1)[:, None] + 20.0 * (n_hidden == n_genes)[:, None]
    times = (np.arange(100_000) + 0.5) / 100_000
    bound = 0.0
    for state in range(1, 2**n_genes):
        hidden = np.array([state >> i & 1 for i in range(n_genes)], dtype=bool)
        weight = np.mean(times ** (n_hidden[state] - 1) * (1 - times) ** (n_genes - n_hidden[state]))
        bound += weight * losses[state, hidden].sum()
    found, numbers = [], []
    for epoch in range(25):
        batch = prepared(cells, tokenizer, epoch=epoch, thinning=None)
        gene = (batch["labels"] - tokenizer.vocab.n_special).numpy()
        hidden = (gene[:, :, None] == np.arange(n_genes)).any(axis=1)
        numbers.append(hidden.sum(axis=1))
        mean = (losses[hidden @ (1 << np.arange(n_genes))] * hidden).sum(axis=1) / numbers[-1]
        found.append((batch["loss_weights"].numpy() * mean).mean())
    assert np.mean(found) == pytest.approx(bound / n_genes, rel=0.02)
    # Each number of hidden tokens counts the same; one alone does not count 1.386 times as much.
    counted = np.bincount(np.concatenate(numbers), minlength=n_genes + 1) / len(np.concatenate(numbers))
    np.testing.assert_allclose(counted, [0.0, *[1 / n_genes] * n_genes], atol=1e-3)


@pytest.mark.parametrize("corrupt", ["separate", "both"])
def test_each_token_is_hidden_with_the_probability_of_its_time(cells, tokenizer, corrupt):
    whole_ids = tokenizer(cells.block(np.arange(60)))["input_ids"]
    lengths = (whole_ids > 0).sum(dim=1).numpy()
    together, alone, ranks = [], [], []
    for epoch in range(40):
        batch = prepared(cells, tokenizer, epoch=epoch, corrupt=corrupt, thinning=None)
        times = diffusion_times(cell_keys(np.arange(60), seed=0, epoch=epoch, stream=0x64696666))
        gene, value = batch["masked_positions"], batch["masked_values"]
        np.testing.assert_array_equal(value.sum(dim=1), np.floor(times * lengths) + 1)
        assert (batch["loss_weights"] == 1).all()
        # Of both, half of the cells, others in each epoch, have their genes: values are learned given them.
        whole = (gene.any(dim=1) | ~value.any(dim=1)) | (corrupt == "separate")
        assert torch.equal(gene.sum(dim=1)[whole], value.sum(dim=1)[whole])
        alone.append(whole.numpy())
        together.append(float((gene & value).sum() / gene.sum()))
        places = (whole_ids.unsqueeze(2) == batch["labels"].masked_fill(~gene, -1).unsqueeze(1)).any(dim=2).nonzero()
        ranks.append((places[:, 1].numpy() / lengths[places[:, 0]]).mean())
    assert np.mean(together) == pytest.approx(1.0 if corrupt == "both" else 2 / 3, abs=0.02)  # E[t^2] / E[t]
    assert abs(np.mean(ranks) - 0.5) < 0.02, "which tokens are hidden must not depend on their rank"
    if corrupt == "both":
        assert np.abs(np.mean(alone) - 0.5) < 0.05
        assert 0.1 < np.mean(alone, axis=0).min() <= np.mean(alone, axis=0).max() < 0.9


def test_thinning_changes_what_is_seen_and_not_what_is_asked(cells, tokenizer):
    plain, thinned = (prepared(cells, tokenizer, thinning=thinning) for thinning in (None, (0.2, 0.4)))
    for hidden, labels in (("masked_positions", "labels"), ("masked_values", "value_labels")):
        for row in range(60):
            asked = [batch[labels][row][batch[hidden][row]].sort().values for batch in (plain, thinned)]
            assert torch.equal(*asked)
    clear = [b["attention_mask"] & ~b["masked_positions"] & ~b["masked_values"] for b in (plain, thinned)]
    assert clear[1].sum() < 0.8 * clear[0].sum()  # genes that were lost are not there
    assert (thinned["values"][clear[1]] > 0).all()
    lost = thinned["masked_positions"] & ~thinned["masked_values"] & (thinned["values"] == 0)
    assert lost.any()  # a hidden gene, of which only its value in the shallow cell is seen
    assert all(torch.equal(plain[name], thinned[name]) for name in ("loss_weights", "profile_genes", "profile_values"))


def test_the_first_genes_in_the_order_of_the_tokenizer(cells, tokenizer):
    batch = prepared(cells, tokenizer, max_genes=7, thinning=None)
    assert batch["attention_mask"].sum(dim=1).tolist() == [7] * 60
    genes = torch.where(batch["masked_positions"], batch["labels"], batch["input_ids"])
    expected = tokenizer(cells.block(np.arange(60)))["input_ids"][:, :7]
    assert torch.equal(genes.sort(dim=1).values, expected.sort(dim=1).values)
    objective = MaskedDiffusion()
    for mode, most in (("tokens", 9), ("vector", 1200)):
        objective.learn_from(ScDiVaModel(84, 8, 1, 1, latent_dim=2, max_tokens=9, mode=mode, denoising=True))
        assert objective.most_genes == most
    assert MaskedDiffusion(max_genes=9).max_tokens(tokenizer) == 9


def test_loss_is_the_sum_of_its_parts(cells, tokenizer):
    torch.manual_seed(0)
    module = ScDiVaModel(84, 8, **SMALL, max_tokens=80, denoising=True).eval()
    objective = MaskedDiffusion(value_weight=0.3, reconstruction_weight=0.5, beta=0.2)
    batch = objective.prepare(cells.block(np.arange(60)), tokenizer, epoch=0, seed=0)
    loss, parts = objective.loss(module, batch)
    expected = parts["identity"] + 0.3 * parts["value"] + 0.5 * parts["reconstruction"] + 0.2 * parts["kl"]
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert module.variational_layer.mu_projection.weight.grad.abs().max() > 0
    # The identity loss, computed again from the logits.
    names = ("input_ids", "attention_mask", "values", "masked_positions", "masked_values")
    with torch.no_grad():
        logits = module(**{name: batch[name] for name in names}).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    of_cells = losses.sum(dim=1) / batch["masked_positions"].sum(dim=1).clamp(min=1)
    torch.testing.assert_close(parts["identity"], (batch["loss_weights"] * of_cells).mean(), rtol=1e-4, atol=1e-4)
    summary = objective.summarize({name: part.numpy() for name, part in parts.items()})
    assert set(summary) == {"identity", "value", "reconstruction", "kl", "active_units"}
    plain = MaskedDiffusion(reconstruction_weight=0.0)
    batch = plain.prepare(cells.block(np.arange(60)), tokenizer, epoch=0, seed=0)
    assert "profile_genes" not in batch
    assert set(plain.loss(module, batch)[1]) == {"identity", "value"}


def test_a_model_starts_at_what_is_known_of_the_cells_and_tells_of_cut_ones(cells, tokenizer):
    module = ScDiVaModel(84, 8, **SMALL, max_tokens=20, denoising=True)
    objective = MaskedDiffusion()
    objective.learn_from(module)
    with pytest.warns(ScforgeWarning, match=r"max_tokens=20 truncates \d+% of the cells .* learns only the first 20 "):
        objective.initialize(module, cells, tokenizer)
    tokens = tokenizer(cells.block(np.arange(60)))
    lengths = tokens["attention_mask"].sum(dim=1).clamp(max=20).float()
    assert module.length_quantiles[[0, 50, 100]].tolist() == lengths.quantile(torch.tensor([0, 0.5, 1])).tolist()
    assert module.token_prior.exp()[:4].max() < 0.001
    top = torch.bincount(tokens["input_ids"][:, :20].flatten(), minlength=84)[4:].argmax()
    assert module.token_prior[4:].argmax() == top
    assert module.value_head.decoder.bias.item() == pytest.approx(float(tokens["values"][:, :20].mean()), rel=1e-4)
    # Where nothing is cut, nothing is said.
    longest = int(tokens["attention_mask"].sum(dim=1).max())
    module = ScDiVaModel(84, 8, **SMALL, max_tokens=80, denoising=True)
    MaskedDiffusion(max_genes=longest).initialize(module, cells, tokenizer)
    with pytest.warns(
        ScforgeWarning, match=f"max_genes={longest - 1} truncates .* increase max_genes to use complete cells"
    ):
        MaskedDiffusion(max_genes=longest - 1).initialize(module, cells, tokenizer)


def test_the_decoder_is_told_the_batch(cells, tokenizer):
    objective = MaskedDiffusion(batch_key="batch", **MaskedDiffusion(batch_key="batch").options_from(cells.column))
    assert objective.model_options() == {"denoising": True, "n_batches": 2}
    assert MaskedDiffusion().model_options() == {"denoising": True}
    with pytest.raises(TrainingError, match="the classes in column 'batch' are unknown; call the bind method"):
        objective.prepare(cells.block(np.arange(60)), tokenizer, epoch=0, seed=0)
    objective.bind(cells, np.arange(60))
    batch = objective.prepare(cells.block(np.array([3, 40])), tokenizer, epoch=0, seed=0)
    assert batch["batch"].tolist() == [0, 1]
    torch.manual_seed(0)
    module = ScDiVaModel(84, 8, **SMALL, max_tokens=80, denoising=True, n_batches=2).eval()
    torch.nn.init.normal_(module.batch_integration_head.batch_embedding.weight, std=100.0)
    one = objective.loss(module, batch)[1]["reconstruction"]
    other = objective.loss(module, {**batch, "batch": 1 - batch["batch"]})[1]["reconstruction"]
    assert not torch.isclose(one, other)
    with pytest.raises(DataError, match="30 of 60 cells have batches that are unknown to the model"):
        MaskedDiffusion(batch_key="batch", batches=["x"]).bind(cells, np.arange(60))


@pytest.mark.slow
@pytest.mark.parametrize("position_embedding", ["none", "rotary"])
def test_random_data_stay_at_chance(position_embedding):
    """Cells in which no gene tells of another, all with one library size, and each seen once."""
    n_genes, n_batch, n_steps = 40, 64, 120
    expressed = np.random.default_rng(1).random((n_steps * n_batch + 2048, n_genes)) < 0.3
    counts = np.where(expressed, np.random.default_rng(2).choice([1.0, 10.0], expressed.shape), 0).astype(np.float32)
    cells = CellSource(sparse.csr_matrix(counts), np.full(len(counts), 1000.0))
    entropies = np.random.default_rng(0).uniform(0.2, 1.0, n_genes)
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(n_genes)]).with_entropies(entropies)
    tokenizer, objective = get_tokenizer("entropy_ranked", vocab), MaskedDiffusion(thinning=None)
    torch.manual_seed(0)
    module = ScDiVaModel(44, 32, **SMALL, max_tokens=40, denoising=True, position_embedding=position_embedding)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
    for rows in np.split(np.arange(n_steps * n_batch), n_steps):
        loss, _ = objective.loss(module, objective.prepare(cells.block(rows), tokenizer, epoch=0, seed=0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fresh = objective.prepare(cells.block(np.arange(len(cells) - 2048, len(cells))), tokenizer, epoch=0, seed=0)
    with torch.no_grad():
        parts = objective.loss(module.eval(), fresh)[1]
    # Who knows nothing but which genes are visible; and the variance of the two values there are.
    visible = ((fresh["input_ids"] >= 4) & ~fresh["masked_positions"]).sum(dim=1)
    n_hidden = fresh["masked_positions"].sum(dim=1)
    chance = (fresh["loss_weights"] * (n_genes - visible).log() * (n_hidden > 0)).mean()
    assert -0.03 < float(parts["identity"] - chance) < 0.15
    spread = fresh["value_labels"][fresh["masked_values"]].var()
    weight = (fresh["loss_weights"] * (n_hidden > 0)).mean()
    assert float(parts["value"] / (weight * spread)) > 0.93


@pytest.mark.parametrize("mode", ["vector", "tokens"])
@pytest.mark.parametrize("objective", [MaskedDiffusion(), Variational(thinning=(1e-6, 1e-6))])
def test_cells_of_which_nothing_is_seen_can_be_trained_on(cells, tokenizer, objective, mode):
    torch.manual_seed(0)
    options = {"latent_dim": 4, "mode": mode, "denoising": isinstance(objective, MaskedDiffusion), "dropout": 0.0}
    module = ScDiVaModel(84, 8, 6, 2, **options, max_tokens=80).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for epoch in range(8):
        batch = objective.prepare(cells.block(np.arange(60)), tokenizer, epoch=epoch, seed=0)
        if isinstance(objective, MaskedDiffusion):
            # All of the first cell is hidden, whatever its time.
            batch["masked_values"][0] = batch["attention_mask"][0]
            batch["values"][0] = 0.0
        else:
            assert not batch["attention_mask"].any()
        loss, _ = objective.loss(module, batch)
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert max(float(gradient.abs().max()) for gradient in gradients) < 1e3
        optimizer.step()
    assert all(bool(weight.isfinite().all()) for weight in module.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("continuous_projection", {"include_zero_genes": True}, "include_zero_genes=True"),
        ("rank_value", {"append_cls": True}, "append_cls=False"),
        ("continuous_projection", {"transform": "counts"}, "predicts log1p CP10K values"),
        ("binned_expression", {}, "predicts log1p CP10K values"),
    ],
)
def test_what_does_not_fit(tiny_vocab, name, options, message):
    with pytest.raises(OptionError, match=message):
        MaskedDiffusion().check(get_tokenizer(name, tiny_vocab, **{"append_cls": False, **options}))
    MaskedDiffusion().check(get_tokenizer("rank_value", tiny_vocab, append_cls=False))
    MaskedDiffusion().check_architecture(ScDiVaModel)
    with pytest.raises(OptionError, match="does not accept loss_weights, masked_values and target"):
        MaskedDiffusion().check_architecture(TransformerEncoder)
