"""Reading checkpoints of other packages: safe file loading, weight names, and formats."""

from __future__ import annotations

import codecs
import collections
import inspect
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy._core.multiarray import scalar

from scforge import _io
from scforge._registry import Registry, check_options
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError, first_line, listing
from scforge.models import _weights

_GROUPS = {"{i}": r"(?P<i>\d+)", "{p}": r"(?P<p>weight|bias)", "*": r".*"}

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


@dataclass(frozen=True)
class Transform:
    """Two functions: one from checkpoint weights, in the order of the rule, to one scforge weight, and its inverse."""

    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]


AS_IS = Transform(lambda parts: parts[0], lambda ours: [ours])
TRANSPOSED = Transform(lambda parts: parts[0].T, lambda ours: [ours.T])


def stacked(n: int) -> Transform:
    """Stack weights of the same shape, such as query, key and value weights.

    Parameters
    ----------
    n
        Number of weights.

    Returns
    -------
    The transform for a :class:`Rule`.

    Examples
    --------
    >>> stacked(3).join([torch.zeros(2, 4), torch.ones(2, 4), torch.ones(2, 4)]).shape
    torch.Size([6, 4])
    """
    return Transform(lambda parts: torch.stack(list(parts)).flatten(0, 1), lambda ours: ours.chunk(n))


def folded_row(n_rows: int) -> Transform:
    """Add the first row of a second table, which has `n_rows`, to each row of the first table.

    All tokens of a cell have the BERT token type 0, so its vector is part of every position. In the inverse direction,
    the second table is zero.

    Examples
    --------
    >>> positions, token_types = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
    >>> folded_row(2).join([positions, token_types]).tolist()
    [[11.0], [12.0]]
    """
    return Transform(lambda parts: parts[0] + parts[1][:1], lambda ours: [ours, ours.new_zeros(n_rows, ours.shape[1])])


def rows_in_order(order: Sequence[int]) -> Transform:
    """Reorder table rows: row i in scforge is row ``order[i]`` in the checkpoint, or zeros if ``order[i]`` is -1.

    Examples
    --------
    >>> theirs = torch.tensor([[1.0], [2.0]])
    >>> rows_in_order((1, -1, 0)).join([theirs]).tolist()
    [[2.0], [0.0], [1.0]]
    """
    rows = torch.tensor(order)
    n_rows = int(rows.max()) + 1

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts[0]) != n_rows:
            raise ValueError(f"the vocabulary has {n_rows} tokens, but the embedding table has {len(parts[0])} rows")
        return parts[0][rows.clamp(min=0)].masked_fill((rows < 0)[:, None], 0.0)

    def split(ours: torch.Tensor) -> list[torch.Tensor]:
        theirs = ours.new_zeros(n_rows, ours.shape[1])
        theirs[rows[rows >= 0]] = ours[rows >= 0]
        return [theirs]

    return Transform(join, split)


