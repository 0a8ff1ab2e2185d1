"""Reading the files of published checkpoints, without running what they bring.

Weights are safetensors, or torch files of which only tensors are unpickled; dictionaries are JSON, or pickle files of
which only containers, text and numbers are unpickled.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from scforge import _io
from scforge.data.weights_reading import header_shapes
from scforge.errors import MissingFileError, ModelFileError, first_line, listing

__all__ = ["first_file", "read_dictionary", "read_json", "read_torch", "read_weights", "state_dict_in"]

_INDEX = ".safetensors.index.json"
_MOST_BYTES = 2**28
"""Largest pickle file of a dictionary; published ones have a few million bytes."""


def first_file(source: Path, names: Sequence[str], what: str) -> Path:
    """Return the first of some files that a folder has.

    Raises
    ------
    MissingFileError
        If it has none of them.
    """
    for name in names:
        if (source / name).is_file():
            return source / name
    raise MissingFileError(f"the folder {str(source)!r} has no {what}: none of {listing(names)}; copy it there.")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, with the limits of :func:`scforge._io.read_json`.

    Raises
    ------
    MissingFileError
        If there is no such file.
    ModelFileError
        If it is no JSON, or larger than such a file needs to be.
    """
    _check_file(path)
    try:
        return _io.read_json(path)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{str(path)!r} is no JSON file that can be used: {first_line(error)}.") from error


