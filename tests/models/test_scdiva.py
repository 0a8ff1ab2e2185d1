"""ScDiVa: sizes, the mode vector against a reference of its own, tokens, losses, what is hidden."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models import ModelOutput, ScDiVaConfig, ScDiVaModel, get_model
from scforge.models.scdiva_parts import (
    classification_loss,
    kl_divergence,
    mean_over_cells,
    reconstruction_loss,
    total_loss,
)
from scforge.testing import check_model

SIZES = {"hidden_dim": 16, "num_layers": 2, "num_heads": 4, "latent_dim": 6}
GATED = {"norm": "rms", "activation": "swiglu", "bias": False}
VOCAB, GENES = 60, 56
MASK = 2


def made(**options) -> ScDiVaModel:
    torch.manual_seed(0)
    model = ScDiVaModel(VOCAB, **{**SIZES, "dropout": 0.0, **options})
    with torch.no_grad():  # some weights start at zero
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


@pytest.fixture
def profiles() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(5, GENES, generator=generator) * 5
    return x * (torch.rand(5, GENES, generator=generator) < 0.4)


def tokens_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """All expressed genes from high to low, ties by gene."""
    order = x.sort(dim=1, descending=True, stable=True).indices
    values = x.gather(1, order)
    width = int((x > 0).sum(dim=1).max())
    mask = (values > 0)[:, :width]
    return {"input_ids": (order + 4)[:, :width] * mask, "attention_mask": mask, "values": values[:, :width] * mask}


# Sizes


def n_parameters(config: ScDiVaConfig) -> int:
    with torch.device("meta"):
        return config.build().num_parameters()


@pytest.mark.parametrize(
    ("n_types", "mode", "base", "large"),
    [
        (100, "vector", 343_921_540, 1_736_687_508),
        (10, "vector", 343_829_290, 1_736_503_098),
        (0, "vector", 343_686_944, 1_735_956_272),
        (100, "tokens", 344_976_260, 1_740_894_100),
    ],
)
def test_the_published_sizes(n_types, mode, base, large):
    assert n_parameters(ScDiVaConfig.base(num_cell_types=n_types, mode=mode)) == base
    assert n_parameters(ScDiVaConfig.large(num_cell_types=n_types, mode=mode)) == large
    assert abs(base / 350e6 - 1) < 0.02
    assert abs(large / 1.5e9 - 1) < 0.2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ScDiVaConfig.base, (20_483_072, 12_596_224, 302_309_376, 262_400, 234_596, 20_632_096)),
        (ScDiVaConfig.large, (61_446_144, 50_358_272, 1_611_464_704, 1_049_088, 731_236, 61_996_336)),
    ],
)
def test_the_size_of_each_part(config, expected):
    with torch.device("meta"):
        model = config(num_cell_types=100, mode="vector").build()
    parts = [model.gene_embedding, model.encoder.layers[0], model.encoder, model.variational_layer]
    parts += [model.annotation_head, model.batch_integration_head]
    assert tuple(sum(p.numel() for p in part.parameters()) for part in parts) == expected
    tokens = sum(expected) - expected[1] + config().hidden_size ** 2 + 6 * config().hidden_size
    assert n_parameters(config(num_cell_types=100)) == tokens


def test_the_released_size_and_a_large_one_of_its_nominal_size():
    released = ScDiVaConfig(
        num_genes=41_818,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        intermediate_size=2048,
        num_cell_types=100,
        mode="vector",
        norm_style="pre",
        norm="rms",
        activation="swiglu",
        bias=False,
        final_norm=False,
    )
    assert n_parameters(released) == 93_523_134
    assert abs(n_parameters(ScDiVaConfig.large(intermediate_size=3 * 2048)) / 1.5e9 - 1) < 0.03


def test_pre_norm_has_a_final_norm_more():
    post, pre = (n_parameters(ScDiVaConfig.base(norm_style=style)) for style in ("post", "pre"))
    assert pre - post == 2 * 1024


def test_weights_start_as_documented():
    model = ScDiVaModel(1004, 64, 2, 4)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            expected = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            assert bool((parameter == expected).all()), name
        elif name == "value_encoder.linear_out.weight":
            assert not parameter.any()
        else:
            assert abs(float(parameter.detach().std()) / 0.02 - 1) < 0.3, name


# The mode vector


class Reference(nn.Module):
    """The model as it is written down: one vector a cell through post-norm layers, and what reads it."""

    def __init__(self, genes: int, hidden: int, layers: int, heads: int, latent: int, types: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.embed_norm = nn.Linear(genes, hidden), nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("q", "k", "v", "o")})
            layer["up"], layer["down"] = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
            layer["norm1"], layer["norm2"] = nn.LayerNorm(hidden, eps=1e-12), nn.LayerNorm(hidden, eps=1e-12)
            self.layers.append(layer)
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.annotate = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, types))
        self.rebuild = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, genes))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed_norm(self.embed(x))[:, None]
        for layer in self.layers:
            q, k, v = (layer[n](h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in ("q", "k", "v"))
            weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(dim=-1)
            h = layer["norm1"](h + layer["o"]((weights @ v).transpose(1, 2).flatten(2)))
            h = layer["norm2"](h + layer["down"](F.gelu(layer["up"](h))))
        mu, logvar = self.mu(h[:, 0]), self.logvar(h[:, 0])
        return {"mu": mu, "logvar": logvar, "types": self.annotate(mu), "x": self.rebuild(mu)}

    def copy_from(self, model: ScDiVaModel) -> None:
        """Take over the weights of a model."""
        variational, annotate, rebuild = model.variational_layer, model.annotation_head, model.batch_integration_head
        pairs = [(self.mu, variational.mu_projection), (self.logvar, variational.logvar_projection)]
        pairs += [(self.annotate[0], annotate.dense), (self.annotate[2], annotate.classifier)]
        pairs += [(self.rebuild[0], rebuild.dense), (self.rebuild[2], rebuild.decoder)]
        pairs += [(self.embed_norm, model.gene_embedding.norm)]
        for layer, theirs in zip(self.layers, model.encoder.layers, strict=True):
            pairs += [(layer["o"], theirs.attention.out), (layer["up"], theirs.ffn_in), (layer["down"], theirs.ffn_out)]
            pairs += [(layer["norm1"], theirs.norm_attention), (layer["norm2"], theirs.norm_ffn)]
            for name, weight, bias in zip(
                "qkv", theirs.attention.qkv.weight.chunk(3), theirs.attention.qkv.bias.chunk(3), strict=True
            ):
                layer[name].load_state_dict({"weight": weight, "bias": bias})
        self.embed.load_state_dict({"weight": model.gene_embedding.weight.T, "bias": model.gene_embedding.bias})
        for ours, theirs in pairs:
            ours.load_state_dict(theirs.state_dict())


def test_the_mode_vector_is_the_reference(profiles):
    model = made(mode="vector", num_cell_types=3)
    reference = Reference(GENES, 16, 2, 4, 6, 3)
    reference.copy_from(model)
    with torch.no_grad():
        expected, found, output = reference(profiles), model.encode(profiles), model(profiles)
    differences = [
        found["mu"] - expected["mu"],
        found["latent"] - expected["mu"],
        found["logvar"] - expected["logvar"],
        output.embeddings - expected["mu"],
        output.logits - expected["types"],
        output.expression - expected["x"],
        model.predict(profiles, "annotation") - expected["types"],
        model.predict(profiles, task="batch_integration") - expected["x"],
    ]
    assert max(float(difference.abs().max()) for difference in differences) <= 1e-6
    batch = tokens_of(profiles)
    torch.testing.assert_close(model.encode(**batch), expected["mu"], atol=1e-6, rtol=1e-5)


def test_no_tokens_are_the_mode_vector(profiles):
    one, two = made(mode="vector"), made(max_tokens=0)
    assert one.state_dict().keys() == two.state_dict().keys()
    assert torch.equal(one.encode(profiles)["mu"], two.encode(profiles)["mu"])


def largest_gradients(model: ScDiVaModel, x: torch.Tensor) -> list[float]:
    model.zero_grad()
    model.encode(x)["mu"].square().sum().backward()
    weights = [layer.attention.qkv.weight.grad.chunk(3) for layer in model.encoder.layers]
    return [max(float(layer[part].abs().max()) for layer in weights) for part in range(3)]


def test_queries_learn_in_the_mode_tokens_alone(profiles):
    query, key, value = largest_gradients(made(), profiles)
    assert query > 1e-3 * value
    assert key > 1e-3 * value
    query, key, value = largest_gradients(made(mode="vector"), profiles)
    assert value > 0
    assert query < 1e-5 * value
    assert key < 1e-5 * value


# Tokens


CASES = [
    {},
    {"mode": "vector"},
    {"denoising": True, "norm_style": "pre", "unpad": True, "n_batches": 3},
    {"denoising": True, "position_embedding": "rotary", "max_tokens": 5},
    {"denoising": True, "mode": "vector", "norm_style": "pre", "final_norm": False, **GATED},
    {"variational": False, "gradient_checkpointing": True},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_keeps_the_rules(options):
    check_model("scdiva", **SIZES, **options)


@pytest.mark.parametrize("options", [{}, {"position_embedding": "rotary"}, {"max_tokens": 7}], ids=str)
def test_profiles_and_tokens_are_the_same_cells(profiles, options):
    model = made(**options)
    expected = model.encode(profiles)["mu"]
    torch.testing.assert_close(model.encode(**tokens_of(profiles)), expected, atol=1e-6, rtol=1e-5)
    # Tokens beyond the last one count in LAT alone.
    if "max_tokens" in options:
        assert not torch.allclose(made().encode(profiles)["mu"], expected, atol=1e-4)
        fewer = {name: tensor[:, :7] for name, tensor in tokens_of(profiles).items()}
        assert not torch.allclose(model.encode(**fewer), expected, atol=1e-4)


def test_weights_of_genes_put_profiles_in_order(profiles):
    model = made(max_tokens=3)
    weights = torch.zeros(GENES)
    weights[10:20] = 1.0
    plain = model.serialise(profiles).ids
    model.init_gene_weights(weights)
    ids = model.serialise(profiles).ids
    n_known = (profiles[:, 10:20] > 0).sum(dim=1).clamp(max=3)
    assert [int(((row >= 14) & (row < 24)).sum()) for row in ids] == n_known.tolist()
    assert not torch.equal(plain, ids)
    ties = model.serialise(torch.ones(1, GENES)).ids
    assert ties.tolist() == [[14, 15, 16]]
    with pytest.raises(OptionError, match="weights has the shape"):
        model.init_gene_weights(weights[1:])


def test_the_first_token_is_the_vector_of_the_profile(profiles):
    model = made()
    batch = tokens_of(profiles)
    seen = model._seen(batch["input_ids"], batch["attention_mask"], batch["values"])
    torch.testing.assert_close(model._readout(seen), model.gene_embedding(profiles), atol=1e-6, rtol=1e-5)
    # A token is its gene after the norm, and its value.
    vectors = model._embed(seen, None)
    torch.testing.assert_close(vectors, model._embed(seen, model.token_table()))
    gene = model.gene_embedding.weight[int(batch["input_ids"][1, 2]) - 4] + model.gene_embedding.bias
    expected = model.gene_embedding.norm(gene) + model.value_encoder(batch["values"][1:2, 2:3])[0, 0]
    torch.testing.assert_close(vectors[1, 2], expected)


def test_empty_profiles_are_embedded_as_cells_without_tokens(profiles):
    model = made()
    empty = profiles.clone()
    empty[2] = 0.0
    batch = tokens_of(empty)
    assert not batch["attention_mask"][2].any()
    torch.testing.assert_close(model.encode(empty)["mu"], model.encode(**batch), atol=1e-6, rtol=1e-5)


def test_states_and_attention_weights_of_tokens(profiles):
    for options in ({}, {"max_tokens": 5}):
        model = made(**options)
        batch = tokens_of(profiles)
        n_cells, width = batch["input_ids"].shape
        output = model(**batch, output_hidden_states=True, output_attentions=True)
        assert [tuple(state.shape) for state in output.hidden_states] == [(n_cells, width, 16)] * 2
        assert [tuple(part.shape) for part in output.attentions] == [(n_cells, 4, width, width)] * 2
        share = output.attentions[0].sum(dim=-1)[:, :, 0]
        assert bool(((share > 0.1) & (share < 1)).all())
        if options:
            assert not output.attentions[0][..., 5:].any()
            assert not output.hidden_states[1][:, 5:].any()
    with pytest.raises(OptionError, match="needs mode='tokens'"):
        made(mode="vector")(**batch, output_attentions=True)


def test_half_precision_is_about_the_same(profiles):
    model = made(denoising=True, num_cell_types=2)
    batch, hidden = hide(tokens_of(profiles))
    with torch.autocast("cpu", torch.bfloat16):
        low, dense = model(**hidden), model(profiles, target=profiles)
    high = model(**hidden)
    assert low.embeddings.dtype == torch.float32
    torch.testing.assert_close(low.loss, high.loss, atol=0.05, rtol=0.05)
    torch.testing.assert_close(dense.loss, model(profiles, target=profiles).loss, atol=0.05, rtol=0.05)


# What is hidden


def hide(batch: dict[str, torch.Tensor], seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Hide identities and values, each of half of the tokens; return the batch as it was, and as a model gets it."""
    generator = torch.Generator().manual_seed(seed)
    mask, ids, values = (batch[name] for name in ("attention_mask", "input_ids", "values"))
    no_gene, no_value = (mask & (torch.rand(mask.shape, generator=generator) < 0.5) for _ in range(2))
    hidden = {
        "input_ids": ids.masked_fill(no_gene, MASK),
        "attention_mask": mask,
        "values": values.masked_fill(no_value, 0.0),
        "labels": ids.masked_fill(~no_gene, -100),
        "value_labels": values,
        "masked_positions": no_gene,
        "masked_values": no_value,
        "loss_weights": 1.0 + torch.arange(len(ids)),
    }
    return batch, hidden