@dataclass(frozen=True)
class Rule:
    """One line of a name map.

    Attributes
    ----------
    source
        Pattern of the weight in the checkpoint, or several patterns if the transform takes several weights. ``{i}`` is
        the index of a layer, ``{p}`` is ``weight`` or ``bias``.
    target
        Pattern of the scforge weight.
    transform
        Transform of the weights: ``AS_IS``, ``TRANSPOSED``, ``stacked(n)``, ``rows_in_order(order)`` or
        ``folded_row(n)`` from ``scforge.foreign.base``, or a ``Transform`` of two functions.

    Examples
    --------
    >>> Rule("layer.{i}.bias", "layers.{i}.bias").found_in(["layer.0.bias", "embeddings"])
    [{'i': '0'}]
    """

    source: str | tuple[str, ...]
    target: str
    transform: Transform = AS_IS

    @property
    def sources(self) -> tuple[str, ...]:
        """Patterns of the weights in the checkpoint."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def found_in(self, names: Iterable[str]) -> list[dict[str, str]]:
        """Return the values of the placeholders for each set of weights of the rule."""
        patterns = [_compiled(source) for source in self.sources]
        matches: list[dict[str, str]] = []
        for name in names:
            for pattern in patterns:
                match = pattern.fullmatch(name)
                if match is not None and match.groupdict() not in matches:
                    matches.append(match.groupdict())
        return matches


@dataclass(frozen=True)
class LeftOut:
    """A checkpoint weight that is not used in the scforge model, with the reason.

    Attributes
    ----------
    source
        Pattern of its name; ``*`` matches anything.
    why
        Reason as text.
    same_as
        Another checkpoint weight that must be equal to this weight, for weights that are stored twice.

    Examples
    --------
    >>> LeftOut("head.*", "a classifier of other labels").why
    'a classifier of other labels'
    """

    source: str
    why: str
    same_as: str | None = None


@dataclass(frozen=True)
class NameMap:
    """All rules of a family for one checkpoint.

    Attributes
    ----------
    family
        Name of the checkpoint in messages, e.g. ``"Geneformer"``.
    rules, left_out
        Rules for the converted weights, and weights that are left out.

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
        """Convert the weights of a checkpoint to scforge weights, float32.

        Parameters
        ----------
        tensors
            A mapping from name to checkpoint weight.
        expected
            A mapping from the name of each scforge weight to its shape.
        where
            The checkpoint, for messages.

        Raises
        ------
        ModelFileError
            If a checkpoint weight is neither used nor explicitly left out, or if an scforge weight would remain random
            or has a different shape.
        """
        used: set[str] = set()
        for line in self.left_out:
            dropped = [name for name in tensors if _compiled(line.source).fullmatch(name)]
            other = None if line.same_as is None else tensors.get(line.same_as)
            if other is not None and any(not torch.equal(tensors[name], other) for name in dropped):
                raise ModelFileError(
                    f"{where} has different values for {dropped[0]!r} and {line.same_as!r}; set both to the same value."
                )
            used.update(dropped)
        ours: dict[str, torch.Tensor] = {}
        for rule in self.rules:
            for placeholders in rule.found_in(tensors):
                names = [source.format(**placeholders) for source in rule.sources]
                target = rule.target.format(**placeholders)
                if target in ours:
                    continue  # a second spelling of a weight, which is unused, and told below
                try:
                    ours[target] = rule.transform.join([_floats(tensors[name]) for name in names])
                except (LookupError, RuntimeError, TypeError, ValueError) as error:
                    shapes = {name: tuple(tensors[name].shape) for name in names if name in tensors}
                    raise ModelFileError(
                        f"{where} has weights that cannot be converted to {target!r} (shapes: {shapes}): "
                        f"{first_line(error)}."
                    ) from error
                used.update(names)
        if missing := [self._checkpoint_name(name) for name in expected if name not in ours]:
            raise ModelFileError(
                f"{where} lacks the weights {listing(missing, most=3)}, which would be randomly initialized; use "
                "a complete checkpoint."
            )
        surplus = [self._checkpoint_name(name) for name in ours if name not in expected]
        if unknown := [*(name for name in tensors if name not in used), *surplus]:
            raise ModelFileError(
                f"{where} contains weights that a {self.family} model with this config does not have: "
                f"{listing(unknown, most=3)}."
            )
        for name, shape in expected.items():
            if ours[name].shape != shape:
                raise ModelFileError(
                    f"the weight {self._checkpoint_name(name)!r} in {where} has shape {tuple(ours[name].shape)}, but "
                    f"its config and vocabulary require {tuple(shape)}."
                )
        return {name: ours[name] for name in expected}

    def invert(self, ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return scforge weights under their checkpoint names.

        Raises
        ------
        ModelFileError
            If a weight has no name in the checkpoint format.
        """
        theirs: dict[str, torch.Tensor] = {}
        for name, tensor in ours.items():
            rule, placeholders = self._find_rule(name)
            if rule is None:
                raise ModelFileError(f"a {self.family} checkpoint has no weight for {name!r}.")
            parts = rule.transform.split(tensor)
            theirs |= {source.format(**placeholders): part for source, part in zip(rule.sources, parts, strict=True)}
        return theirs

    def _find_rule(self, target: str) -> tuple[Rule | None, dict[str, str]]:
        """Return the rule for an scforge weight, and the values of its placeholders."""
        for rule in self.rules:
            if (match := _compiled(rule.target).fullmatch(target)) is not None:
                return rule, match.groupdict()
        return None, {}

    def _checkpoint_name(self, target: str) -> str:
        """Return the checkpoint name of an scforge weight."""
        rule, placeholders = self._find_rule(target)
        return target if rule is None else rule.sources[0].format(**placeholders)


def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for placeholder, group in _GROUPS.items():
        escaped = escaped.replace(re.escape(placeholder), group)
    return re.compile(escaped)


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight as float32; integers indicate a quantized checkpoint and raise an error."""
    if not tensor.is_floating_point():
        raise TypeError(f"weights of dtype {tensor.dtype} are not supported")
    return tensor.float()


def first_file(source: Path, names: Sequence[str], what: str) -> Path:
    """Return the first of several files that exists in a folder."""
    for name in names:
        if (source / name).is_file():
            return source / name
    raise MissingFileError(f"the folder {str(source)!r} contains no {what}; add one of {listing(names)}.")


def read_options(path: Path) -> dict[str, Any]:
    """Return the options in a JSON file."""
    content = _io.read_json(path)
    if not isinstance(content, dict):
        raise ModelFileError(f"{str(path)!r} must map names to options; pass the published file.")
    return content


def in_order(tokens: Mapping[str, int]) -> tuple[str, ...]:
    """Return the token names of a vocabulary in the order of their ids."""
    names = sorted((name for name, number in tokens.items() if isinstance(number, Integral)), key=tokens.__getitem__)
    if not names or [tokens[name] for name in names] != list(range(len(tokens))):
        raise DataError("the indices of vocab must be consecutive integers from 0; pass the published file.")
    return tuple(names)


def read_dictionary(path: Path) -> dict[str, Any]:
    """Read a dictionary that maps strings to strings or numbers from a JSON or pickle file.

    A pickle file may contain only containers, strings, numbers and NumPy scalars. Any other object is rejected before
    it is created, so no code in the file is executed.

    Raises
    ------
    MissingFileError
        If there is no such file.
    ModelFileError
        If the file contains anything else.
    """
    if path.suffix == ".json":
        return read_options(path)
    try:
        with path.open("rb") as file:
            content = dict(_PlainUnpickler(file).load())
    except FileNotFoundError as error:
        raise MissingFileError(f"the file {str(path)!r} does not exist.") from error
    except Exception as error:  # corrupted files raise anything
        raise ModelFileError(f"{str(path)!r} is not a pickled dict of values: {first_line(error)}.") from error
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in content.items()}
    kinds = (str, int, float, type(None))
    if not all(isinstance(name, str) and isinstance(value, kinds) for name, value in plain.items()):
        raise ModelFileError(f"{str(path)!r} must contain a dict from names to values; pass the published file.")
    return plain


