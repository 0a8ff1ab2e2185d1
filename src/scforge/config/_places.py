"""Where in a file, or in which override, an option was set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scforge.config.aliases import ALIASES

if TYPE_CHECKING:
    import yaml

__all__ = ["Places", "Source"]

_SPELLINGS = [
    *[(alias.split("."), canonical.split(".")) for alias, canonical in ALIASES.items()],
    (["finetune", "data"], ["data"]),
    (["training", "num_gpus"], ["training", "accelerator"]),
]
"""Ways to write an option, and the option."""


@dataclass(frozen=True)
class Source:
    """A file, or an override.

    Attributes
    ----------
    where
        What to call it in a message.
    root
        Its content as PyYAML composed it; None of an empty one.
    keys
        Keys that lead to `root`: none in a file, ``("training", "lr")`` in the override ``training.lr=1``.
    """

    where: str
    root: yaml.Node | None
    keys: tuple[str, ...] = ()

    def find(self, location: Sequence[int | str]) -> tuple[int, int | None]:
        """Return how many parts of a location are found here, and the line of the last of them.

        Lines are counted from 1; None where there is none, as in an override.
        """
        depth, line = self._walk(location)
        for alias, canonical in _SPELLINGS:
            if list(location[: len(canonical)]) == canonical:
                found, its_line = self._walk([*alias, *location[len(canonical) :]])
                if found >= len(alias) and found - len(alias) + len(canonical) > depth:
                    depth, line = found - len(alias) + len(canonical), its_line
        return depth, None if self.keys else line

    def name_of(self, location: Sequence[int | str]) -> str | None:
        """Return the dotted name by which a location is written here, or None if it is not."""
        names: list[Sequence[int | str]] = [location]
        names += [alias for alias, canonical in _SPELLINGS if list(location) == canonical]
        found = [name for name in names if self._walk(name)[0] == len(name)]
        return ".".join(str(part) for part in found[0]) if found else None

    def _walk(self, location: Sequence[int | str]) -> tuple[int, int | None]:
        if tuple(location[: len(self.keys)]) != self.keys:
            return 0, None
        depth, line, node = len(self.keys), None, self.root
        for part in location[len(self.keys) :]:
            step = _step(node, part)
            if step is None:
                break
            node, line = step
            depth += 1
        return depth, line


class Places:
    """The sources of a configuration, the strongest last.

    Parameters
    ----------
    sources
        The file, and the overrides in their order; none of a configuration that was made in Python.
    """

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self.sources = list(sources)

    def of(self, location: Sequence[int | str]) -> str:
        """Return the place of a location as the beginning of a message.

        Parameters
        ----------
        location
            Keys from the outermost section on. Where it stands nowhere, the place of its section is told.
        """
        best, text = -1, ""
        for source in self.sources:
            depth, line = source.find(location)
            if source.keys and depth < len(source.keys):
                continue  # about another option
            if depth >= best:
                best, text = depth, f"{source.where}: " if line is None else f"{source.where}, line {line}: "
        return text

    def name_of(self, location: Sequence[int | str]) -> str | None:
        """Return the name by which an option was set, which may be an alias; None if it was not."""
        names = [source.name_of(location) for source in reversed(self.sources)]
        return next((name for name in names if name is not None), None)

    def __eq__(self, other: object) -> bool:
        # Where options stood makes no difference between configurations.
        return isinstance(other, Places)

    __hash__ = None  # type: ignore[assignment]


def _step(node: yaml.Node | None, part: int | str) -> tuple[Any, int] | None:
    """Return what stands at a key or an index of a node, and its line."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        # Merged keys stand before those of the section itself, which are stronger.
        for key, value in reversed(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line + 1
    return None
