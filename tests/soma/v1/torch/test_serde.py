import dataclasses

import pytest
import torch
from safetensors.torch import load, save

from scforge.errors import MissingFileError, ModelFileError
from scforge.soma.v1.torch import Model, SIGReg, SIGRegConfig
from scforge.soma.v1.torch.serde import Serde, load_safetensor_into
from scforge.testing import raises


def test_same_bytes_and_files_both_ways(pair, published, tiny, tmp_path):
    ours, theirs = pair()
    data = theirs.save_bytes()
    assert ours.save_bytes() == data == Serde(ours).serialize()
    ours.save(tmp_path / "ours.safetensors")
    theirs.save(tmp_path / "theirs.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes() == data
    config = published.ModelConfig(**dataclasses.asdict(tiny))
    assert published.Model.load(tmp_path / "ours.safetensors", config).save_bytes() == data
    again = Model.load(str(tmp_path / "theirs.safetensors"), tiny, gradient_checkpointing=True)
    assert again.save_bytes() == data
    assert again.encoder.gradient_checkpointing
    regularizer = SIGReg(SIGRegConfig())
    values = Serde(regularizer).serialize()
    assert values == published.Serde(regularizer).serialize()
    regularizer.phi.zero_()
    assert Serde(regularizer).deserialize(values) is regularizer
    assert Serde(regularizer).serialize() == values
    assert {path.name for path in tmp_path.iterdir()} == {"ours.safetensors", "theirs.safetensors"}


def test_kinds_and_dtypes(tiny):
    model = Model(tiny)
    data = model.save_bytes()
    for given in (bytearray(data), memoryview(data)):
        assert Model.load_bytes(given, tiny).save_bytes() == data
    again = Model.load_bytes(Model.load_bytes(data, tiny).bfloat16().save_bytes(), tiny)
    assert again.predictor.weight.dtype == torch.float32
    torch.testing.assert_close(again.predictor.weight, model.predictor.weight, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_dim": 32}, r"'embedding.weight' with shape \(264, 16\), but the model requires shape \(264, 32\)"),
        ({"num_layers": 1}, "contains the unknown weights 'encoder.layers.1"),
    ],
)
def test_a_file_of_other_sizes(tiny, change, message, tmp_path):
    Model(tiny).save(tmp_path / "weights.safetensors")
    with pytest.raises(ModelFileError, match=message) as caught:
        Model.load(tmp_path / "weights.safetensors", dataclasses.replace(tiny, **change))
    assert "weights.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(264, dtype=torch.int64), "'predictor.bias' .torch.int64. with values that are not real"),
        (torch.full((264,), float("nan")), "'predictor.bias' .torch.float32. with values that are not real and finite"),
    ],
)
def test_a_refused_file_changes_no_weight(tiny, values, message):
    model = Model(tiny)
    before = model.save_bytes()
    with pytest.raises(ModelFileError, match=message):
        load_safetensor_into(model, save(load(Model(tiny).save_bytes()) | {"predictor.bias": values}))
    assert model.save_bytes() == before


def test_what_is_no_file_of_weights(tiny, tmp_path):
    with raises(MissingFileError, "filename"):
        Model.load(tmp_path / "nowhere.safetensors", tiny)
    (tmp_path / "text.safetensors").write_text("these are not weights")
    with pytest.raises(ModelFileError):
        Model.load(tmp_path / "text.safetensors", tiny)
    for data, message in [(Model(tiny).save_bytes()[:-10], "cannot be read"), (None, "'NoneType' object")]:
        with pytest.raises(ModelFileError, match=message):
            Model.load_bytes(data, tiny)
