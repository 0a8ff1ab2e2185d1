import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch

from scforge._io import sha256_of
from scforge.errors import ScforgeError
from scforge.estimators import Encoder
from scforge.estimators.serialize import read_description, sealed

FILES = {
    "model": ["config.json", "model.safetensors", "vocab.json"],
    "adapter": ["adapter.json", "adapter.safetensors", "split.safetensors"],
}

Spoil = Callable[[Path], object]


def config(folder: Path) -> Path:
    return folder / FILES[folder.name][0]


def weights(folder: Path) -> Path:
    return folder / FILES[folder.name][1]


def cut(name: str, keep: Callable[[int], int]) -> Spoil:
    return lambda folder: os.truncate(folder / name, keep((folder / name).stat().st_size))


def flip(name: str, share: float) -> Spoil:
    def spoil(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[min(int(share * len(data)), len(data) - 3)] ^= 1
        (folder / name).write_bytes(data)

    return spoil


class Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def pickled(name: str, write: Callable[[object, Path], None] = torch.save) -> Spoil:
    return lambda folder: write({"weights": Harmful(folder.parent / "executed")}, folder / name)


def in_place_of(file: str) -> dict[str, Spoil]:
    return {
        f"{file} without its last bytes": cut(file, lambda size: size - 3),
        f"an empty {file}": cut(file, lambda size: 0),
        f"no {file}": lambda folder: (folder / file).unlink(),
        f"a folder in place of {file}": lambda folder: ((folder / file).unlink(), (folder / file).mkdir()),
        f"a file of torch.save for {file}": pickled(file),
        f"a pickle for {file}": pickled(file, lambda content, path: path.write_bytes(pickle.dumps(content))),
        **{f"a bit of {file} at {share}": flip(file, share) for share in (0.0, 0.01, 0.4, 0.7, 1.0)},
    }


def only_pickled(folder: Path) -> None:
    weights(folder).unlink()
    pickled("pytorch_model.bin")(folder)


CASES: dict[str, dict[str, Spoil]] = {
    kind: {name: spoil for file in files for name, spoil in in_place_of(file).items()} for kind, files in FILES.items()
}
CASES["model"] |= {
    f"{file} of another model": lambda folder, file=file: shutil.copy(folder.parent / "other" / file, folder)
    for file in FILES["model"]
}
CASES["model"]["a pickle alone"] = only_pickled
for kind in CASES:
    CASES[kind]["no folder at all"] = shutil.rmtree
    CASES[kind]["a file in place of the folder"] = lambda folder: (shutil.rmtree(folder), folder.write_text(""))


def said(part: str | None = None, **changes: object) -> Spoil:
    """Change what the description says, and write it with right checksums."""

    def spoil(folder: Path) -> None:
        content = read_description(folder.name, config(folder))
        sums = {name: sha256_of(folder / name) for name in content["sha256"]} if folder.name == "model" else None
        content["sha256"] = sums or sha256_of(weights(folder))
        (content if part is None else content[part]).update(changes)
        content = {key: value for key, value in content.items() if key not in ("format", "scforge_version")}
        config(folder).write_text(sealed(content))

    return spoil


seal = said()


def text(new: str | bytes) -> Spoil:
    return lambda folder: config(folder).write_bytes(new if isinstance(new, bytes) else new.encode())


def within(old: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        content = config(folder).read_text()
        assert old in content
        config(folder).write_text(content.replace(old, new, 1))

    return spoil


def vocabulary(change: Callable[[str], str]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "vocab.json"
        path.write_text(change(path.read_text()))
        seal(folder)

    return spoil


CASES["model"] |= {
    "JSON nested too deeply": text("[" * 500_000),
    "JSON in UTF-16": text('{"format": 2}'.encode("utf-16")),
    "JSON of a list": text("[]"),
    "the description of another program": text('{"model_type": "bert"}'),
    "a description without checksum": within('"checksum"', '"check"'),
    "a format that is not a number": within('"format": 2', '"format": true'),
    "a format before the first": within('"format": 2', '"format": 0'),
    "gigabytes of weights": said("architecture", hidden_dim=10**6, ffn_dim=10**6),
    "a negative width": said("architecture", hidden_dim=-8),
    "another class": said(None, **{"class": "__class__"}),
    "a history of texts": said(None, history={"loss": ["low"]}),
    "a seed that is true": said(None, seed=True),
    "a seed that is too large": said(None, seed=2**63),
    "a fine-tuning in parts": said(None, tuning={"task": {"name": ["annotation"]}, "lora": None}),
    "a base of no name": said(None, card={"base": {"name": 1}}),
    "a vocabulary with other genes": vocabulary(lambda content: content.replace("gene3", "gene4000", 1)),
}
CASES["adapter"] |= {
    "the weights of a model": lambda folder: shutil.copy(
        folder.with_name("model") / "model.safetensors", weights(folder)
    ),
    "the description of a model": lambda folder: shutil.copy(folder.with_name("model") / "config.json", config(folder)),
    "a checksum that is a list": said(sha256=[1]),
    "a task of no name": said("tuning", task={}),
    "no width": said("tuning", n_latent=None),
    "other cells": said("tuning", split={"cells": "0" * 64}),
}


def rewritten(change: Callable[[dict, bytes], tuple[dict | bytes, bytes]]) -> Spoil:
    def spoil(folder: Path) -> None:
        data = weights(folder).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header, numbers = change(json.loads(data[8 : 8 + size]), data[8 + size :])
        header = header if isinstance(header, bytes) else json.dumps(header).encode()
        weights(folder).write_bytes(struct.pack("<Q", len(header)) + header + numbers)
        seal(folder)

    return spoil


def more(header: dict, numbers: bytes) -> tuple[dict, bytes]:
    place = [len(numbers), len(numbers) + 4]
    return {**header, "more": {"dtype": "F32", "shape": [1], "data_offsets": place}}, numbers + bytes(4)


CASES["model"] |= {
    "a header longer than all memory": lambda folder: weights(folder).write_bytes(struct.pack("<Q", 2**63 + 5)),
    "numbers that belong to no tensor": rewritten(lambda header, numbers: (header, numbers + b"more")),
}
for kind in CASES:
    CASES[kind]["weights that are NaN"] = rewritten(lambda header, numbers: (header, b"\xff" * len(numbers)))
    CASES[kind]["one tensor more"] = rewritten(more)


@pytest.fixture(scope="module")
def base(saved_models: Path) -> Encoder:
    return Encoder.load(saved_models / "base")


@pytest.fixture(scope="module")
def sound(base: Encoder, saved_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sound")
    counts = np.random.default_rng(0).poisson(1.0, (20, 40)).astype(np.float32)
    for name, n_genes in {"model": 30, "other": 40}.items():
        adata = ad.AnnData(counts[:, :n_genes].copy())
        adata.var_names = [f"gene{i}" for i in range(n_genes)]
        Encoder.setup_anndata(adata)
        Encoder(adata, hidden_dim=8, ffn_dim=8, latent_dim=4).save(place / name)
        Encoder.load(place / name)
    Encoder.load(saved_models / "adapter", base=base).save(place / "adapter", adapter_only=True)
    Encoder.load(place / "adapter", base=base)
    return place


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in CASES.items() for name in cases])
def test_a_spoiled_folder(kind: str, name: str, base: Encoder, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    CASES[kind][name](tmp_path / kind)
    with pytest.raises(ScforgeError) as caught:
        Encoder.load(tmp_path / kind) if kind == "model" else Encoder.load(tmp_path / kind, base=base)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 600
    assert not (tmp_path / "executed").exists()
