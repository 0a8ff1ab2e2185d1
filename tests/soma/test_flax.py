import dataclasses
import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError
from scforge.soma.v1.configs import ModelConfig, SIGRegConfig
from scforge.soma.v1.torch import Model as TorchModel

nnx = pytest.importorskip("flax.nnx", reason="flax comes with the extra flax")
oracle = pytest.importorskip("soma_models.v1.flax", reason="soma-models, the reference, comes with the group test")
published_attention = importlib.import_module("soma_models.v1.flax.modules.attention")
jax = importlib.import_module("jax")
jnp = jax.numpy
half = importlib.import_module("scforge.soma.v1.flax")
attention = importlib.import_module("scforge.soma.v1.flax.modules.attention")
pwff = importlib.import_module("scforge.soma.v1.flax.modules.pwff")
serde = importlib.import_module("scforge.soma.v1.flax.serde")
Model, SIGReg, compute_loss = half.Model, half.SIGReg, half.compute_loss
REGULARIZER = SIGReg(SIGRegConfig(slices=4))

SIZES = {"embedding_dim": 32, "pwff_hidden_dim": 48, "num_layers": 2, "num_heads": 4}
CONFIG = ModelConfig(dropout_rate=0.0, **SIZES)
PUBLISHED = oracle.ModelConfig(dropout_rate=0.0, **SIZES)


