"""What every registered architecture promises. A new one is covered by itself, and better with a line in OPTIONS."""

import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.models import CellModule, count_parameters, get_model, list_models
from scforge.models.components.gene_vectors import fill_gene_vectors
from scforge.models.registry import MODELS, check_model_options, option_names
from scforge.testing import check_model, raises

VOCAB, DIM, LEARNED = 60, 7, 10
SMALL = {"hidden_dim": 16, "num_layers": 2, "dropout": 0.1}
HEADS = {**SMALL, "num_heads": 4}
ENCODER = {"encoder_dim": 16, "encoder_layers": 2, "encoder_heads": 4, "decoder_layers": 1}
GENEFORMER = {**HEADS, "norm_first": False, "head_activation": "relu", "n_special": 4}
SCGPT = {**HEADS, "position_embedding": "none", "norm_first": False, "value_encoder": "mlp", "embedding_norm": "genes"}
SCGPT |= {"n_special": 4, "special_value": -2.0, "mask_value": -1.0}
SCFOUNDATION = {**HEADS, "position_embedding": "none", "norm_first": False, "final_norm": True, "n_special": 4}
SCFOUNDATION |= {"value_encoder": "soft_bins", "n_value_bins": 5, "embedding_norm": "none"}
OPTIONS: dict[str, list[dict]] = {
    "autoregressive_transformer": [
        {**HEADS, "n_bins": 5, "pooling": "cls"},
        {**HEADS, "n_bins": 5, "pooling": "mean", "position_embedding": "rotary", "n_conditions": 2},
        {**HEADS, "n_bins": 5, "pooling": "last", "use_expression_values": False, "norm_first": False, "unpad": True},
    ],
    "gene_pooling": [
        {**SMALL, "pooling": "mean"},
        {**SMALL, "pooling": "mean", "use_expression_values": False},
        {**SMALL, "pooling": "weighted_sum", "latent_dim": 6},
    ],
    "masked_autoencoder": [
        ENCODER,
        {**ENCODER, "decoder_dim": 12, "decoder_heads": 2, "position_embedding": "learned", "pooling": "cls"},
        {**ENCODER, "position_embedding": "rotary", "unpad": True, "use_expression_values": False},
        {**ENCODER, "value_loss": "negative_binomial", "norm_first": False, "pooling": "cls"},
        {**ENCODER, "pooling": "last"},
    ],
    "mlp": [{**SMALL, "latent_dim": 6}],
    "scdiva": [
        {**HEADS, "latent_dim": 6, "denoising": True},
        {**HEADS, "latent_dim": 6, "mode": "vector", "norm_style": "pre"},
        {**HEADS, "latent_dim": 6, "mode": "vector", "norm": "rms", "activation": "swiglu", "bias": False},
        {**HEADS, "latent_dim": 6, "denoising": True, "position_embedding": "rotary", "variational": False},
    ],
    "transformer_encoder": [
        {**HEADS, "pooling": "cls"},
        {**HEADS, "pooling": "mean", "activation": "silu", "ffn_dim": 24, "unpad": True},
        {**HEADS, "use_expression_values": False, "norm_first": False, "unpad": False, "tie_head": True},
        {**HEADS, "position_embedding": "rotary", "expression_head": "value", "gradient_checkpointing": True},
        {**HEADS, "position_embedding": "none", "expression_head": "bin", "n_bins": 5, "pooling": "mean"},
        {**HEADS, "position_embedding": "none", "pooling": "last"},
        {**HEADS, "position_embedding": "none", "pooling": "cls"},
        # As Geneformer, scGPT and scFoundation.
        {**GENEFORMER, "pooling": "genes", "embedding_layer": 1},
        {**SCGPT, "expression_head": "deep"},
        {**SCFOUNDATION, "pooling": "depths"},
    ],
}
# Other objectives have other losses, and heads that shape no embedding.
MASKED_GENE = {"gene_pooling", "mlp", "transformer_encoder"}
TOKENS = ("input_ids", "attention_mask", "values", "bin_ids")
# Labels at padding, which no batch of an objective has.
BEYOND = {"labels": 7, "bin_labels": 2, "value_labels": 9.0, "masked_positions": True}


def plain_options(name: str) -> list[dict]:
    known = option_names(name)
    return OPTIONS.get(name, [{key: HEADS[key] for key in HEADS if known is None or key in known}])


def sets_of_options(name: str) -> list[dict]:
    """The options of an architecture, and some of them with gene vectors where it can use them."""
    plain = plain_options(name)
    if "gene_vectors" not in (option_names(name) or []):
        return plain
    vectors = [{"dim": DIM, "learned": LEARNED, "frozen": frozen} for frozen in (True, False)]
    return plain + [{**options, "gene_vectors": vectors[i % 2]} for i, options in enumerate(plain[:2] + plain[-1:])]


CASES = [
    pytest.param(name, options, id=f"{name}-{i}")
    for name in list_models()
    for i, options in enumerate(sets_of_options(name))
]
every_model = pytest.mark.parametrize(("name", "options"), CASES)


