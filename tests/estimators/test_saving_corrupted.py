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
from scforge.errors import MissingFileError, ModelFileError
from scforge.estimators import Encoder
from scforge.estimators.serialize import read_description, sealed

MAX_MEMORY = 100 * 2**20
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


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder.parent / "outside").write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / name).symlink_to(target.format(folder=folder))

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
        f"a gigabyte of {file}": cut(file, lambda size: 2**30),
        f"no {file}": lambda folder: (folder / file).unlink(),
        f"a folder in place of {file}": lambda folder: ((folder / file).unlink(), (folder / file).mkdir()),
        f"{file} out of the folder": link(file, "../outside"),
        f"{file} absolutely out of the folder": link(file, "{folder}/../outside"),
        f"{file} that is a device": link(file, "/dev/zero"),
        f"{file} that is a link to nothing": link(file, "nothing"),
        f"{file} that is a link to itself": link(file, file),
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


TUNING = {"task": {"name": "annotation", "labels_key": "x", "classes": ["a", "b"]}, "lora": None, "freeze": False}
TUNING |= {"n_latent": 10**12, "split": {}, "base": {}}

CASES["model"] |= {
    "JSON nested too deeply": text("[" * 500_000),
    "objects nested too deeply": text('{"a":' * 100_000),
    "JSON of very many lists": text("[" + "[]," * 2_000_000 + "[]]"),
    "JSON in UTF-16": text('{"format": 2}'.encode("utf-16")),
    "the description of another program": text('{"model_type": "bert"}'),
    "a key twice": within('"seed"', '"seed": 1, "seed"'),
    "NaN": within('"seed": 0', '"seed": NaN'),
    "a number beyond all numbers": within('"seed": 0', '"seed": 1e999'),
    "a number of 5000 digits": within('"seed": 0', '"seed": ' + 5000 * "9"),
    "a description without checksum": within('"checksum"', '"check"'),
    "a format that is no number": within('"format": 2', '"format": true'),
    "a format before the first": within('"format": 2', '"format": 0'),
    "an absolute path": said("tokenizer", table="/etc/passwd"),
    "a path out of the folder": said("tokenizer", transform="../../secrets"),
    "a file beside": said("architecture", pooling="weights.npz"),
    "terabytes of weights": said("architecture", hidden_dim=10**12),
    "gigabytes of weights": said("architecture", hidden_dim=10**6, ffn_dim=10**6),
    "more numbers than there are bytes": said("architecture", hidden_dim=10**19),
    "a million layers": said("architecture", num_layers=10**6),
    "a negative width": said("architecture", hidden_dim=-8),
    "an unknown option": said("architecture", hiden_dim=8),
    "an impossible tokenizer": said("tokenizer", max_len=-1),
    "an impossible objective": said("objective", n_views=-1),
    "another class": said(None, **{"class": "__class__"}),
    "a history of texts": said(None, history={"loss": ["low"]}),
    "a seed that is true": said(None, seed=True),
    "a fine-tuning of terabytes": said(None, tuning=TUNING),
    "a fine-tuning in parts": said(None, tuning={**dict.fromkeys(TUNING, []), "task": {"name": ["annotation"]}}),
    "a base of no name": said(None, card={"base": {"name": 1}}),
    "a vocabulary nested too deeply": vocabulary(lambda content: "[" * 300_000),
    "a vocabulary of very many lists": vocabulary(lambda content: "[" + "[]," * 5_000_000 + "[]]"),
    "a vocabulary with a key twice": vocabulary(lambda content: content.replace('"genes"', '"genes": [], "genes"', 1)),
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
    "a width of terabytes": said("tuning", n_latent=10**12),
    "adapters of no rank": said("tuning", lora={}),
    "adapters of a rank in words": said("tuning", lora={"r": "two"}),
    "adapters of terabytes": said("tuning", lora={"r": 10**12}),
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


def first(**changes: object) -> Spoil:
    def change(header: dict, numbers: bytes) -> tuple[dict, bytes]:
        name = next(name for name in header if name != "__metadata__")
        header[name] |= changes
        return header, numbers

    return rewritten(change)


def more(begin: int, n_bytes: int, tail: bytes = b"") -> Spoil:
    """Add a tensor that begins so many bytes after the others, and bytes at the end of the file."""

    def change(header: dict, numbers: bytes) -> tuple[dict, bytes]:
        place = [len(numbers) + begin, len(numbers) + begin + n_bytes]
        return {**header, "more": {"dtype": "U8", "shape": [n_bytes], "data_offsets": place}}, numbers + tail

    return rewritten(change)


def length(number: int) -> Spoil:
    def spoil(folder: Path) -> None:
        weights(folder).write_bytes(struct.pack("<Q", number) + weights(folder).read_bytes()[8:])
        seal(folder)

    return spoil


def terabyte(folder: Path) -> None:
    """A sparse file that really is as large as its header says."""
    more(0, 2**40)(folder)
    os.truncate(weights(folder), weights(folder).stat().st_size + 2**40)


CASES["adapter"]["weights that are NaN"] = rewritten(lambda header, numbers: (header, b"\xff" * len(numbers)))
CASES["model"] |= {
    "weights that are NaN": CASES["adapter"]["weights that are NaN"],
    "a header longer than the file": length(10**6),
    "a header longer than all memory": length(2**63 + 5),
    "a header of nothing": length(0),
    "a header nested too deeply": rewritten(lambda header, numbers: (b'{"a":' * 200_000, numbers)),
    "a header with a tensor twice": rewritten(lambda header, numbers: (b'{"a": 1, "a": 1}', numbers)),
    "a header of no tensors": rewritten(lambda header, numbers: (b"[]      ", numbers)),
    "numbers that belong to no tensor": rewritten(lambda header, numbers: (header, numbers + b"more")),
    "an unknown dtype": first(dtype="F7"),
    "weights that are whole numbers": first(dtype="I32"),
    "a negative shape": first(shape=[-1, -4]),
    "a shape of terabytes": first(shape=[2**40, 2**20]),
    "a shape of very many axes": first(shape=[1] * 100_000),
    "a shape that is a number": first(shape=4),
    "a tensor beyond the end": first(shape=[2**36], data_offsets=[0, 2**38]),
    "a tensor at a negative place": first(data_offsets=[-16, 0]),
    "a tensor in no place": first(data_offsets=None),
    "a tensor that is a text": rewritten(lambda header, numbers: ({**header, "more": "F32"}, numbers)),
    "tensors that overlap": more(-4, 4),
    "tensors with a gap": more(8, 1, bytes(9)),
    "one tensor more": more(0, 1, b"1"),
    "weights of a terabyte": terabyte,
}


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


def memory(what: str) -> int:
    """Return the bytes that this process has (VmRSS), or had at most since it was asked (VmHWM); 0 where none says."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if what == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(what))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in CASES.items() for name in cases])
def test_a_spoiled_folder(kind: str, name: str, base: Encoder, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    CASES[kind][name](tmp_path / kind)
    before = memory("VmRSS")
    with pytest.raises((ModelFileError, MissingFileError)) as caught:
        Encoder.load(tmp_path / kind) if kind == "model" else Encoder.load(tmp_path / kind, base=base)
    assert memory("VmHWM") - before < MAX_MEMORY
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 600
    assert not (tmp_path / "executed").exists()