class _PlainUnpickler(pickle.Unpickler):
    """Create containers, text, numbers and NumPy scalars; the names of other objects are not even imported."""

    _KNOWN: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("_codecs", "encode"): codecs.encode,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "scalar"): scalar,
        ("numpy._core.multiarray", "scalar"): scalar,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few objects needed for numbers. Raises an error for other objects."""
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"opening the file would run {module}.{name}; save the content as JSON")
        return self._KNOWN[module, name]


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return a mapping from name to weight on the CPU, from a safetensors or torch file, or all files of an index.

    Raises
    ------
    MissingFileError, ModelFileError
        If a file is missing, cannot be read, or would run code.
    """
    if path.name.endswith(".safetensors.index.json"):
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(set(read_options(path).get("weight_map", {}).values())):
            weights |= read_weights(path.parent / file)
        return weights
    if path.suffix != ".safetensors":
        return state_dict_in(read_torch(path), str(path))
    if not path.is_file():
        raise MissingFileError(f"the checkpoint {str(path)!r} does not exist.")
    return _weights.read_weights(path)


def read_torch(path: Path) -> Any:
    """Return the content of a torch file; only tensors and plain containers are unpickled.

    Raises
    ------
    MissingFileError, ModelFileError
        If the file is missing, cannot be read, or would run code.
    """
    if not path.is_file():
        raise MissingFileError(f"the checkpoint {str(path)!r} does not exist.")
    try:
        # torch does not compare the checksums of what it reads.
        damaged = zipfile.ZipFile(path).testzip() if zipfile.is_zipfile(path) else None
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelFileError(
            f"{str(path)!r} contains objects other than tensors, which could run code when loaded; save only the "
            "weights."
        ) from error
    except Exception as error:  # corrupted files raise anything
        raise ModelFileError(f"{str(path)!r} is corrupted or is not a torch file: {first_line(error)}.") from error
    if damaged is not None:
        raise ModelFileError(f"{str(path)!r} is corrupted: the checksum of {damaged[:80]!r} is wrong; copy it again.")
    return content


