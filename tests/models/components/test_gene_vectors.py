import pytest
import torch
from torch import nn

from scforge.errors import OptionError
from scforge.models import GenePoolingModel, TransformerEncoder, count_parameters, init_weights
from scforge.models.components import GeneExpressionEmbedding, GeneVectorEmbedding
from scforge.models.components.gene_vectors import GeneVectorBag, check_filled, fill_gene_vectors
from scforge.testing import raises
from scforge.training.optimizers import make_optimizer

V, H, D, LEARNED = 40, 16, 7, 9
GIVEN = torch.arange(V) >= LEARNED
GIVEN[[30, 35]] = False
GIVEN[[5, 7]] = True


def vectors(seed: int = 0) -> torch.Tensor:
    """Vectors with a large common part; tokens without one stand between the others."""
    generator = torch.Generator().manual_seed(seed)
    made = 30.0 + 5.0 * torch.randn(V, D, generator=generator)
    made[~GIVEN] = torch.nan
    return made


def make(cls=GeneVectorEmbedding, *, frozen: bool = True) -> GeneVectorEmbedding:
    torch.manual_seed(0)
    part = cls(V, H, dim=D, learned=LEARNED, frozen=frozen).apply(init_weights)
    part.fill(vectors())
    return part


def batch(n_cells: int = 3, n_tokens: int = 6) -> torch.Tensor:
    return torch.randint(0, V, (n_cells, n_tokens), generator=torch.Generator().manual_seed(1))


def test_the_formula():
    part, given = make(), vectors()[GIVEN]
    centered = given - given.mean(dim=0)
    scaled = centered / centered.square().sum(dim=1).mean().sqrt()
    out = part(torch.arange(V)[None])[0]
    torch.testing.assert_close(out[GIVEN], scaled @ part.projection.weight.T)
    torch.testing.assert_close(out[~GIVEN], part.learned.weight)
    assert not out[0].any(), "padding"
    assert part.projection.bias is None
    assert not GeneVectorEmbedding(V, H, D, LEARNED).apply(init_weights).vectors.weight.any(), "not filled: zeros"


@pytest.mark.parametrize("ids", [batch(1, 5), batch(9, 20)], ids=["few tokens", "more than the vocabulary"])
def test_both_ways_give_the_same(ids):
    embedding, bag = make(frozen=False), make(GeneVectorBag, frozen=False)
    table = embedding(torch.arange(V)[None])[0]
    torch.testing.assert_close(embedding(ids), table[ids], atol=1e-7, rtol=1e-5)
    weights = torch.rand(ids.shape)
    torch.testing.assert_close(bag(ids, weights), (table[ids] * weights[..., None]).sum(dim=1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(bag(ids), table[ids].sum(dim=1), atol=1e-6, rtol=1e-5)
    # Gradients as if it were one table.
    out = nn.functional.embedding(ids, embedding(torch.arange(V + 1).clamp(max=V - 1)[None])[0][:V], padding_idx=0)
    parameters = list(embedding.parameters())
    expected = torch.autograd.grad(out.square().sum(), parameters)
    for one, two in zip(torch.autograd.grad(embedding(ids).square().sum(), parameters), expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("factor", "shift"), [(1e-6, 0.0), (1.0, 100.0), (1e6, 100.0)])
@pytest.mark.parametrize("dim", [3, 1280])
def test_vectors_of_any_length_start_on_the_scale_of_embeddings(factor, shift, dim):
    torch.manual_seed(0)
    given = (torch.randn(2004, dim) * torch.linspace(1, 3, dim) + shift) * factor
    given[:4] = torch.nan
    part = GeneVectorEmbedding(2004, 64, dim=dim, learned=4).apply(init_weights)
    part.fill(given)
    out = part(torch.arange(4, 2004)[None])[0].detach()
    assert float(out.std()) == pytest.approx(0.02, rel=0.15)
    # As if each gene had a random vector of its own, where the pretrained ones are unrelated.
    assert float(out.mean(dim=0).abs().max()) < 1e-4


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("cls", [GeneVectorEmbedding, GeneVectorBag])
def test_what_training_changes(cls, frozen):
    part = make(cls, frozen=frozen)
    before = {name: value.clone() for name, value in part.state_dict().items()}
    optimizer = make_optimizer(part, name="adamw", lr=0.1, weight_decay=0.5)
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert decayed == {id(part.projection.weight)}, "neither vectors nor learned embeddings decay"
    for _ in range(3):
        optimizer.zero_grad()
        part(batch()).square().sum().backward()
        optimizer.step()
    changed = {name for name, value in part.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"projection.weight", "learned.weight"} | (set() if frozen else {"vectors.weight"})
    assert torch.equal(part.learned.weight[0], torch.zeros(H)), "padding stays zero"
    assert count_parameters(part) == sum(p.numel() for p in part.parameters()) - frozen * (V - LEARNED) * D


every_model = pytest.mark.parametrize(
    "build",
    [
        lambda **o: GenePoolingModel(V, H, 1, 0.0, pooling="weighted_sum", **o),
        lambda **o: TransformerEncoder(V, H, 1, 2, dropout=0.0, pooling="mean", **o),
    ],
    ids=["weighted_sum", "transformer"],
)


@every_model
@pytest.mark.parametrize("n_tokens", [4, 30])
def test_the_vectors_are_used(build, n_tokens):
    torch.manual_seed(0)
    model = build(gene_vectors={"dim": D, "learned": LEARNED, "frozen": False}).eval()
    with raises(OptionError, "gene_vectors"):
        check_filled(model)
    ids = torch.nonzero(GIVEN).flatten()[torch.randint(0, V - LEARNED, (2, n_tokens))]
    arguments = ids, torch.ones(2, n_tokens), torch.rand(2, n_tokens)
    given, permuted = vectors(), vectors()
    permuted[GIVEN] = given[GIVEN].roll(1, dims=0)
    found = []
    for filled in (given, permuted, given):
        fill_gene_vectors(model, filled)
        found.append(model.encode(*arguments))
    check_filled(model)
    assert (found[1] - found[0]).abs().max() > 1e-3
    torch.testing.assert_close(found[2], found[0])
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*arguments, labels=ids)
    assert output.loss.isfinite()
    torch.testing.assert_close(output.embeddings.float(), found[0], atol=0.1, rtol=0.1)
    output.loss.backward()


@every_model
def test_without_the_option_nothing_changes(build):
    model = build()
    assert not [part for part in model.modules() if isinstance(part, GeneVectorEmbedding)]
    check_filled(model)
    with pytest.raises(OptionError, match="does not embed gene vectors; pass the option on to"):
        fill_gene_vectors(model, vectors())


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        (3, "gene_vectors"),
        ({"dim": 5}, "gene_vectors"),
        ({"dim": 5, "learned": 4, "freeze": True}, "freeze"),
    ],
)
def test_bad_options(option, argument):
    with raises(OptionError, argument):
        GeneExpressionEmbedding(V, H, gene_vectors=option)


def test_bad_vectors():
    moved = vectors()
    moved[0], moved[20] = 1.0, torch.nan
    same = vectors()
    same[GIVEN] = 3.0
    for given, message in (
        (
            vectors()[:, :6],
            "gene vectors of shape .40, 6. with 9 rows of NaN do not match the model; pass vectors of shape .40, 7.",
        ),
        (
            vectors().index_fill(0, torch.tensor([20]), torch.nan),
            "with 10 rows of NaN do not match the model; .* with 9 rows",
        ),
        (moved, "including the row of PAD"),
        (same, "all gene vectors are identical"),
    ):
        with pytest.raises(OptionError, match=message):
            make().fill(given)
