"""Read checkpoints of other packages: safe files, names of weights, and formats."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from scforge import _io
from scforge._registry import Registry, check_options
from scforge.data.vocab import GeneVocab
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line, listing


class Transform:
    """How weights of theirs become one of ours, and one of ours theirs again.

    Examples
    --------
    >>> class Negated(Transform):
    ...     def join(self, parts):
    ...         return -parts[0]
    >>> Negated().join([torch.tensor([1.0, -2.0])])
    tensor([-1.,  2.])
    """

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weight that these, in the order of the rule, become.

        Raises
        ------
        ValueError
            If they have shapes that do not fit each other.
        """
        raise NotImplementedError

    def split(self, ours: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights that a weight of ours becomes, in the order of the rule."""
        raise NotImplementedError


class AsIs(Transform):
    """The same numbers under another name."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the one weight."""
        return parts[0]

    def split(self, ours: torch.Tensor) -> list[torch.Tensor]:
        """Return the one weight."""
        return [ours]


class Transposed(AsIs):
    """The same matrix with rows for columns.

    Examples
    --------
    >>> Transposed().join([torch.zeros(3, 2)]).shape
    torch.Size([2, 3])
    """

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the transposed matrix."""
        _check_axes(parts[0], 2)
        return parts[0].T

    def split(self, ours: torch.Tensor) -> list[torch.Tensor]:
        """Return the transposed matrix."""
        return [ours.T]


@dataclass(frozen=True)
class Stacked(Transform):
    """Several weights on top of each other, such as those of queries, keys and values.

    Parameters
    ----------
    n
        Number of the weights.

    Examples
    --------
    >>> Stacked().join([torch.zeros(2, 4), torch.ones(2, 4), torch.ones(2, 4)]).shape
    torch.Size([6, 4])
    """

    n: int = 3

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weights in one."""
        if len({part.shape for part in parts}) > 1:
            raise ValueError("they differ")
        return torch.cat(list(parts))

    def split(self, ours: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights that stand in one."""
        return list(ours.chunk(self.n))


@dataclass(frozen=True)
class FoldedRow(Transform):
    """A table, to each row of which the first row of another table is added.

    All tokens of a cell have the token type 0 of BERT, so that its vector is part of every position. On the way back it
    is zero.

    Parameters
    ----------
    n_rows
        Rows of the other table.

    Examples
    --------
    >>> positions, token_types = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
    >>> FoldedRow().join([positions, token_types]).tolist()
    [[11.0], [12.0]]
    """

    n_rows: int = 2

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum."""
        _check_axes(parts[0], 2)
        if parts[1].shape != (self.n_rows, parts[0].shape[1]):
            raise ValueError(f"the last should be {(self.n_rows, parts[0].shape[1])}")
        return parts[0] + parts[1][:1]

    def split(self, ours: torch.Tensor) -> list[torch.Tensor]:
        """Return the table, and one of zeros."""
        return [ours, ours.new_zeros(self.n_rows, ours.shape[1])]


@dataclass(frozen=True)
class RowsInOrder(Transform):
    """The rows of a table in another order: row i of ours is row ``order[i]`` of theirs, or zeros where it is -1.

    Examples
    --------
    >>> theirs = torch.tensor([[1.0], [2.0]])
    >>> RowsInOrder((1, -1, 0)).join([theirs]).tolist()
    [[2.0], [0.0], [1.0]]
    """

    order: tuple[int, ...]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows in our order."""
        _check_axes(parts[0], 2)
        order = torch.tensor(self.order)
        if (n_rows := int(order.max()) + 1) != len(parts[0]):
            raise ModelFileError(
                f"the vocabulary has {n_rows} tokens of the checkpoint but its table {len(parts[0])} rows; give the "
                "vocabulary that belongs to the checkpoint."
            )
        return parts[0][order.clamp(min=0)].masked_fill((order < 0)[:, None], 0.0)

    def split(self, ours: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows in their order."""
        order = torch.tensor(self.order)
        theirs = ours.new_zeros(int(order.max()) + 1, ours.shape[1])
        theirs[order[order >= 0]] = ours[order >= 0]
        return [theirs]


@dataclass(frozen=True)
class Rule:
    """One line of a map.

    Attributes
    ----------
    source
        Pattern of the weight in the checkpoint; several where the transform takes several.
    target
        Pattern of our weight.
    transform
        How they become one.

    Examples
    --------
    >>> Rule("layer.{i}.bias", "layers.{i}.bias").found_in(["layer.0.bias", "embeddings"])
    [{'i': '0'}]
    """

    source: str | tuple[str, ...]
    target: str
    transform: Transform = AsIs()

    @property
    def sources(self) -> tuple[str, ...]:
        """The patterns of the weights in the checkpoint."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def found_in(self, names: Iterable[str]) -> list[dict[str, str]]:
        """Return what the placeholders stand for in each set of weights that the rule is about."""
        patterns = [_compiled(source) for source in self.sources]
        found: list[dict[str, str]] = []
        for name in names:
            for pattern in patterns:
                match = pattern.fullmatch(name)
                if match is not None and match.groupdict() not in found:
                    found.append(match.groupdict())
        return found


@dataclass(frozen=True)
class LeftOut:
    """A weight of the checkpoint that we have no use for, and why.

    Attributes
    ----------
    source
        Pattern of its name.
    why
        The reason, in words.
    same_as
        Another weight of the checkpoint that it must be equal to, for weights that are stored twice.

    Examples
    --------
    >>> LeftOut("cls.predictions.decoder.bias", "the same as the bias", same_as="cls.predictions.bias").why
    'the same as the bias'
    """

    source: str
    why: str
    same_as: str | None = None


@dataclass(frozen=True)
class NameMap:
    """All lines of a family for one checkpoint.

    Attributes
    ----------
    family
        What messages call the checkpoint, e.g. ``"Geneformer"``.
    rules, left_out
        The lines.

    Examples
    --------
    >>> names = NameMap("Tiny", (Rule("layer.{i}.{p}", "layers.{i}.{p}"),), (LeftOut("step", "no weight"),))
    >>> theirs = {"layer.0.bias": torch.ones(2), "step": torch.zeros(1)}
    >>> names.convert(theirs, {"layers.0.bias": torch.Size([2])}, where="tiny.pt")
    {'layers.0.bias': tensor([1., 1.])}
    >>> list(names.invert({"layers.0.bias": torch.ones(2)}))
    ['layer.0.bias']
    """

    family: str
    rules: tuple[Rule, ...]
    left_out: tuple[LeftOut, ...] = ()

    def convert(
        self, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], *, where: str
    ) -> dict[str, torch.Tensor]:
        """Return our weights, float32, made of those of a checkpoint.

        Parameters
        ----------
        tensors
            Weights of the checkpoint by name.
        expected
            Names and shapes of all weights of ours.
        where
            The checkpoint, for messages.

        Raises
        ------
        ModelFileError
            If a weight of theirs is neither used nor known to be left out, or one of ours would be left random, or has
            another shape.
        """
        used: set[str] = set()
        ours: dict[str, torch.Tensor] = {}
        for rule in self.rules:
            for found in rule.found_in(tensors):
                names = [_filled(source, found) for source in rule.sources]
                if missing := [other for other in names if other not in tensors]:
                    there = next(other for other in names if other in tensors)
                    raise ModelFileError(
                        f"{where} lacks {listing(missing, most=3)}, which goes with {there!r} in a checkpoint of "
                        f"{self.family}; copy the checkpoint again."
                    )
                target = _filled(rule.target, found)
                if target in ours:
                    raise ModelFileError(
                        f"{where} has two weights for {target!r}, {names[0]!r} among them; keep one of the two namings."
                    )
                parts = [_number(tensors[other], other, where) for other in names]
                try:
                    ours[target] = rule.transform.join(parts)
                except ModelFileError:
                    raise
                except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
                    raise ModelFileError(
                        f"{where} has {listing(names)} in the shapes {shapes}, which do not become {target!r}: "
                        f"{first_line(error)}; copy the checkpoint again."
                    ) from error
                used.update(names)
        used |= self._left_out(tensors, where)
        if unknown := [name for name in tensors if name not in used]:
            raise ModelFileError(
                f"{where} has weights that the map of {self.family} does not know: {listing(unknown, most=3)}; convert "
                "a checkpoint without them, or register a family that knows them."
            )
        if missing := [name for name in expected if name not in ours]:
            raise ModelFileError(
                f"{where} lacks {listing([self._name_of(name) for name in missing], most=3)}, so that "
                f"{listing(missing, most=3)} would be random; give a checkpoint with these weights."
            )
        if surplus := [name for name in ours if name not in expected]:
            raise ModelFileError(
                f"{where} has {listing([self._name_of(name) for name in surplus], most=3)}, which a model of its "
                "config does not have; give the config that belongs to the checkpoint."
            )
        for name, shape in expected.items():
            if ours[name].shape != shape:
                raise ModelFileError(
                    f"{where} has {self._name_of(name)!r} in the shape {tuple(ours[name].shape)}, but its config and "
                    f"vocabulary make it {tuple(shape)}; give the config and vocabulary that belong to the checkpoint."
                )
        return {name: ours[name] for name in expected}

    def invert(self, ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights under their names.

        Raises
        ------
        ModelFileError
            If one of ours has no name there.
        """
        theirs: dict[str, torch.Tensor] = {}
        for name, tensor in ours.items():
            for rule in self.rules:
                if (found := _compiled(rule.target).fullmatch(name)) is not None:
                    for source, part in zip(rule.sources, rule.transform.split(tensor), strict=True):
                        theirs[_filled(source, found.groupdict())] = part
                    break
            else:
                raise ModelFileError(f"the weight {name!r} has no name in a checkpoint of {self.family}.")
        return theirs

    def _left_out(self, tensors: Mapping[str, torch.Tensor], where: str) -> set[str]:
        """Return the weights that are left out."""
        names: set[str] = set()
        for line in self.left_out:
            found = [name for name in tensors if _compiled(line.source).fullmatch(name)]
            other = None if line.same_as is None else tensors.get(line.same_as)
            for name in found:
                if other is not None and not (tensors[name].dtype == other.dtype and torch.equal(tensors[name], other)):
                    raise ModelFileError(
                        f"{where} has {name!r} and {line.same_as!r} with different numbers, but its config says that "
                        "they are one weight; give the config that belongs to the checkpoint."
                    )
            names.update(found)
        return names

    def _name_of(self, target: str) -> str:
        """Return the name in the checkpoint of a weight of ours."""
        for rule in self.rules:
            if (found := _compiled(rule.target).fullmatch(target)) is not None:
                return _filled(rule.sources[0], found.groupdict())
        return target


def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for placeholder, group in _GROUPS.items():
        escaped = escaped.replace(re.escape(placeholder), group)
    return re.compile(escaped)


def _filled(pattern: str, found: Mapping[str, str]) -> str:
    return pattern.format(**found)


def _check_axes(tensor: torch.Tensor, n_axes: int) -> None:
    if tensor.ndim != n_axes:
        raise ValueError(f"the first should have {n_axes} axes")


def _number(tensor: torch.Tensor, name: str, where: str) -> torch.Tensor:
    """Return a weight as float32."""
    if not tensor.is_floating_point():
        raise ModelFileError(f"{where} has {name!r} as {tensor.dtype}, which is no weight; copy the checkpoint again.")
    if not torch.isfinite(tensor).all():
        raise ModelFileError(f"{where} has {name!r} with numbers that are not finite; copy the checkpoint again.")
    return tensor.float()


_GROUPS = {"{i}": r"(?P<i>\d+)", "{p}": r"(?P<p>weight|bias)", "*": r".*"}


_INDEX = ".safetensors.index.json"
_MAX_BYTES = 2**28
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
        if (size := path.stat().st_size) > _MAX_BYTES:
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


@dataclass(frozen=True)
class Foreign:
    """A published checkpoint in our words: everything that a model is made of.

    Attributes
    ----------
    family, version
        Name in the registry, and the version of the family where there are several.
    architecture, tokenizer, objective
        Name (``"name"``) and options of each; those of the architecture give the modules whose weights `names` fills.
    vocab
        The genes, in the order of our token ids.
    names
        Which weights become which.
    tensors
        The weights of the checkpoint by their names.
    source
        Where they were read from.

    Examples
    --------
    >>> from scforge.foreign import Rule
    >>> checkpoint = Foreign(
    ...     family="mine",
    ...     version=None,
    ...     architecture={"name": "transformer_encoder", "hidden_dim": 8},
    ...     tokenizer={"name": "rank_value"},
    ...     objective={"name": "masked_gene_prediction"},
    ...     vocab=GeneVocab.from_genes(["CD3D", "LYZ"]),
    ...     names=NameMap("Mine", (Rule("norm.gamma", "norm.weight"),)),
    ...     tensors={"norm.gamma": torch.ones(8)},
    ...     source="mine.pt",
    ... )
    >>> checkpoint.weights({"norm.weight": torch.Size([8])})["norm.weight"].shape
    torch.Size([8])
    """

    family: str
    version: str | None
    architecture: dict[str, Any]
    tokenizer: dict[str, Any]
    objective: dict[str, Any]
    vocab: GeneVocab
    names: NameMap
    tensors: dict[str, torch.Tensor]
    source: str

    def weights(self, expected: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Return the weights of a module whose weights have these shapes; see :meth:`NameMap.convert`."""
        return self.names.convert(self.tensors, expected, where=repr(self.source))


class Family(Protocol):
    """A family of published checkpoints: how one is recognized, and how it becomes a :class:`Foreign`.

    A class with these two methods, registered with :func:`register_family`, is all that a family needs; then
    ``Encoder.from_checkpoint`` and ``scforge convert-checkpoint`` know it. What `read` needs besides the checkpoint are
    keyword-only arguments, which both pass on. Packages register theirs through the entry-point group
    ``scforge.checkpoints``.

    Examples
    --------
    >>> class Mine:
    ...     def recognizes(self, source):
    ...         return (source / "mine.json").exists()
    ...
    ...     def read(self, source, *, medians=None):
    ...         raise NotImplementedError("return a Foreign: names, sizes and weights")
    >>> Mine().recognizes(Path("no such folder"))
    False
    """

    def recognizes(self, source: Path) -> bool:
        """Return whether a file or folder is a checkpoint of this family, at a glance."""
        ...

    def read(self, source: Path, **options: Any) -> Foreign:
        """Read a checkpoint.

        Raises
        ------
        MissingFileError, ModelFileError, OptionError, DataError
            If something of it is missing, or cannot be used.
        """
        ...


FAMILIES: Registry[Any] = Registry(
    "family",
    group="scforge.checkpoints",
    builtin={
        "geneformer": "scforge.foreign.geneformer",
        "scdiva": "scforge.foreign.scdiva",
        "scfoundation": "scforge.foreign.scfoundation",
        "scgpt": "scforge.foreign.scgpt",
    },
)

register_family, list_families = FAMILIES.register, FAMILIES.names


def read_checkpoint(source: str | os.PathLike[str], family: str | None = None, **options: Any) -> Foreign:
    """Read a published checkpoint.

    Parameters
    ----------
    source
        Its folder or file.
    family
        One of :func:`list_families`; None takes the one that recognizes it.
    **options
        What the family needs besides, e.g. ``tokens_medians`` for Geneformer.

    Returns
    -------
    What the checkpoint holds; ``Encoder.from_checkpoint`` makes a model of it.

    Raises
    ------
    MissingFileError
        If there is no such file or folder.
    OptionError
        If no family recognizes it, or several do, or an option is not one of the family.
    ModelFileError
        If it cannot be used.

    Examples
    --------
    >>> checkpoint = read_checkpoint("Geneformer-V2-104M")  # doctest: +SKIP
    >>> checkpoint.family, checkpoint.vocab.n_genes  # doctest: +SKIP
    >>> _ = Path("empty.bin").write_bytes(b"")
    >>> read_checkpoint("empty.bin")
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: the checkpoint 'empty.bin' is of no known family ...
    """
    if not isinstance(source, str | os.PathLike):
        raise OptionError(f"source={source!r} is not the path of a checkpoint; name a file or folder.")
    if family is not None and not isinstance(family, str):
        raise OptionError(
            f"family is a {type(family).__name__}; name one of {listing(FAMILIES.names())}, and pass cells as adata=..."
        )
    path = Path(source)
    if not path.exists():
        raise MissingFileError(f"the checkpoint {str(source)!r} does not exist; give its folder or file.")
    if family is None:
        family = _recognized(path)
    cls = FAMILIES.get(family)
    parameters = inspect.signature(cls.read).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        check_options("option", family, options, known)
    return cls().read(path, **options)


def _recognized(path: Path) -> str:
    """Return the family of a checkpoint."""
    found = [name for name in FAMILIES.names() if FAMILIES.get(name)().recognizes(path)]
    if len(found) == 1:
        return found[0]
    if found:
        raise OptionError(f"the checkpoint {str(path)!r} could be of {listing(found)}; say which with family=...")
    raise OptionError(
        f"the checkpoint {str(path)!r} is of no known family (known: {listing(FAMILIES.names())}); say which it is "
        "with family=..., or register one."
    )
