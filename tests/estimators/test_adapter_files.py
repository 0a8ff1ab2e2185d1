"""Folders of adapters that an accident or somebody has spoiled: each a sentence, nothing run, memory bounded."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scforge._io import sha256_of
from scforge.errors import MissingFileError, ModelFileError
from scforge.estimators import Encoder
from scforge.estimators.serialize import ADAPTER, read_description, sealed

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
    CASES |= {
        f"{file} without its last bytes": cut(file, lambda size: size - 3),
        f"an empty {file}": cut(file, lambda size: 0),
        f"a gigabyte of {file}": cut(file, lambda size: 2**30),
        f"no {file}": lambda folder, file=file: (folder / file).unlink(),
        f"a folder in place of {file}": lambda folder, file=file: ((folder / file).unlink(), (folder / file).mkdir()),
        f"{file} out of the folder": link(file, "../outside"),
        f"{file} absolutely out of the folder": link(file, "{folder}/../outside"),
        f"{file} that is a device": link(file, "/dev/zero"),
        f"{file} that is a link to nothing": link(file, "nothing"),
        f"{file} that is a link to itself": link(file, file),
        f"a file of torch.save for {file}": pickled(file, torch.save),
        f"a pickle for {file}": pickled(file, lambda content, path: path.write_bytes(pickle.dumps(content))),
    }
    CASES |= {f"a bit of {file} at {share}": flip(file, share) for share in (0.0, 0.01, 0.4, 0.7, 1.0)}


# ---- what is no accident: the checksums are right


def said(part: str | None = None, **changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        content = read_description(ADAPTER, folder / CONFIG)
        content["sha256"] = sha256_of(folder / WEIGHTS)
        (content if part is None else content[part]).update(changes)
        content = {key: value for key, value in content.items() if key not in ("format", "scforge_version")}
        (folder / CONFIG).write_text(sealed(ADAPTER, content))

    return spoil


def not_finite(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    (folder / WEIGHTS).write_bytes(data[:start] + b"\xff" * (len(data) - start))
    said()(folder)


CASES |= {
    "no folder at all": shutil.rmtree,
    "a file in place of the folder": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "the weights of a model": lambda folder: shutil.copy(FIRST / "plain" / "model.safetensors", folder / WEIGHTS),
    "the description of a model": lambda folder: shutil.copy(FIRST / "plain" / "config.json", folder / CONFIG),
    "JSON nested too deeply": lambda folder: (folder / CONFIG).write_text("[" * 500_000),
    "a seed that is true": said(seed=True),
    "epochs in words": said(n_epochs="many"),
    "a history of texts": said(history={"loss": ["low"]}),
    "a card that is a list": said(card=["cc0"]),
    "a checksum that is a list": said(sha256=[1]),
    "a task of no name": said("tuning", task={}),
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
    "weights that are NaN": not_finite,
}


@pytest.fixture(scope="module")
def base() -> Encoder:
    return Encoder.load(FIRST / "base")


@pytest.fixture(scope="module")
def sound(base: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter in the present format, which loads."""
    folder = tmp_path_factory.mktemp("sound") / "adapter"
    Encoder.load_adapter(base, FIRST / "adapter").save_adapter(folder)
    Encoder.load_adapter(base, folder)
    return folder


def memory(what: str) -> int:
    """Return the bytes that this process has (VmRSS), or had at most since it was asked (VmHWM); 0 where none says."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if what == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(what))


@pytest.mark.parametrize("name", CASES)
def test_a_spoiled_adapter(name: str, base: Encoder, sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "adapter"))
    CASES[name](folder)
    before = memory("VmRSS")
    with pytest.raises((ModelFileError, MissingFileError)) as caught:
        Encoder.load_adapter(base, folder)
    assert memory("VmHWM") - before < MOST_MEMORY
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 600
    assert not (tmp_path / "executed").exists()
