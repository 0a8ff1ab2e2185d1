"""Folders of adapters that an accident or somebody has spoiled: each a sentence, nothing run, memory bounded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scforge._io import sha256_of
from scforge.errors import MissingFileError, ModelFileError
from scforge.estimators import Encoder
from scforge.estimators.folder_formats import ADAPTER, read_description, sealed

FIRST = Path(__file__).parents[1] / "fixtures" / "format_1"
CONFIG, WEIGHTS, SPLIT = "adapter.json", "adapter.safetensors", "split.safetensors"
MOST_MEMORY = 100 * 2**20

Spoil = Callable[[Path], object]
CASES: dict[str, Spoil] = {}


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
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def pickled(name: str, write: Callable[[object, Path], None]) -> Spoil:
    return lambda folder: write({"weights": Harmful(folder.parent / "executed")}, folder / name)


for file in (CONFIG, WEIGHTS, SPLIT):
    CASES[f"{file} without its last bytes"] = cut(file, lambda size: size - 3)
    CASES[f"half of {file}"] = cut(file, lambda size: size // 2)
    CASES[f"an empty {file}"] = cut(file, lambda size: 0)
    CASES[f"no {file}"] = lambda folder, file=file: (folder / file).unlink()
    CASES[f"a folder in place of {file}"] = lambda folder, file=file: (
        (folder / file).unlink(),
        (folder / file).mkdir(),
    )
    for part in (0.0, 0.01, 0.4, 0.7, 1.0):
        CASES[f"a bit of {file} at {part}"] = flip(file, part)
    CASES[f"{file} out of the folder"] = link(file, "../outside")
    CASES[f"{file} absolutely out of the folder"] = link(file, "{folder}/../outside")
    CASES[f"{file} that is a device"] = link(file, "/dev/zero")
    CASES[f"{file} that is a link to nothing"] = link(file, "nothing")
    CASES[f"{file} that is a link to itself"] = link(file, file)
    CASES[f"a file of torch.save for {file}"] = pickled(file, torch.save)
    CASES[f"a pickle for {file}"] = pickled(file, lambda content, path: path.write_bytes(pickle.dumps(content)))
    CASES[f"a gigabyte of {file}"] = cut(file, lambda size: 2**30)
CASES |= {
    "no folder at all": shutil.rmtree,
    "a file in place of the folder": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "two files exchanged": lambda folder: (
        (folder / CONFIG).rename(folder / "x"),
        (folder / WEIGHTS).rename(folder / CONFIG),
        (folder / "x").rename(folder / WEIGHTS),
    ),
    "the weights of a model": lambda folder: shutil.copy(FIRST / "plain" / "model.safetensors", folder / WEIGHTS),
    "the description of a model": lambda folder: shutil.copy(FIRST / "plain" / "config.json", folder / CONFIG),
}


# ---- what is no accident: the checksums are right


def said(part: str | None = None, **changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        content = read_description(ADAPTER, folder / CONFIG)
        (content if part is None else content[part]).update(changes)
        content["sha256"] = sha256_of(folder / WEIGHTS) if "sha256" not in changes else changes["sha256"]
        content = {key: value for key, value in content.items() if key not in ("format", "scforge_version")}
        (folder / CONFIG).write_text(sealed(ADAPTER, content))

    return spoil


def text(new: str) -> Spoil:
    return lambda folder: (folder / CONFIG).write_text(new)


def rewritten(change: Callable[[dict, bytes], tuple[dict | bytes, bytes]]) -> Spoil:
    def spoil(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header, numbers = change(json.loads(data[8 : 8 + size]), data[8 + size :])
        header = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + numbers)
        said()(folder)

    return spoil


def first(**changes: object) -> Spoil:
    def change(header: dict, numbers: bytes) -> tuple[dict, bytes]:
        header[next(name for name in header if name != "__metadata__")] |= changes
        return header, numbers

    return rewritten(change)


CASES |= {
    "JSON nested too deeply": text("[" * 500_000),
    "JSON of very many lists": text("[" + "[]," * 2_000_000 + "[]]"),
    "JSON of no object": text('["format", 2]'),
    "a format that is no number": text('{"format": true}'),
    "a seed that is true": said(seed=True),
    "epochs in words": said(n_epochs="many"),
    "a history of texts": said(history={"loss": ["low"]}),
    "a history that is a number": said(history={"loss": 5}),
    "a card that is a list": said(card=["cc0"]),
    "a checksum that is a list": said(sha256=[1]),
    "a task of no name": said("tuning", task={}),
    "a task that is a list": said("tuning", task=["annotation"]),
    "a task whose name is a list": said("tuning", task={"name": ["annotation"]}),
    "no width": said("tuning", n_latent=None),
    "a width in words": said("tuning", n_latent="eight"),
    "a width of terabytes": said("tuning", n_latent=10**12),
    "adapters that are a list": said("tuning", lora=["r", 2]),
    "adapters of no rank": said("tuning", lora={}),
    "adapters of a rank in words": said("tuning", lora={"r": "two"}),
    "adapters of terabytes": said("tuning", lora={"r": 10**12}),
    "a split that is a list": said("tuning", split=[]),
    "other cells": said("tuning", split={"cells": "0" * 64}),
    "cells that are a list": said("tuning", split={"cells": [1]}),
    "weights that are NaN": rewritten(lambda header, numbers: (header, b"\xff" * len(numbers))),
    "a header nested too deeply": rewritten(lambda header, numbers: (b'{"a":' * 200_000, numbers)),
    "a header of no tensors": rewritten(lambda header, numbers: (b"[]      ", numbers)),
    "numbers that belong to no tensor": rewritten(lambda header, numbers: (header, numbers + b"more")),
    "an unknown dtype": first(dtype="F7"),
    "a negative shape": first(shape=[-1, -4]),
    "a shape of terabytes": first(shape=[2**40, 2**20]),
    "a tensor beyond the end": first(shape=[2**36], data_offsets=[0, 2**38]),
    "one tensor more": rewritten(
        lambda header, numbers: (
            {**header, "x": {"dtype": "U8", "shape": [1], "data_offsets": [len(numbers), len(numbers) + 1]}},
            numbers + b"1",
        )
    ),
}


@pytest.fixture(scope="module")
def base() -> Encoder:
    return Encoder.load(FIRST / "base")


@pytest.fixture(scope="module")
def sound(base: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter in the present format."""
    folder = tmp_path_factory.mktemp("sound") / "adapter"
    Encoder.load_adapter(base, FIRST / "adapter").save_adapter(folder)
    return folder


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
def test_a_spoiled_adapter(name: str, base: Encoder, sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "adapter"))
    CASES[name](folder)
    before = memory("VmRSS")
    with pytest.raises((ModelFileError, MissingFileError)) as caught:
        Encoder.load_adapter(base, folder)
    after = memory("VmHWM")
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 600
    assert not (tmp_path / "executed").exists()
    if before is not None and after is not None:
        assert after - before < MOST_MEMORY


def test_the_sound_adapter_loads(base: Encoder, sound: Path) -> None:
    Encoder.load_adapter(base, sound)
