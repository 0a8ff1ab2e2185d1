"""What every registered architecture promises. A new one is covered by a line in OPTIONS."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.models import CellModule, ModelOutput, count_parameters, get_model, list_models
from scforge.models.components import fill_gene_vectors
from scforge.models.registry import MODELS, check_model_options, option_names

VOCAB, SMALL = 60, {"hidden_dim": 16, "num_layers": 2, "dropout": 0.1}
OPTIONS: dict[str, list[dict]] = {
    "gene_pooling": [
        {**SMALL, "pooling": "mean"},
        {**SMALL, "pooling": "mean", "use_expression_values": False},
        {**SMALL, "pooling": "weighted_sum", "latent_dim": 6},
    ],
    "transformer_encoder": [
        {**SMALL, "num_heads": 4, "pooling": "cls"},
        {**SMALL, "num_heads": 2, "pooling": "mean", "activation": "silu", "ffn_dim": 24},
        {**SMALL, "num_heads": 4, "use_expression_values": False},
    ],
}
DIM, LEARNED = 7, 10


def sets_of_options(name: str) -> list[dict]:
    """The options of an architecture, and each again with gene vectors where it can use them."""
    plain = OPTIONS.get(name, [SMALL])
    if "gene_vectors" not in (option_names(name) or []):
        return plain
    vectors = [{"dim": DIM, "learned": LEARNED, "frozen": frozen} for frozen in (True, False)]
    return plain + [{**options, "gene_vectors": vectors[i % 2]} for i, options in enumerate([*plain, plain[-1]])]


CASES = [
    pytest.param(name, options, id=f"{name}-{i}")
    for name in list_models()
    for i, options in enumerate(sets_of_options(name))
]
every_model = pytest.mark.parametrize(("name", "options"), CASES)
TOKENS = ("input_ids", "attention_mask", "values")


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
    values = torch.rand(5, 12, generator=generator) * 4
    return {
        "input_ids": ids.masked_fill(hidden, 2) * mask,
        "attention_mask": mask,
        "values": values.masked_fill(hidden, 0.0) * mask,
        "labels": labels,
        "masked_positions": hidden,
    }


def tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: batch[key] for key in TOKENS}


def test_options_are_of_registered_models():
    assert set(OPTIONS) <= set(list_models())


@every_model
def test_protocol(name, options):
    model = make(name, options)
    assert isinstance(model, nn.Module)
    assert isinstance(model, CellModule)
    for method in (model.forward, model.encode):
        names = list(inspect.signature(method).parameters)
        assert names[:3] == list(TOKENS)
        assert names[-1] == "kwargs"
    check_model_options(name, options)


@every_model
def test_forward(batch, name, options):
    model = make(name, options)
    output = model(**batch)
    assert isinstance(output, ModelOutput)
    assert output.loss.shape == ()
    assert output.logits.shape == (5, 12, VOCAB)
    assert output.embeddings.shape[0] == 5
    assert output.embeddings.ndim == 2
    for tensor in (output.loss, output.logits, output.embeddings):
        assert tensor.isfinite().all()
    assert model(**tokens(batch)).loss is None


@every_model
def test_every_parameter_that_the_loss_uses_learns(batch, name, options):
    model = make(name, options)
    # Labels at tokens that nothing is hidden of: a hidden token has no value that could teach the projection.
    labels = batch["input_ids"].masked_fill(~batch["attention_mask"], -100)
    model(**batch | {"labels": labels}).loss.backward()
    for part, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert options["gene_vectors"]["frozen"]
            assert part.endswith("vectors.weight")
            continue
        assert parameter.grad is not None, part
        assert parameter.grad.isfinite().all(), part
        assert parameter.grad.any(), part


@every_model
def test_every_parameter_but_the_head_shapes_the_embedding(batch, name, options):
    model = make(name, options)
    model.encode(**tokens(batch)).square().sum().backward()
    used = {part.split(".")[0] for part, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {part.split(".")[0] for part, _ in model.named_parameters()} - used == {"head"}


@every_model
def test_the_loss_is_the_cross_entropy_at_labels(batch, name, options):
    model = make(name, options).eval()
    output = model(**batch)
    chosen = batch["labels"] != -100
    log_p = output.logits.log_softmax(dim=-1)[chosen]
    expected = -log_p.gather(1, batch["labels"][chosen][:, None]).mean()
    torch.testing.assert_close(output.loss, expected)


@every_model
def test_without_logits_the_same_loss_and_gradients(batch, name, options):
    model = make(name, options).eval()
    gradients, losses = [], []
    for return_logits in (True, False):
        model.zero_grad()
        output = model(**batch, return_logits=return_logits)
        output.loss.backward()
        losses.append(output.loss.detach())
        gradients.append([p.grad.clone() for p in trainable(model)])
    assert output.logits is None
    torch.testing.assert_close(losses[0], losses[1])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


@every_model
def test_labels_do_not_leak_into_the_output(batch, name, options):
    model = make(name, options).eval()
    with torch.no_grad():
        one = model(**batch)
        two = model(**batch | {"labels": torch.full_like(batch["labels"], 7)})
        three = model(**tokens(batch))
    for other in (two, three):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.embeddings, other.embeddings)


@every_model
def test_encode_is_the_embedding_of_forward(batch, name, options):
    model = make(name, options).eval()
    with torch.no_grad():
        torch.testing.assert_close(model.encode(**batch), model(**batch).embeddings)


@every_model
def test_padding_changes_nothing(batch, name, options):
    model = make(name, options).eval()
    wider = {key: nn.functional.pad(value, (0, 7)) for key, value in tokens(batch).items()}
    with torch.no_grad():
        expected = model.encode(**tokens(batch))
        torch.testing.assert_close(model.encode(**wider), expected, atol=1e-5, rtol=1e-5)
        for i, length in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
            alone = {key: value[i : i + 1, :length] for key, value in tokens(batch).items()}
            torch.testing.assert_close(model.encode(**alone), expected[i : i + 1], atol=1e-5, rtol=1e-5)


@every_model
def test_what_stands_at_padding_does_not_matter(batch, name, options):
    model = make(name, options).eval()
    mask = batch["attention_mask"]
    other = tokens(batch) | {
        "input_ids": batch["input_ids"].masked_fill(~mask, 11),
        "values": batch["values"].masked_fill(~mask, 5.0),
    }
    with torch.no_grad():
        torch.testing.assert_close(model.encode(**other), model.encode(**tokens(batch)), atol=1e-5, rtol=1e-5)


@every_model
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64])
def test_masks_of_any_dtype_mean_the_same(batch, name, options, dtype):
    model = make(name, options).eval()
    with torch.no_grad():
        expected = model(**batch)
        output = model(**batch | {"attention_mask": batch["attention_mask"].to(dtype)})
    assert torch.equal(output.embeddings, expected.embeddings)
    assert torch.equal(output.logits, expected.logits)


@every_model
def test_a_cell_without_tokens_stays_finite_and_alone(batch, name, options):
    model = make(name, options)
    empty = {key: value.clone() for key, value in tokens(batch).items()}
    for value in empty.values():
        value[4] = 0
    output = model.encode(**empty)
    assert output.isfinite().all()
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@every_model
def test_cells_differ(batch, name, options):
    model = make(name, options).eval()
    with torch.no_grad():
        embeddings = model.encode(**tokens(batch))
    assert torch.pdist(embeddings).min() > 1e-3


@every_model
def test_values_matter_where_they_are_used(batch, name, options):
    model = make(name, options).eval()
    with torch.no_grad():
        one = model.encode(**tokens(batch))
        two = model.encode(**tokens(batch) | {"values": batch["values"] ** 2})
    assert torch.allclose(one, two) is not options.get("use_expression_values", True)


@every_model
def test_eval_is_deterministic_and_training_is_not(batch, name, options):
    model = make(name, options)
    with torch.no_grad():
        assert not torch.equal(model.encode(**tokens(batch)), model.encode(**tokens(batch)))
        model.eval()
        assert torch.equal(model.encode(**tokens(batch)), model.encode(**tokens(batch)))


@every_model
def test_the_order_of_cells_does_not_matter(batch, name, options):
    model = make(name, options).eval()
    order = torch.tensor([3, 1, 4, 0, 2])
    with torch.no_grad():
        permuted = model.encode(**{key: value[order] for key, value in tokens(batch).items()})
        torch.testing.assert_close(permuted, model.encode(**tokens(batch))[order])


@every_model
def test_weights_round_trip(batch, name, options, tmp_path):
    model = make(name, options)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.manual_seed(99)
    again = get_model(name, ModelConfig(architecture=name, vocab_size=VOCAB, **options))
    assert not torch.equal(again.eval().encode(**tokens(batch)), model.eval().encode(**tokens(batch)))
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    assert torch.equal(again.encode(**tokens(batch)), model.encode(**tokens(batch)))


@every_model
def test_an_optimizer_step_learns(batch, name, options):
    model = make(name, options).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", [name for name in list_models() if "gene_vectors" in (option_names(name) or [])])
def test_gene_vectors_learn_unless_they_are_frozen(batch, name, frozen):
    options = OPTIONS.get(name, [SMALL])[0]
    model = make(name, {**options, "gene_vectors": {"dim": DIM, "learned": LEARNED, "frozen": frozen}})
    before = {part: value.clone() for part, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    changed = {part for part, value in model.state_dict().items() if not torch.equal(value, before[part])}
    assert [part for part in changed if part.endswith("projection.weight")]
    assert any(part.endswith("vectors.weight") for part in changed) is not frozen


@every_model
def test_from_config(name, options):
    model = make(name, options)
    direct = MODELS.get(name)(vocab_size=VOCAB, **options)
    shapes = {part: p.shape for part, p in direct.state_dict().items()}
    assert {part: p.shape for part, p in model.state_dict().items()} == shapes
    assert count_parameters(model) == model.num_parameters() == sum(p.numel() for p in trainable(direct))
    assert model.num_parameters(trainable_only=False) == sum(p.numel() for p in direct.parameters())


@every_model
def test_vocab_size_is_needed(name, options):
    with pytest.raises(ValueError, match="vocab_size must be set"):
        get_model(name, ModelConfig(architecture=name, **options))


@every_model
def test_unknown_option(name, options):
    with pytest.raises(ValueError, match="hidden_dimm"):
        get_model(name, ModelConfig(architecture=name, vocab_size=VOCAB, **options, hidden_dimm=3))