@pytest.fixture(scope="module", autouse=True)
def quick_compiler():
    """Leave out what the compiler does for speed: here it takes longer than all the rest."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# Compiled once, not op by op, and for one shape.
both = nnx.jit(lambda model, ids, positions: (states := model.encode(ids, positions), model.predict(states)))


def noisy(model):
    """Give all weights, biases and norms too, other values than those that they start with."""
    rng = np.random.default_rng(0)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: np.asarray(x) + 0.1 * rng.standard_normal(x.shape, np.float32), state))
    return model


def batch(shape=(3, 11), most=5_000):
    rng = np.random.default_rng(0)
    return rng.integers(0, 264, shape), np.sort(rng.integers(0, most, shape), axis=1)


@pytest.fixture(scope="module")
def published():
    return noisy(oracle.Model(PUBLISHED, nnx.Rngs(0)))


@pytest.fixture(scope="module")
def ours(published):
    return Model.load_bytes(published.save_bytes(), CONFIG, nnx.Rngs(1))


@pytest.mark.slow
def test_weights_are_the_same_bytes_both_ways(ours, published, tmp_path):
    data, path = published.save_bytes(), tmp_path / "weights.safetensors"
    assert ours.save_bytes() == data
    assert oracle.Model.load_bytes(data, PUBLISHED, nnx.Rngs(2)).save_bytes() == data
    ours.save(path)
    assert path.read_bytes() == data
    assert Model.load(path, CONFIG).save_bytes() == Model.load_bytes(bytearray(data), CONFIG).save_bytes() == data
    serde.Serde(ours).serialize_to_file(path, overwrite=True)
    again = serde.Serde(Model(CONFIG, nnx.Rngs(5))).deserialize_from_file(path)
    assert again.save_bytes() == path.read_bytes() == data


def test_forward_is_the_published_one(ours, published):
    ids, positions = batch()
    for mine, theirs in zip(both(ours, ids, positions), both(published, ids, positions), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert np.array_equal(nnx.jit(lambda model: model(ids, positions))(ours), both(ours, ids, positions)[1])


def test_rope_is_the_published_one():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 3, 8), np.float32))
    positions = jnp.asarray(batch(shape=(2, 7))[1])
    options = {"head_dim": 8, "max_wavelength": 500.0, "scale_factor": 2.5}
    found, wanted = (half.apply_rope(x, positions, **options) for half in (attention, published_attention))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_attention_with_dropout_is_the_fused_one_without():
    attend = nnx.jit(lambda module, x, positions: module(x, positions))
    dropped = attention.MultiHeadAttention(4, 32, dropout_rate=1e-9, rngs=nnx.Rngs(0))
    fused = attention.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 9, 32), np.float32)
    positions = np.tile(np.arange(9), (2, 1))
    np.testing.assert_allclose(attend(dropped, x, positions), attend(fused, x, positions), atol=1e-6)
    assert np.abs(attend(fused, x, None) - attend(fused, x, positions)).max() > 1e-3
    half_dropped = attention.MultiHeadAttention(4, 32, dropout_rate=0.5, rngs=nnx.Rngs(0))
    assert np.abs(attend(half_dropped, x, positions) - attend(half_dropped, x, positions)).max() > 1e-3
    half_dropped.eval()
    np.testing.assert_allclose(attend(half_dropped, x, positions), attend(fused, x, positions), atol=1e-6)


def test_sigreg_is_the_published_one():
    config = SIGRegConfig(slices=16, points=9, t_max=2.0, coefficient=0.5)
    ours, published = SIGReg(config, nnx.Rngs(noise=3)), oracle.SIGReg(config, nnx.Rngs(noise=3))
    rng = np.random.default_rng(0)
    x, noise = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in [(2, 5, 12), (12, 16)])
    for name in ("t", "phi", "weights"):
        np.testing.assert_allclose(getattr(ours, name), getattr(published, name), rtol=1e-6)
    np.testing.assert_allclose(ours.compute(x, noise), published.compute(x, noise), rtol=1e-6)
    first = float(ours(x))
    assert first == pytest.approx(float(published(x)), rel=1e-6)
    assert float(ours(x)) != first


@pytest.mark.slow
def test_loss_embedding_and_gradients_are_the_published_ones():
    sizes = {**SIZES, "num_layers": 1, "dropout_rate": 0.0}
    published = noisy(oracle.Model(oracle.ModelConfig(**sizes), nnx.Rngs(0)))
    ours = Model.load_bytes(published.save_bytes(), ModelConfig(**sizes))
    ids, _ = batch()
    targets = np.where(np.arange(11) < 8, np.roll(ids, -1, axis=1), 256)
    found = []
    for model, package in ((ours, half), (published, oracle)):
        regularizer = package.SIGReg(SIGRegConfig(slices=32), nnx.Rngs(noise=1))
        step = nnx.jit(nnx.value_and_grad(package.compute_loss, has_aux=True))
        (loss, embedding), gradients = step(model, regularizer, ids, targets)
        found.append((loss, embedding, gradients["predictor"]["kernel"][...], gradients["embedding"]["embedding"][...]))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_padding_has_no_loss_and_directions_change(ours):
    step = nnx.jit(lambda model, regularizer, ids, targets: compute_loss(model, regularizer, ids, targets)[0])
    ids, _ = batch()
    targets = np.where(np.arange(11) < 5, ids % 256, 256)
    none = SIGReg(SIGRegConfig(slices=8, coefficient=0.0), nnx.Rngs(0))
    assert float(step(ours, none, ids, np.full_like(ids, 256))) == 0.0
    some = SIGReg(SIGRegConfig(slices=8), nnx.Rngs(0))
    without, *first_and_second = (float(step(ours, one, ids, targets)) for one in (none, some, some))
    assert len({without, *first_and_second}) == 3


def test_files_go_to_torch_and_back(ours):
    there = TorchModel.load_bytes(ours.save_bytes(), CONFIG).eval()
    assert there.save_bytes() == ours.save_bytes()
    ids, positions = batch(most=500)
    with torch.no_grad():
        found = there(torch.tensor(ids), torch.tensor(positions))
    np.testing.assert_allclose(found.numpy(), both(ours, ids, positions)[1], atol=2e-5)


def test_weights_that_do_not_fit_are_named(ours, tmp_path):
    data = ours.save_bytes()
    for change, message in [
        ({"pwff_hidden_dim": 64}, r"encoder\.layers\.0\.pwff\.linear_inner\.bias.*\(48,\).*\(64,\)"),
        ({"num_layers": 3}, r"lacks the weights 'encoder\.layers\.2\."),
        ({"num_layers": 1}, r"contains the unknown weights 'encoder\.layers\.1\."),
    ]:
        with pytest.raises(ModelFileError, match=message):
            Model.load_bytes(data, dataclasses.replace(CONFIG, **change))
    bias = {"int32": np.zeros(264, np.int32), "not real and finite": np.full(264, np.nan, np.float32), "": np.zeros(3)}
    wrong = {f"'predictor.bias'.*{words}": save(load(data) | {"predictor.bias": bias[words]}) for words in bias}
    model = Model(CONFIG, nnx.Rngs(5))
    before = model.save_bytes()
    for message, content in {"read as safetensors": data[:100], "NoneType": None, **wrong}.items():
        with pytest.raises(ModelFileError, match=message):
            serde.Serde(model).deserialize(content)
    assert model.save_bytes() == before
    with pytest.raises(MissingFileError, match="gone"):
        Model.load(tmp_path / "gone.safetensors", CONFIG)


def test_without_flax_the_error_says_what_to_install():
    code = (
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'flax' else find(name, *a)\n"
        "try:\n    import scforge.soma.v1.flax\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'scforge[flax]'" in done.stdout


IDS = np.array([[97, 98, 99]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: model.encode(np.zeros((1, 3)), IDS), "input has dtype float64"),
        (lambda model: model.encode(IDS + 165, IDS), "input contains 264"),
        (lambda model: model.encode(IDS[0], IDS), r"input has dtype int64 and shape \(3,\)"),
        (lambda model: both(model, IDS, np.arange(4)[None]), r"positions has shape \(1, 4\)"),
        (
            lambda model: compute_loss(model, REGULARIZER, IDS, IDS.T),
            r"targets has shape \(3, 1\), but token_ids has shape \(1, 3\)",
        ),
        (lambda model: compute_loss(model, REGULARIZER, IDS, IDS + 201), "targets contains 300"),
    ],
)
def test_what_is_no_tokens_and_no_targets(ours, call, words):
    with pytest.raises(DataError, match=words):
        call(ours)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Model({"dropout_rate": 0.0}), "pass a ModelConfig"),
        (lambda: Model(dataclasses.replace(CONFIG, num_heads=32)), "num_heads=32 heads of even width"),
        (lambda: attention.MultiHeadAttention(2, 8, dropout_rate=1.5), "dropout_rate=1.5"),
        (lambda: pwff.PositionWiseFeedForward(pwff.PositionWiseFeedForwardConfig(1.5, 8, 8)), "dropout_rate=1.5"),
    ],
)
def test_numbers_that_cannot_be_used(call, words):
    with pytest.raises(OptionError, match=words):
        call()
