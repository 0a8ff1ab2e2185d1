import pytest

from scforge.errors import DataError
from scforge.soma.utils import flatten_dict, remap, unflatten_dict

published = pytest.importorskip("soma_models.utils", reason="the published package is not installed")


@pytest.mark.parametrize("nested", [{"a": {"b": {"c": [1, 2]}, "d": None}, "e": 0}, {"a": {}, "b": {"c": {}}}, {}])
def test_flat_and_back(nested):
    sep = "/"
    flat = flatten_dict(nested, sep=sep)
    assert flat == published.flatten_dict(nested, sep=sep)
    assert unflatten_dict(flat, sep) == published.unflatten_dict(flat, sep) == nested
    for more in (nested, {"": {"x": 1}}):
        assert flatten_dict(more, "top", sep) == published.flatten_dict(more, "top", sep)


@pytest.mark.parametrize(("flat", "named"), [({"a": 1, "a.b": 2}, "'a.b'"), ({"x.y.z": 1, "x.y": 2}, "'x.y'")])
def test_a_value_that_leads_on(flat, named):
    with pytest.raises(DataError, match=named) as caught:
        unflatten_dict(flat)
    assert isinstance(caught.value, ValueError), "as the published one raises"


@pytest.mark.parametrize(
    ("rename", "delete"),
    [({"old": "kept", "absent": "x"}, ["absent"]), ({"old": "b", "b": "c"}, ["unwanted"])],
)
def test_remap(rename, delete):
    ours, theirs = ({"old": 1, "unwanted": 2, "kept": 3} for _ in range(2))
    assert remap(ours, rename_map=rename, keys_to_delete=delete) is None
    published.remap(theirs, rename, delete)
    assert ours == theirs
