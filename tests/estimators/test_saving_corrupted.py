"""Folders that an accident or somebody has spoiled: each a sentence, nothing run, memory bounded."""

from __future__ import annotations

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
from scforge.estimators.serialize import MODEL, read_description, sealed

CONFIG, VOCAB, WEIGHTS = "config.json", "vocab.json", "model.safetensors"
MOST_MEMORY = 100 * 2**20

Spoil = Callable[[Path], None]
CASES: dict[str, Spoil] = {}


# ---- accidents


def cut(name: str, keep: Callable[[int], int]) -> Spoil:
    return lambda folder: os.truncate(folder / name, keep((folder / name).stat().st_size))


def flip(name: str, share: float) -> Spoil:
    def spoil(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[min(int(share * len(data)), len(data) - 3)] ^= 1
        (folder / name).write_bytes(data)

    return spoil


for file in (CONFIG, VOCAB, WEIGHTS):
    CASES[f"{file} without its last bytes"] = cut(file, lambda size: size - 3)
    CASES[f"half of {file}"] = cut(file, lambda size: size // 2)
    CASES[f"an empty {file}"] = cut(file, lambda size: 0)
    CASES[f"no {file}"] = lambda folder, file=file: (folder / file).unlink()
    CASES[f"a folder for {file}"] = lambda folder, file=file: ((folder / file).unlink(), (folder / file).mkdir())
    for part in (0.0, 0.01, 0.4, 1.0):
        CASES[f"a bit of {file} at {part}"] = flip(file, part)
    CASES[f"{file} of another model"] = lambda folder, file=file: shutil.copy(folder.parent / "other" / file, folder)


def exchanged(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "x")
    (folder / VOCAB).rename(folder / CONFIG)
    (folder / "x").rename(folder / VOCAB)


CASES["the files of two names exchanged"] = exchanged
CASES["no folder at all"] = shutil.rmtree
CASES["a file in place of the folder"] = lambda folder: (shutil.rmtree(folder), folder.write_text(""))
CASES["a description of a gigabyte"] = cut(CONFIG, lambda size: 2**30)
CASES["a vocabulary of a gigabyte"] = cut(VOCAB, lambda size: 2**30)


# ---- links


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder.parent / "outside").write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / name).symlink_to(target.format(folder=folder))

    return spoil


CASES["a link out of the folder"] = link(CONFIG, "../outside")
CASES["an absolute link out of the folder"] = link(WEIGHTS, "{folder}/../outside")
CASES["a link to a device"] = link(VOCAB, "/dev/zero")
CASES["a link to nothing"] = link(WEIGHTS, "nothing")
CASES["a link to itself"] = link(CONFIG, CONFIG)