@pytest.mark.parametrize("options", [{}, {"position_embedding": "rotary"}, {"mode": "vector"}], ids=str)
def test_hidden_things_are_not_seen(profiles, options):
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


def test_only_genes_that_are_seen_whole_count_in_the_readout(profiles):
    model = made(denoising=True)
    _, hidden = hide(tokens_of(profiles))
    whole = hidden["attention_mask"] & ~hidden["masked_positions"] & ~hidden["masked_values"]
    names = ("input_ids", "attention_mask", "values", "masked_positions", "masked_values")
    seen = model._seen(*(hidden[name] for name in names))
    x = torch.zeros(5, GENES).scatter_add(1, (hidden["input_ids"] - 4).clamp(min=0), hidden["values"] * whole)
    torch.testing.assert_close(model._readout(seen), model.gene_embedding(x), atol=1e-6, rtol=1e-5)


def test_the_loss_is_what_is_documented(profiles):
    model = made(denoising=True)
    _, hidden = hide(tokens_of(profiles))
    with torch.no_grad():
        output, without = model(**hidden), model(**hidden, return_logits=False)
    no_gene, no_value, weights = (hidden[name] for name in ("masked_positions", "masked_values", "loss_weights"))
    log_p = output.logits.log_softmax(dim=-1)
    n_cells = len(weights)
    identity = sum(
        weights[cell] * -log_p[cell][no_gene[cell]].gather(1, hidden["labels"][cell][no_gene[cell]][:, None]).mean()
        for cell in range(n_cells)
    )
    assert set(output.losses) == {"identity", "value"}
    torch.testing.assert_close(output.losses["identity"], identity / n_cells)
    # Where the gene is seen the value that is returned is the one that is learned.
    known = no_value & ~no_gene
    only = hidden | {"masked_values": known, "loss_weights": weights}
    with torch.no_grad():
        known_output = model(**only)
    error = (known_output.expression - hidden["value_labels"]).square()
    value = sum(weights[cell] * error[cell][known[cell]].mean() for cell in range(n_cells)) / n_cells
    torch.testing.assert_close(known_output.losses["value"], value)
    torch.testing.assert_close(output.loss, output.losses["identity"] + output.losses["value"])
    torch.testing.assert_close(without.loss, output.loss)
    for part in output.losses:
        torch.testing.assert_close(without.losses[part], output.losses[part])


