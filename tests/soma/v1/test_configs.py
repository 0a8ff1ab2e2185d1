import dataclasses

import pytest

from scforge.errors import OptionError
from scforge.soma import v1
from scforge.soma.v1 import configs

published = pytest.importorskip("soma_models.v1.configs", reason="the published package is not installed")


def test_constants():
    from soma_models.v1 import ARCHITECTURE_VERSION

    names = [name for name in vars(published) if name.startswith("V1_")]
    assert len(names) == 15
    assert {name: getattr(configs, name) for name in names} == {name: getattr(published, name) for name in names}
    assert v1.ARCHITECTURE_VERSION == ARCHITECTURE_VERSION


@pytest.mark.parametrize(
    "name", ["ModelConfig", "EncoderConfig", "LayerConfig", "PositionWiseFeedForwardConfig", "SIGRegConfig"]
)
def test_fields_and_defaults(name):
    cls = getattr(configs, name)
    ours, theirs = (
        [(field.name, field.default) for field in dataclasses.fields(one)] for one in (cls, getattr(published, name))
    )
    assert ours == theirs
    assert cls() if name == "SIGRegConfig" else cls(dropout_rate=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 7}, "embedding_dim=2048 cannot be split into num_heads=7"),
        ({"embedding_dim": 6, "num_heads": 2}, "embedding_dim=6 cannot be split into num_heads=2 heads of even width"),
        ({"scale_factor": 0.5}, "scale_factor=0.5 is below 1"),
        ({"dropout_rate": 1.5}, "dropout_rate=1.5"),
        ({"vocab_size": 2.5}, "vocab_size=2.5"),
        *(({name: bad}, name) for name, bad in [("points", 1), ("slices", 0), ("t_max", -1.0), ("coefficient", -0.1)]),
    ],
)
def test_numbers_that_cannot_be_used(change, message):
    with pytest.raises(OptionError, match=message):
        configs.SIGRegConfig(**change) if message in change else configs.ModelConfig(**{"dropout_rate": 0.0} | change)