def state_dict_in(content: Any, where: str) -> dict[str, torch.Tensor]:
    """Return the weights in the content of a torch file: the content itself, or an entry under a common name."""
    for name in ("state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not content:
        raise ModelFileError(f"{where!r} must map names to weights; pass a file that contains a state_dict.")
    if odd := [name for name, value in content.items() if not isinstance(value, torch.Tensor)]:
        raise ModelFileError(
            f"{where!r} contains entries that are not tensors ({listing(odd, most=3)}); pass a file that contains a "
            "state_dict."
        )
    # What torch's wrapper for several devices puts before all names.
    wrapped = all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if wrapped else name: value for name, value in content.items()}


@dataclass(frozen=True)
class Foreign:
    """A published checkpoint in scforge's format: all parts of a model.

    Attributes
    ----------
    family, version
        Name in the registry, and the version of the family if there are several.
    architecture, tokenizer, objective
        Name (``"name"``) and options of each. The architecture options create the modules whose weights are filled by
        `names`.
    vocab
        The genes, in the order of the scforge token ids.
    names
        Name map of the weights.
    tensors
        A mapping from name to checkpoint weight.
    source
        Checkpoint file or folder.

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
        """Return the weights for a module with these weight shapes; see :meth:`NameMap.convert`."""
        return self.names.convert(self.tensors, expected, where=repr(self.source))


class Family(Protocol):
    """A family of published checkpoints: it recognizes a checkpoint and converts it to a :class:`Foreign`.

    A family is a class with these two methods, registered with :func:`register_family`. ``Encoder.from_checkpoint`` and
    ``scforge convert-checkpoint`` then support it. Additional arguments of `read` are keyword-only arguments, which
    both callers pass on. Other packages register families through the entry-point group ``scforge.checkpoints``.

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
        """Return whether a file or folder looks like a checkpoint of this family, by a quick check."""
        ...

    def read(self, source: Path, **options: Any) -> Foreign:
        """Read a checkpoint.

        Raises
        ------
        MissingFileError, ModelFileError, OptionError, DataError
            If a part of the checkpoint is missing or cannot be used.
        """
        ...


register_family, list_families = FAMILIES.register, FAMILIES.names


def read_checkpoint(source: str | os.PathLike[str], family: str | None = None, **options: Any) -> Foreign:
    """Read a published checkpoint.

    Parameters
    ----------
    source
        Checkpoint folder or file.
    family
        Name of a family, see :func:`list_families`. If None, uses the family that recognizes the checkpoint.
    **options
        Additional arguments for the family, e.g. ``tokens_medians`` for Geneformer.

    Returns
    -------
    Content of the checkpoint; ``Encoder.from_checkpoint`` creates a model from it.

    Raises
    ------
    MissingFileError
        If the file or folder does not exist.
    OptionError
        If no family or several families recognize the checkpoint, or an option is unknown to the family.
    ModelFileError
        If the checkpoint cannot be used.

    Examples
    --------
    >>> checkpoint = read_checkpoint("Geneformer-V2-104M")  # doctest: +SKIP
    >>> checkpoint.family, checkpoint.vocab.n_genes  # doctest: +SKIP
    >>> _ = Path("empty.bin").write_bytes(b"")
    >>> read_checkpoint("empty.bin")
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: the checkpoint 'empty.bin' has an unknown family; pass ...
    """
    path = Path(source)
    if not path.exists():
        raise MissingFileError(f"the checkpoint {str(source)!r} does not exist; pass its folder or file.")
    if family is None:
        families = [name for name in FAMILIES.names() if FAMILIES.get(name)().recognizes(path)]
        if len(families) != 1:
            what = f"matches several families ({listing(families)})" if families else "has an unknown family"
            raise OptionError(
                f"the checkpoint {str(path)!r} {what}; pass one of {listing(FAMILIES.names())} as family."
            )
        (family,) = families
    cls = FAMILIES.get(family)
    parameters = inspect.signature(cls.read).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        accepted = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        check_options("option", family, options, accepted)
    return cls().read(path, **options)