def test_the_value_of_a_hidden_gene_is_learned_of_that_gene(profiles):
    model = made(denoising=True)
    _, hidden = hide(tokens_of(profiles))
    other = hidden | {"labels": hidden["labels"].where(hidden["labels"] == -100, 59)}
    with torch.no_grad():
        assert not torch.allclose(model(**hidden).losses["value"], model(**other).losses["value"])


def test_logits_leave_out_what_cannot_be(profiles):
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


def test_losses_in_parts_are_the_same(profiles, monkeypatch):
    model = made()
    _, hidden = hide(tokens_of(profiles))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**hidden, return_logits=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    monkeypatch.setattr("scforge.models.scdiva_tokens._NUMBERS", {"cpu": 3 * VOCAB})
    for one, two in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(one, two)


def test_hidden_tokens_go_before_others(profiles):
    batch = tokens_of(profiles)
    hidden = torch.zeros_like(batch["attention_mask"])
    hidden[:, -3:] = batch["attention_mask"][:, -3:]
    ids = batch["input_ids"].masked_fill(hidden, MASK)
    model = made(max_tokens=6)
    seen = model._seen(ids, batch["attention_mask"], batch["values"], hidden)
    states = model.states(seen)
    assert bool(states.attended[hidden].all())
    n_tokens = batch["attention_mask"].sum(dim=1).clamp(max=6)
    assert torch.equal(states.attended.sum(dim=1), n_tokens)


