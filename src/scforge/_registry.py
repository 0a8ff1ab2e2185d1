"""The registry for tokenizers, architectures, objectives, tasks, benchmarks and checkpoint families."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from scforge.errors import OptionError, ScforgeError, listing, suggest


class Registry[T]:
    """A mapping from name to object, with built-in, registered and plugin entries.

    Parameters
    ----------
    kind
        What to call an entry in error messages, e.g. ``"architecture"``.
    group
        Entry-point group that other packages use to add entries, e.g. ``"scforge.models"``.
    builtin
        A mapping from name to module path for entries that ship with scforge. The module is imported when the entry is
        first requested, and registers itself.
    base
        Public path of the class that entries derive from, e.g. ``"torch.nn.Module"``. If None, accepts any object.
    members
        Methods and attributes that entries must define, in addition to the abstract methods of `base`.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str,
        builtin: dict[str, str] | None = None,
        base: str | None = None,
        members: Sequence[str] = (),
    ) -> None:
        self.kind = kind
        self.group = group
        self._builtin = dict(builtin or {})
        self._base = base
        self._members = tuple(members)
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Register a class as `name` (class decorator).

        A class with the same module and name replaces the earlier class, so a notebook cell can be run again.

        Parameters
        ----------
        name
            Name of the class in Python, in configurations and on the command line.

        Returns
        -------
        A decorator that registers a class and returns it.

        Raises
        ------
        OptionError
            If `name` belongs to another class.

        Examples
        --------
        >>> from scforge.data import GeneVocab
        >>> from scforge.tokenizers import RankValueTokenizer, get_tokenizer, register_tokenizer
        >>> @register_tokenizer("top_512")
        ... class Top512(RankValueTokenizer):
        ...     default_max_len = 512
        >>> get_tokenizer("top_512", GeneVocab.from_genes(["A", "B"]), use_medians=False).max_len
        512
        """

        def decorator(obj: T) -> T:
            taken = self._entries.get(name)
            owner = self._builtin.get(name)
            foreign = taken is not None and _identity(taken) != _identity(obj)
            if foreign or (owner is not None and _identity(obj)[0] != owner):
                raise OptionError(f"{self.kind} {name!r} is already registered; choose another name.")
            self._entries[name] = obj
            return obj

        return decorator

    def get(self, name: str) -> T:
        """Return the object registered as `name`.

        Raises
        ------
        OptionError
            If `name` is unknown (the message lists the known names), or its class lacks a required method or attribute.
        ScforgeError
            If a plugin provides `name` but cannot be imported; the cause is attached.
        """
        if name not in self._entries and name in self._builtin:
            importlib.import_module(self._builtin[name])
        if name not in self._entries:
            offered = self._plugins().get(name)
            if offered is None:
                names = self.names()
                raise OptionError(f"is not known{suggest(name, names)}", argument=self.kind, value=name)
            # A point that was created by hand is of no distribution.
            packages = sorted({point.module if point.dist is None else point.dist.name for point in offered})
            if len({point.value for point in offered}) > 1:
                several = f"is provided by the packages {listing(packages)}; keep only one"
                raise OptionError(f"{self.kind} {name!r} {several}.")
            try:
                loaded = offered[0].load()
            except Exception as error:
                source = f"{offered[0].value!r} of the package {packages[0]!r}"
                raise ScforgeError(
                    f"{self.kind} {name!r} comes from {source}, which cannot be imported: {error}"
                ) from error
            # A plugin may register itself on import, or just point at the object.
            self._entries.setdefault(name, loaded)
        if name not in self._builtin:
            self._check(name, self._entries[name])
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all names, including built-in, registered and plugin entries.

        Returns
        -------
        The sorted names. No entry is imported.

        Examples
        --------
        >>> from scforge.tokenizers import list_tokenizers
        >>> list_tokenizers()
        ['binned_expression', 'continuous_projection', 'entropy_ranked', 'gene_embedding', 'rank_value']
        """
        return sorted({*self._builtin, *self._entries, *self._plugins()})

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def name_of(self, obj: T) -> str | None:
        """Return the name under which `obj` is registered, or None."""
        return next((name for name, entry in self._entries.items() if entry is obj), None)

    def _check(self, name: str, entry: T) -> None:
        """Raise an OptionError if a user's class lacks the required interface; other callables are not checked."""
        if self._base is None or (callable(entry) and not isinstance(entry, type)):
            return
        what = f"{self.kind}={name!r} is {getattr(entry, '__qualname__', entry)!s}"
        # Compared by name, so that the module of the base need not be imported.
        package, _, last = self._base.rpartition(".")
        bases = [cls for cls in getattr(entry, "__mro__", ()) if cls.__qualname__ == last]
        if not any(f"{cls.__module__}.".startswith(f"{package}.") for cls in bases):
            raise OptionError(f"{what}, which is not a subclass of {self._base}; derive it from {self._base}.")
        check_defines(what, entry, self._members)

    def _plugins(self) -> dict[str, list[EntryPoint]]:
        """Return the entry points of each name, usually one."""
        points: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.group):
            points.setdefault(point.name, []).append(point)
        return points


def check_options(
    kind: str, owner: str, options: Iterable[str], known: Sequence[str], hints: Mapping[str, str] | None = None
) -> None:
    """Raise an error if any of `options` is not a known option of `owner`.

    Parameters
    ----------
    kind
        What to call an option in error messages, e.g. ``"tokenizer option"``.
    owner
        Name of the entry that the options belong to.
    options
        Names to check.
    known
        Known names.
    hints
        Mapping from option names used by other packages to advice for the error message.

    Raises
    ------
    OptionError
        If an option is unknown; the message names the option, the most similar known option and all known options.
    """
    for option in options:
        if option not in known:
            advice = f"; {hints[option]}." if hints and option in hints else suggest(option, known, most=20)
            raise OptionError(f"is unknown to {owner!r}{advice}", argument=option, subject=f"{kind} {option!r}")


def check_kinds(owner: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise an OptionError if an option of `owner` that is boolean or text is not, because "false" is truthy."""
    for name, parameter in inspect.signature(owner).parameters.items():
        if name not in options:
            continue
        value, kind = options[name], parameter.annotation
        if isinstance(parameter.default, bool) and not isinstance(value, bool):
            raise OptionError("must be True or False.", argument=name, value=value)
        # What None means, the owner knows.
        if kind in ("str", "str | None", str, str | None) and not isinstance(value, str | None):
            raise OptionError("must be text.", argument=name, value=value)


def check_defines(what: str, entry: object, members: Sequence[str]) -> None:
    """Raise an OptionError if a class or an object lacks members; `what` is the prefix of the message."""
    lacking = set(getattr(entry, "__abstractmethods__", ()))
    for name in members:
        member = getattr(entry, name, None)
        # torch gives every module a forward of this name, which raises.
        if member is None or getattr(member, "__name__", "") == "_forward_unimplemented":
            lacking.add(name)
    if lacking:
        raise OptionError(
            f"{what}, which lacks {listing(sorted(lacking))}; add {'it' if len(lacking) == 1 else 'them'}."
        )


def _identity(obj: object) -> tuple[str | None, str | None]:
    return getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