# ---- pickles


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def pickled(name: str, write: Callable[[object, Path], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        write({"weights": Harmful(folder.parent / "executed")}, folder / name)

    return spoil


for protocol in (2, 5):
    CASES[f"a pickle of protocol {protocol} for weights"] = pickled(
        WEIGHTS, lambda content, path, protocol=protocol: path.write_bytes(pickle.dumps(content, protocol))
    )
CASES["an old file of torch.save for weights"] = pickled(
    WEIGHTS, lambda content, path: torch.save(content, path, _use_new_zipfile_serialization=False)
)
for file in (CONFIG, VOCAB, WEIGHTS):
    CASES[f"a file of torch.save for {file}"] = pickled(file, torch.save)
CASES["a pickle alone"] = lambda folder: ((folder / WEIGHTS).unlink(), pickled("pytorch_model.bin", torch.save)(folder))


# ---- descriptions that are no accident: their checksums are right


def seal(folder: Path, content: dict | None = None) -> None:
    """Write a description with right checksums."""
    content = read_description(MODEL, folder / CONFIG) if content is None else content
    content = {key: value for key, value in content.items() if key not in ("format", "scforge_version")}
    sums = {name: sha256_of(folder / name) for name in (WEIGHTS, VOCAB)}
    (folder / CONFIG).write_text(sealed(MODEL, {**content, "sha256": sums}))


def said(part: str | None, **changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        content = read_description(MODEL, folder / CONFIG)
        (content if part is None else content[part]).update(changes)
        seal(folder, content)

    return spoil


def text(new: str | bytes, name: str = CONFIG) -> Spoil:
    return lambda folder: (folder / name).write_bytes(new if isinstance(new, bytes) else new.encode())


def within(old: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        content = (folder / CONFIG).read_text()
        assert old in content
        (folder / CONFIG).write_text(content.replace(old, new, 1))

    return spoil


TUNING = {"task": {"name": "annotation", "labels_key": "x", "classes": ["a", "b"]}, "lora": None, "freeze": False}
TUNING |= {"n_latent": 10**12, "split": {}, "base": {}}

CASES |= {
    "JSON nested too deeply": text("[" * 500_000),
    "objects nested too deeply": text('{"a":' * 100_000),
    "JSON of very many lists": text("[" + "[]," * 2_000_000 + "[]]"),
    "JSON in UTF-16": text('{"format": 2}'.encode("utf-16")),
    "JSON of no object": text('["format", 2]'),
    "the description of another program": text('{"model_type": "bert"}'),
    "a description of nothing but a format": text('{"format": 1}'),
    "a format of nothing": text('{"format": null}'),
    "bytes before the description": lambda folder: text(b"\xff\xfe" + (folder / CONFIG).read_bytes())(folder),
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
    "billions of layers": said("architecture", num_layers=10**9),
    "a million layers": said("architecture", num_layers=10**6),
    "a negative width": said("architecture", hidden_dim=-8),
    "a width in words": said("architecture", hidden_dim="eight"),
    "a width of nothing": said("architecture", hidden_dim=None),
    "an unknown option": said("architecture", hiden_dim=8),
    "an impossible tokenizer": said("tokenizer", max_len=-1),
    "an impossible objective": said("objective", n_views=-1),
    "another class": said(None, **{"class": "__class__"}),
    "a history of texts": said(None, history={"loss": ["low"]}),
    "a seed that is true": said(None, seed=True),
    "a name that is a list": said("architecture", name=["gene_pooling"]),
    "a column that is a list": said("setup", layer=["counts"]),
    "a fine-tuning of terabytes": said(None, tuning=TUNING),
    "a fine-tuning of nothing": said(None, tuning=[]),
    "a fine-tuning in parts": said(
        None, tuning={"task": {"name": ["annotation"]}, **{k: [] for k in TUNING if k != "task"}}
    ),
    "a tokenizer of no name": said(None, tokenizer={}),
    "a card that is a list": said(None, card=["cc0"]),
    "a licence that is a number": said(None, card={"licence": 5}),
    "figures that are none": said(None, card={"scores": [{"no": 1}]}),
    "epochs in words": said(None, card={"n_epochs": "1"}),
    "a checkpoint that is a number": said(None, card={"checkpoint": 1}),
    "a base of no name": said(None, card={"base": {"name": 1}}),
}


def vocabulary(new: str | bytes | Callable[[str], str]) -> Spoil:
    def spoil(folder: Path) -> None:
        content = new((folder / VOCAB).read_text()) if callable(new) else new
        text(content, VOCAB)(folder)
        seal(folder)

    return spoil


CASES |= {
    "the vocabulary of another model": lambda folder: vocabulary((folder.parent / "other" / VOCAB).read_text())(folder),
    "a vocabulary nested too deeply": vocabulary("[" * 300_000),
    "a vocabulary of very many lists": vocabulary("[" + "[]," * 5_000_000 + "[]]"),
    "a vocabulary with a key twice": vocabulary(lambda content: content.replace('"genes"', '"genes": [], "genes"', 1)),
    "a vocabulary with other genes": vocabulary(lambda content: content.replace("gene3", "gene4000", 1)),
}


# ---- weights that are no accident


def rewritten(change: Callable[[dict, bytes], tuple[dict | bytes, bytes]]) -> Spoil:
    def spoil(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header, numbers = change(json.loads(data[8 : 8 + size]), data[8 + size :])
        header = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + numbers)
        seal(folder)

    return spoil


def first(**changes: object) -> Spoil:
    """Change what the header says of the first tensor."""

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
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", number) + data[8:])
        seal(folder)

    return spoil


def terabyte(folder: Path) -> None:
    """A sparse file that really is as large as its header says."""
    more(0, 2**40)(folder)
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + 2**40)


CASES |= {
    "weights that are NaN": rewritten(lambda header, numbers: (header, b"\xff" * len(numbers))),
    "a header longer than the file": length(10**6),
    "a header longer than all memory": length(2**63 + 5),
    "a header of nothing": length(0),
    "a header nested too deeply": rewritten(lambda header, numbers: (b'{"a":' * 200_000, numbers)),
    "a header with a tensor twice": rewritten(lambda header, numbers: (b'{"a": 1, "a": 1}', numbers)),
    "a header of no tensors": rewritten(lambda header, numbers: (b"[]      ", numbers)),
    "numbers that belong to no tensor": rewritten(lambda header, numbers: (header, numbers + b"more")),
    "an unknown dtype": first(dtype="F7"),
    "weights that are whole numbers": first(dtype="I32"),
    "a dtype that is a list": first(dtype=["F32"]),
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


# ---- the test


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and one with another."""
    place = tmp_path_factory.mktemp("sound")
    counts = np.random.default_rng(0).poisson(1.0, (20, 40)).astype(np.float32)
    for name, n_genes in {"model": 30, "other": 40}.items():
        adata = ad.AnnData(counts[:, :n_genes].copy())
        adata.var_names = [f"gene{i}" for i in range(n_genes)]
        Encoder.setup_anndata(adata)
        Encoder(adata, hidden_dim=8, ffn_dim=8, latent_dim=4).save(place / name)
        Encoder.load(place / name)
    return place


def memory(what: str) -> int | None:
    """Return the memory that this process has (VmRSS), or had at most since it was asked (VmHWM); in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    if what == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in status.read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("name", CASES)
def test_a_spoiled_folder(name: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "model"
    CASES[name](folder)
    before = memory("VmRSS")
    with pytest.raises((ModelFileError, MissingFileError)) as caught:
        Encoder.load(folder)
    after = memory("VmHWM")
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 600
    assert not (tmp_path / "executed").exists()
    if before is not None and after is not None:
        assert after - before < MOST_MEMORY