def test_hidden_values_are_predicted_by_name(profiles):
    model = made(denoising=True)
    batch = tokens_of(profiles)
    hidden = torch.zeros_like(batch["attention_mask"])
    hidden[:, 1] = True
    with torch.no_grad():
        values = model.predict_values(**batch, masked_values=hidden)
        expected = model(**batch, masked_values=hidden, masked_positions=torch.zeros_like(hidden)).expression
    torch.testing.assert_close(values[:, 1], expected[:, 1])
    assert not values[:, [0, *range(2, values.shape[1])]].any()
    with pytest.raises(OptionError, match="more than max_tokens=2"):
        made(denoising=True, max_tokens=2).predict_values(**batch, masked_values=batch["attention_mask"])
    with pytest.raises(OptionError, match="denoising=False"):
        made().predict_values(**batch, masked_values=hidden)


# Losses and heads


def test_losses_by_hand():
    one, two = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert float(reconstruction_loss(one, two)) == 2.5
    logits, labels = torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([1, -100])
    torch.testing.assert_close(classification_loss(logits, labels), torch.tensor(math.log(2)))
    assert float(classification_loss(logits, torch.tensor([-100, -100]))) == 0.0
    mu, logvar = torch.randn(7, 4), torch.randn(7, 4)
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(mu, (0.5 * logvar).exp()), normal(0.0, 1.0))
    torch.testing.assert_close(kl_divergence(mu, logvar), exact.sum(dim=1).mean())
    torch.testing.assert_close(kl_divergence(mu, logvar, free_bits=0.7), exact.mean(dim=0).clamp(min=0.7).sum())
    assert float(total_loss(torch.tensor(1.0), torch.tensor(3.0), 0.5)) == 2.5
    losses, cells = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert float(mean_over_cells(losses, cells, None)) == 3.0
    assert float(mean_over_cells(losses, cells, torch.tensor([1.0, 9.0, 2.0]))) == (2.0 + 0.0 + 10.0) / 3


