import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scforge.config.schema import ModelConfig
from scforge.errors import DataError, OptionError
from scforge.models import ScDiVaConfig, ScDiVaModel, get_model
from scforge.testing import raises

VOCAB, GENES = 60, 56


def n_parameters(config: ScDiVaConfig) -> int:
    with torch.device("meta"):
        return config.build().num_parameters()


@pytest.mark.parametrize(
    ("n_types", "mode", "base", "large"),
    [(100, "vector", 343_921_540, 1_736_687_508), (0, "vector", 343_686_944, 1_735_956_272)]
    + [(100, "tokens", 344_976_260, 1_740_894_100)],
)
def test_the_published_sizes(n_types, mode, base, large):
    assert n_parameters(ScDiVaConfig.base(num_cell_types=n_types, mode=mode)) == base
    assert n_parameters(ScDiVaConfig.large(num_cell_types=n_types, mode=mode)) == large
    assert abs(base / 350e6 - 1) < 0.02
    assert abs(large / 1.5e9 - 1) < 0.2
    assert abs(n_parameters(ScDiVaConfig.large(intermediate_size=3 * 2048)) / 1.5e9 - 1) < 0.03
    post, pre = (n_parameters(ScDiVaConfig.base(norm_style=style)) for style in ("post", "pre"))
    assert pre - post == 2 * 1024, "a final norm"
    sizes = {"num_genes": 41_818, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 2048, "num_cell_types": 100, "mode": "vector"}
    gated = {"norm_style": "pre", "norm": "rms", "activation": "swiglu", "bias": False, "final_norm": False}
    assert n_parameters(ScDiVaConfig(**sizes, **gated)) == 93_523_134, "the released one"


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


def test_the_mode_vector_is_the_reference(tokens_of, made, profiles):
    model = made(0.2, mode="vector", num_cell_types=3)
    reference = Reference(GENES, 16, 2, 4, 6, 3)
    reference.copy_from(model)
    with torch.no_grad():
        expected, found, output = reference(profiles), model.encode(profiles), model(profiles)
    pairs = [(found["mu"], "mu"), (found["latent"], "mu"), (found["logvar"], "logvar"), (output.embeddings, "mu")]
    pairs += [(output.logits, "types"), (model.predict(profiles, "annotation"), "types")]
    pairs += [(output.expression, "x"), (model.predict(profiles, task="batch_integration"), "x")]
    assert max(float((ours - expected[name]).abs().max()) for ours, name in pairs) <= 1e-6
    torch.testing.assert_close(model.encode(**tokens_of(profiles)), expected["mu"], atol=1e-6, rtol=1e-5)
    one, two = made(mode="vector"), made(max_tokens=0)  # no tokens are the mode vector
    assert one.state_dict().keys() == two.state_dict().keys()
    assert torch.equal(one.encode(profiles)["mu"], two.encode(profiles)["mu"])


@pytest.mark.parametrize("norm_style", ["post", "pre"])
@pytest.mark.parametrize("kind", ["profile", "tokens"])
def test_a_cell_of_which_nothing_is_seen_has_no_unbounded_gradients(tokens_of, profiles, norm_style, kind):
    """Weights as they start: the bias is zero, and the norm of it nothing but its epsilon."""
    torch.manual_seed(0)
    model = ScDiVaModel(60, 16, 4, 2, latent_dim=3, dropout=0.0, mode="vector", norm_style=norm_style).train()
    profiles[2] = 0.0

    def gradients(x):
        model.zero_grad()
        tokens = {name: torch.nn.functional.pad(tensor, (0, 1)) for name, tensor in tokens_of(x).items()}
        found = model.infer(x) if kind == "profile" else model.infer(**tokens)
        model.decode(found["mu"]).square().sum().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    with_it = gradients(profiles)
    without = gradients(profiles[[0, 1, 3, 4]])
    for name in ("gene_embedding.weight", "gene_embedding.bias"):
        torch.testing.assert_close(with_it[name], without[name])
    largest = max(float(gradient.abs().max()) for gradient in without.values())
    assert max(float(gradient.abs().max()) for gradient in with_it.values()) < 2 * largest
    # A bias that is somewhere is a vector like others, and what is behind it learns.
    with torch.no_grad():
        model.gene_embedding.bias.normal_()
    only = gradients(torch.zeros(1, 56))
    assert float(only["gene_embedding.bias"].abs().max()) == 0.0
    assert float(only["encoder.layers.0.attention.qkv.weight"].abs().max()) > 0.0


def test_configurations(profiles):
    config = ScDiVaConfig(num_genes=GENES, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, latent_dim=3)
    options = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "latent_dim": 3}
    shared = ModelConfig(architecture="scdiva", vocab_size=VOCAB, **options)
    found = []
    for make in (lambda: ScDiVaModel.from_config(config), lambda: get_model("scdiva", shared)):
        torch.manual_seed(0)
        found.append(make().eval().encode(profiles)["mu"])
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="vocab_size must be set"):
        ScDiVaModel.from_config(ModelConfig(architecture="scdiva"))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"mode": "both"}, "mode"),
        ({"latent_dim": 0}, "latent_dim"),
        ({"dropout": 2}, "dropout"),
    ],
)
def test_bad_options_are_refused(made, options, argument):
    with raises(OptionError, argument):
        made(**options)


def test_bad_input_is_refused(tokens_of, made, profiles):
    model = made()
    with pytest.raises(OptionError, match=r"shape \(5, 55\); pass floats of shape \(B, 56\)"):
        model.encode(profiles[:, 1:])
    with pytest.raises(OptionError, match="int64"):
        model.encode(profiles.long())
    for wrong in (float("nan"), float("inf")):
        bad = profiles.clone()
        bad[3, 7] = wrong
        for model_of_mode in (model, made(mode="vector")):
            with pytest.raises(DataError, match="the profile of cell 3 has NaN or infinite values"):
                model_of_mode.encode(bad)
    with raises(OptionError, "task"):
        model.predict(profiles, "both")
    with pytest.raises(OptionError, match="no annotation head"):
        model.predict(profiles)
    batch = tokens_of(profiles)
    with pytest.raises(OptionError, match="masked_values has shape"):
        model(**batch, masked_values=batch["attention_mask"][:, 1:])