def read_dictionary(path: Path) -> dict[str, Any]:
    """Return a dictionary from text to text or numbers, of a JSON or a pickle file.

    A pickle file may hold dictionaries, lists, text, numbers and NumPy scalars; anything else in it is refused before
    it is made, so nothing that the file brings runs.

    Raises
    ------
    MissingFileError
        If there is no such file.
    ModelFileError
        If it holds something else.
    """
    if path.suffix == ".json":
        content = read_json(path)
    else:
        _check_file(path)
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ModelFileError(f"{str(path)!r} has {size:,} bytes, far more than a dictionary needs; give another.")
        with path.open("rb") as file:
            try:
                content = _PlainUnpickler(file).load()
            except ModelFileError as error:
                raise ModelFileError(f"{str(path)!r} {error}") from None
            # What the module's documentation says that damaged files raise.
            except (
                *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError),
                *(ValueError, TypeError, OverflowError, MemoryError, RecursionError),
            ) as error:
                what = f"is no pickle file of a dictionary: {first_line(error)}"
                raise ModelFileError(f"{str(path)!r} {what}.") from error
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise ModelFileError(f"{str(path)!r} holds no dictionary of names; give the published one.")
    return dict(content)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a safetensors or torch file by name, on the CPU; of all files that an index names.

    Raises
    ------
    ModelFileError
        If a file cannot be read, or would run code, or an index and its files do not agree.
    """
    if path.name.endswith(_INDEX):
        return _read_parts(path)
    if path.suffix == ".safetensors":
        try:
            header_shapes(path)
            return load_file(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise ModelFileError(f"{str(path)!r} is no safetensors file: {first_line(error)}.") from error
    return state_dict_in(read_torch(path), str(path))


def _read_parts(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the files that an index names, which lie beside it."""
    content = read_json(path)
    places = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(places, Mapping) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ModelFileError(f"{str(path)!r} has no weight_map from weights to files; copy the checkpoint again.")
    weights: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(places.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelFileError(f"{str(path)!r} names the file {file[:80]!r}, which is no safetensors file beside it.")
        _check_file(path.parent / file)
        part = read_weights(path.parent / file)
        if set(part) != {name for name, place in places.items() if place == file}:
            raise ModelFileError(
                f"{str(path.parent / file)!r} does not hold the weights that {path.name} says; copy it all again."
            )
        weights |= part
    return weights


def read_torch(path: Path) -> Any:
    """Return the content of a torch file, of which only tensors and plain containers are unpickled.

    Raises
    ------
    MissingFileError
        If there is no such file.
    ModelFileError
        If the file cannot be read, or would run code.
    """
    if not path.is_file():
        raise MissingFileError(f"the checkpoint {str(path)!r} does not exist.")
    try:
        with path.open("rb") as file:
            is_archive = file.read(4) == b"PK\x03\x04"
        if is_archive:
            _check_records(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise ModelFileError(
            f"{str(path)!r} holds more than tensors, which could run code, so it is not opened; save the state_dict of "
            "the model alone, where you trust the file, or get the safetensors file."
        ) from error
    except ModelFileError:
        raise
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise ModelFileError(f"{str(path)!r} is no torch file of weights: {first_line(error)}.") from error


def _check_records(path: Path) -> None:
    """Raise unless all records of a torch file are as torch writes them: stored, and with the checksum they have.

    torch maps the records into memory as they lie there: it neither unpacks nor checks them.
    """
    if not zipfile.is_zipfile(path):
        raise ModelFileError(f"{str(path)!r} is damaged: it ends before the list of its records; copy it again.")
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
            damaged = None if packed else archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {first_line(error)}; copy it again.") from error
    if packed:
        raise ModelFileError(
            f"{str(path)!r} has compressed records ({listing(packed, most=3)}), which torch never writes; get the "
            "original file, or save what torch.load(path, weights_only=True) returns again with torch.save."
        )
    if damaged is not None:
        raise ModelFileError(
            f"{str(path)!r} is damaged: the checksum of its record {damaged[:80]!r} is not that of its content; copy "
            "it again, or save it with its checksums (torch.serialization.set_crc32_options)."
        )


def state_dict_in(content: Any, where: str) -> dict[str, torch.Tensor]:
    """Return the weights in what a torch file held: the content itself, or what stands under a usual name in it.

    Raises
    ------
    ModelFileError
        If there are none, or one is no ordinary tensor with all its numbers.
    """
    for name in ("state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not content:
        raise ModelFileError(f"{where!r} holds no weights by name; give the file of a state_dict.")
    if odd := [name for name, value in content.items() if not isinstance(value, torch.Tensor)]:
        raise ModelFileError(f"{where!r} holds {listing(odd, most=3)}, not tensors; give the file of a state_dict.")
    if odd := [name for name in content if not isinstance(name, str)]:
        raise ModelFileError(f"{where!r} has a weight named {odd[0]!r}, which is no text; give a state_dict.")
    if odd := [name for name, value in content.items() if not _is_plain(value)]:
        raise ModelFileError(
            f"{where!r} has {listing(odd, most=3)} without all the numbers of an ordinary tensor (sparse, expanded or "
            "meta); save it with tensor.to_dense().contiguous()."
        )
    # What torch's wrapper for several devices puts before all names.
    wrapped = all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if wrapped else name: value for name, value in content.items()}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all its numbers: a file can claim a large shape over one number, or none at all."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise MissingFileError(f"the file {str(path)!r} does not exist.")


class _PlainUnpickler(pickle.Unpickler):
    """Makes containers, text, numbers and NumPy scalars; of anything else it does not even import the name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name that NumPy scalars need, or refuse."""
        if (found := _PLAIN.get((module, name))) is None:
            raise ModelFileError(
                f"wants to run {module}.{name}, which dictionaries of genes have no need of, so it is not opened; save "
                "the dictionary as JSON, where you trust the file."
            )
        return found


class _Dtype:
    """What a pickle file says of the type of a NumPy scalar."""

    def __init__(self, kind: Any, *_: Any) -> None:
        if not isinstance(kind, str) or len(kind) != 2 or kind[0] not in "biuf":
            raise ValueError(f"it holds values of the type {kind!r}")
        self.kind, self.order = kind, "<"

    def __setstate__(self, state: Any) -> None:
        """Take over the order of the bytes."""
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            self.order = ">"


def _scalar(dtype: Any, data: Any) -> int | float | bool:
    """Return the number that a pickle file holds as a NumPy scalar."""
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | str):
        raise ValueError("it holds a value that is no number")
    raw = data if isinstance(data, bytes) else _encoded(data)
    values = np.frombuffer(raw, dtype=np.dtype(dtype.order + dtype.kind))
    if len(values) != 1:
        raise ValueError("it holds a value that is no number")
    return values[0].item()


def _encoded(text: Any, coding: Any = "latin1") -> bytes:
    """Return the bytes that older pickle files hold as text."""
    if not isinstance(text, str) or coding != "latin1":
        raise ValueError("it holds bytes in an unknown form")
    return text.encode("latin1")


_PLAIN: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("collections", "OrderedDict"): dict,
}