def test_the_latent_is_drawn_in_training_alone(profiles):
    model = made(num_cell_types=2)
    found = model.encode(profiles)
    assert torch.equal(found["latent"], found["mu"])
    model.train()
    readout = torch.randn(3, 1, 16).expand(3, 5000, 16)
    drawn, mu, logvar = model.variational_layer(readout)
    torch.testing.assert_close(drawn.mean(dim=1), mu[:, 0], atol=0.1, rtol=0)
    torch.testing.assert_close(drawn.var(dim=1), logvar[:, 0].exp(), atol=0, rtol=0.1)
    assert model.training
    assert torch.equal(model.predict(profiles), model.predict(profiles))
    assert model.training


def test_profiles_have_the_losses_of_their_tasks(profiles):
    model = made(num_cell_types=3, mode="vector")
    labels = torch.tensor([0, 2, 1, -100, 1])
    output = model(profiles, labels=labels, target=profiles, beta=0.5)
    assert isinstance(output, ModelOutput)
    found = model.infer(profiles)
    expected = classification_loss(model.classify(found["mu"]), labels)
    expected = expected + reconstruction_loss(model.decode(found["mu"]), profiles)
    expected = expected + 0.5 * kl_divergence(found["mu"], found["logvar"])
    torch.testing.assert_close(output.loss, expected)
    assert set(output.losses) == {"classification", "reconstruction", "kl"}
    assert model(profiles).loss is None
    assert made()(profiles).logits is None


