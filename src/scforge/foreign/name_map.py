"""Name maps: which weights of a published checkpoint are which of ours, said line by line, in both directions.

A pattern is the name of a weight with ``{i}`` for the number of a layer and ``{p}`` for ``weight`` or ``bias``; at the
end of one, ``*`` stands for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from scforge.errors import ModelFileError, first_line, listing

__all__ = ["AsIs", "FoldedRow", "LeftOut", "NameMap", "RowsInOrder", "Rule", "Stacked", "Transform", "Transposed"]


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