def make(name: str, options: dict) -> nn.Module:
    torch.manual_seed(0)
    model = get_model(name, ModelConfig(architecture=name, vocab_size=VOCAB, **options))
    if "gene_vectors" in options:
        vectors = torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(2))
        vectors[:LEARNED] = torch.nan
        fill_gene_vectors(model, vectors)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Five cells of 12 tokens, three of them padded, with hidden tokens as masking makes them."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([12, 12, 9, 5, 2])
    mask = torch.arange(12) < lengths[:, None]
    ids = torch.stack([torch.randperm(VOCAB - 4, generator=generator)[:12] + 4 for _ in range(5)])
    ids[:, 0] = 3
    labels = torch.full((5, 12), -100)
    labels[:, 1] = ids[:, 1]
    labels[:3, 4] = ids[:3, 4]
    hidden = labels != -100
    values = torch.randint(1, 9, (5, 12), generator=generator).float() * (mask & (ids > 3))
    bins = torch.randint(1, 5, (5, 12), generator=generator) * (mask & (ids > 3))
    return {
        "input_ids": ids.masked_fill(hidden, 2) * mask,
        "attention_mask": mask,
        "values": values.masked_fill(hidden, 0.0),
        "bin_ids": bins.masked_fill(hidden, 0),
        "labels": labels,
        "bin_labels": bins.masked_fill(~hidden, -100),
        "value_labels": values.masked_fill(~hidden, 0.0),
        "masked_positions": hidden,
    }


def tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: batch[key] for key in TOKENS}


# Further options of an architecture are slow: the checks train and compile.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case.values, id=case.id, marks=[] if case.id.endswith("-0") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_keeps_the_rules(name, options):
    assert set(OPTIONS) <= set(list_models())
    check_model(name, **options)


@every_model
def test_without_logits_the_same_gradients(batch, name, options):
    model = make(name, options).eval()
    gradients = []
    for return_logits in (True, False):
        model.zero_grad()
        output = model(**batch, return_logits=return_logits)
        output.loss.backward()
        gradients.append([p.grad for p in trainable(model)])
    assert output.logits is None
    for one, two in zip(*gradients, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [case for case in CASES if case.values[0] in MASKED_GENE and "expression_head" not in case.values[1]],
)
def test_the_loss_is_the_cross_entropy_at_labels(batch, name, options):
    model = make(name, options).eval()
    output = model(**batch)
    assert output.logits.shape == (5, 12, VOCAB)
    chosen = batch["labels"] != -100
    expected = nn.functional.cross_entropy(output.logits[chosen], batch["labels"][chosen])
    torch.testing.assert_close(output.loss, expected)


@every_model
def test_nothing_to_predict_costs_nothing(batch, name, options):
    blank = torch.full_like(batch["labels"], -100)
    nothing = {"labels": blank, "bin_labels": blank, "bin_ids": blank, "masked_positions": blank == 0}
    assert make(name, options)(**batch | nothing).loss == 0.0


@every_model
def test_values_and_labels_at_padding_do_not_count(batch, name, options):
    model = make(name, options).eval()
    padding = ~batch["attention_mask"]
    other = batch | {
        "labels": batch["labels"].masked_fill(padding, 7),
        "bin_labels": batch["bin_labels"].masked_fill(padding, 2),
        "value_labels": batch["value_labels"].masked_fill(padding, 9.0),
        "masked_positions": batch["masked_positions"] | padding,
        "values": batch["values"].masked_fill(padding, torch.nan),
    }
    wider = {key: nn.functional.pad(tensor, (0, 3), value=BEYOND.get(key, 0)) for key, tensor in other.items()}
    with torch.no_grad():
        expected = model(**batch).loss
        for given in (other, wider):
            for return_logits in (True, False):
                torch.testing.assert_close(model(**given, return_logits=return_logits).loss, expected)


@every_model
def test_padding_may_stand_in_front(batch, name, options):
    model = make(name, options).eval()
    front = torch.argsort(batch["attention_mask"].int(), dim=1, stable=True)
    moved = {key: tensor.gather(1, front) for key, tensor in batch.items()}
    mask = moved["attention_mask"]
    with torch.no_grad():
        torch.testing.assert_close(model.encode(**tokens(moved)), model.encode(**tokens(batch)), atol=1e-5, rtol=1e-5)
        one, two = model(**batch), model(**moved)
    torch.testing.assert_close(two.loss, one.loss)
    torch.testing.assert_close(two.embeddings, one.embeddings, atol=1e-5, rtol=1e-5)
    moved_logits = torch.stack([logits[places] for logits, places in zip(one.logits, front, strict=True)])
    torch.testing.assert_close(two.logits[mask], moved_logits[mask], atol=1e-5, rtol=1e-5)


@every_model
def test_values_matter_where_they_are_used(batch, name, options):
    model = make(name, options).eval()
    with torch.no_grad():
        one = model.encode(**tokens(batch))
        two = model.encode(**tokens(batch) | {"values": batch["values"] ** 2})
    assert torch.allclose(one, two) is not options.get("use_expression_values", True)


@every_model
def test_training_drops_out_and_an_optimizer_learns(batch, name, options):
    model = make(name, options).train()
    with torch.no_grad():
        assert not torch.equal(model.encode(**tokens(batch)), model.encode(**tokens(batch)))
    model.eval()
    optimizer = torch.optim.Adam(trainable(model), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]


@every_model
def test_made_of_a_configuration(name, options):
    model = make(name, options)
    assert isinstance(model, CellModule)
    assert isinstance(model.uses_order, bool)
    assert model.vocab_size == VOCAB
    check_model_options(name, options)
    direct = MODELS.get(name)(vocab_size=VOCAB, **options)
    shapes = {part: p.shape for part, p in direct.state_dict().items()}
    assert {part: p.shape for part, p in model.state_dict().items()} == shapes
    assert count_parameters(model) == model.num_parameters() == sum(p.numel() for p in trainable(direct))
    assert model.num_parameters(trainable_only=False) == sum(p.numel() for p in direct.parameters())
    with pytest.raises(ValueError, match="vocab_size must be set"):
        get_model(name, ModelConfig(architecture=name, **options))
    with raises(ValueError, "hidden_dimm"):
        get_model(name, ModelConfig(architecture=name, vocab_size=VOCAB, **options, hidden_dimm=3))