def test_a_target_is_reconstructed_from_tokens(profiles):
    model = made(denoising=True)
    _, hidden = hide(tokens_of(profiles))
    output = model(**hidden, target=profiles, beta=0.25)
    names = ("input_ids", "attention_mask", "values", "masked_positions", "masked_values")
    found = model.infer(**{name: hidden[name] for name in names})
    torch.testing.assert_close(
        output.losses["reconstruction"], reconstruction_loss(model.decode(found["mu"]), profiles)
    )
    torch.testing.assert_close(output.losses["kl"], kl_divergence(found["mu"], found["logvar"]))
    parts = output.losses
    torch.testing.assert_close(
        output.loss, parts["identity"] + parts["value"] + parts["reconstruction"] + 0.25 * parts["kl"]
    )


def test_batches_change_the_expression(profiles):
    model = made(n_batches=3)
    latent = model.infer(profiles)["mu"]
    parts = [model.decode(latent, batch) for batch in range(3)]
    assert not torch.allclose(parts[0], parts[1], atol=1e-4)
    each = model.decode(latent, torch.tensor([0, 1, 2, 0, 1]))
    torch.testing.assert_close(each[1], parts[1][1])
    fresh = ScDiVaModel(VOCAB, **SIZES, n_batches=3).eval()
    torch.testing.assert_close(fresh.decode(latent, 2), fresh.decode(latent))
    for batch, message in ((3, "not between 0 and 2"), (0.5, "whole numbers"), (torch.zeros(2).long(), "2 numbers")):
        with pytest.raises(OptionError, match=message):
            model.decode(latent, batch)
    with pytest.raises(OptionError, match="n_batches=0"):
        made().decode(latent, 0)


def test_without_variance_there_is_no_noise(profiles):
    model = made(variational=False).train()
    found = model.infer(profiles)
    assert torch.equal(found["latent"], found["mu"])
    assert "kl" not in model(profiles, target=profiles).losses


# Configurations


def test_configurations(profiles):
    config = ScDiVaConfig(num_genes=GENES, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, latent_dim=3)
    torch.manual_seed(0)
    one = ScDiVaModel.from_config(config)
    torch.manual_seed(0)
    options = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "latent_dim": 3}
    two = get_model("scdiva", ModelConfig(architecture="scdiva", vocab_size=VOCAB, **options))
    assert torch.equal(one.eval().encode(profiles)["mu"], two.eval().encode(profiles)["mu"])
    with pytest.raises(ValueError, match="vocab_size must be set"):
        ScDiVaModel.from_config(ModelConfig(architecture="scdiva"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode='both' is not known"),
        ({"norm_style": "middle"}, "norm_style='middle'"),
        ({"norm": "batch"}, "norm='batch'"),
        ({"activation": "tanh"}, "activation='tanh'"),
        ({"position_embedding": "learned"}, "position_embedding='learned'"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"latent_dim": 0}, "latent_dim=0"),
        ({"n_special": 60}, "leaves no gene"),
        ({"variational": "yes"}, "variational='yes'"),
        ({"num_heads": 3}, "num_heads=3"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        made(**options)


def test_bad_input_is_refused(profiles):
    model = made()
    with pytest.raises(OptionError, match=r"shape \(5, 55\) was given; give floats \(B, 56\)"):
        model.encode(profiles[:, 1:])
    with pytest.raises(OptionError, match="int64"):
        model.encode(profiles.long())
    with pytest.raises(OptionError, match="task='both'"):
        model.predict(profiles, "both")
    with pytest.raises(OptionError, match="no annotation head"):
        model.predict(profiles)
    batch = tokens_of(profiles)
    with pytest.raises(OptionError, match="masked_values has the shape"):
        model(**batch, masked_values=batch["attention_mask"][:, 1:])
