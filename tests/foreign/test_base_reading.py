"""Files of others: what they hold is read, and nothing that they bring is run."""

import json
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scforge.errors import MissingFileError, ModelFileError
from scforge.foreign.base import read_dictionary, read_torch, read_weights

RAN: list[str] = []


def run_something(what: str) -> str:
    RAN.append(what)
    return what


class Hostile:
    def __reduce__(self):
        return run_something, ("something",)


@pytest.fixture(autouse=True)
def nothing_ran():
    RAN.clear()
    yield
    assert not RAN


@pytest.mark.parametrize(
    "content",
    [
        {"A": 1, "B": 2.5, "C": "ENSG00000000003", "<pad>": 0},
        {"A": np.int16(7), "B": np.float64(0.1), "C": np.float32(0.1), "D": np.int64(-3)},
        OrderedDict(A=np.dtype(">i4").type(5)),
    ],
)
def test_dictionaries(content: dict, tmp_path: Path) -> None:
    path = tmp_path / "tokens.pkl"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        found = read_dictionary(path)
        assert found == content
        assert {type(value) for value in found.values()} <= {int, float, str}
    (tmp_path / "z.json").write_text(json.dumps({"A": 1}))
    assert read_dictionary(tmp_path / "z.json") == {"A": 1}


@pytest.mark.parametrize(
    "content",
    [
        {"A": Hostile()},
        {"A": np.arange(3)},
        {"A": eval},
        {1: 2},
        ["A", "B"],
    ],
)
def test_pickle_files_of_anything_else(content, tmp_path: Path) -> None:
    path = tmp_path / "tokens.pkl"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(ModelFileError):
        read_dictionary(path)


GOOD = pickle.dumps({f"gene{i}": np.float64(i) for i in range(50)})


def test_damaged_pickle_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens.pkl"
    for place in range(0, len(GOOD), 37):
        for content in (GOOD[:place], GOOD[:place] + bytes([GOOD[place] ^ 255]) + GOOD[place + 1 :]):
            path.write_bytes(content)
            try:
                found = read_dictionary(path)
            except ModelFileError:
                continue
            assert set(map(type, found.values())) <= {int, float, str}


def test_weights(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    torch.save(weights, tmp_path / "new.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(weights, tmp_path / "w.safetensors")
    for name in ("new.pt", "old.pt", "w.safetensors"):
        found = read_weights(tmp_path / name)
        assert set(found) == set(weights)
        assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_damaged_torch_files(tmp_path: Path) -> None:
    weights = {"a": torch.randn(100), "b": torch.randn(20, 20)}
    torch.save(weights, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    numbers = data.find(weights["b"].numpy().tobytes())
    (tmp_path / "x.pt").write_bytes(data[: numbers + 70] + bytes([data[numbers + 70] ^ 1]) + data[numbers + 71 :])
    with pytest.raises(ModelFileError):
        read_weights(tmp_path / "x.pt")
    for place in range(0, len(data), 97):
        (tmp_path / "x.pt").write_bytes(data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :])
        try:
            found = read_weights(tmp_path / "x.pt")
        except ModelFileError:
            continue  # what is between records and not read may be anything
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    for n_bytes in (len(data) - 1, len(data) // 2, 10):
        (tmp_path / "x.pt").write_bytes(data[:n_bytes])
        with pytest.raises(ModelFileError):
            read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("new", [True, False])
def test_torch_files_that_would_run_something(new: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Hostile()}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(ModelFileError):
        read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04 half", pickle.dumps({"a": 1}, protocol=2)[:-3]])
def test_no_weights(content: bytes, tmp_path: Path) -> None:
    for name, message in (("x.pt", "x.pt'"), ("x.safetensors", "or is not a safetensors file")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            read_weights(tmp_path / name)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_torch(tmp_path / "x.pt")
