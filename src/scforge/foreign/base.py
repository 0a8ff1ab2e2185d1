"""What a family of published checkpoints is, and the registry of families."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from scforge._registry import Registry, check_options
from scforge.data.vocab import GeneVocab
from scforge.errors import MissingFileError, OptionError, listing
from scforge.foreign.name_map import NameMap

__all__ = ["FAMILIES", "Family", "Foreign", "list_families", "read_checkpoint", "register_family"]


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
    """A family of published checkpoints: how one is recognised, and how it becomes a :class:`Foreign`.

    A class with these two methods, registered with :func:`register_family`, is all that a family needs; then
    ``Encoder.from_checkpoint`` and ``scforge convert-checkpoint`` know it. What `read` needs besides the checkpoint are
    keyword-only arguments, which both pass on. Packages register theirs through the entry-point group
    ``scforge.checkpoints``.

    Examples
    --------
    >>> class Mine:
    ...     def recognises(self, source):
    ...         return (source / "mine.json").exists()
    ...
    ...     def read(self, source, *, medians=None):
    ...         raise NotImplementedError("return a Foreign: names, sizes and weights")
    >>> Mine().recognises(Path("no such folder"))
    False
    """

    def recognises(self, source: Path) -> bool:
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


FAMILIES: Registry[type[Family]] = Registry(
    "family",
    group="scforge.checkpoints",
    builtin={
        "geneformer": "scforge.foreign.geneformer",
        "scdiva": "scforge.foreign.scdiva",
        "scfoundation": "scforge.foreign.scfoundation",
        "scgpt": "scforge.foreign.scgpt",
    },
)


def register_family(name: str) -> Callable[[Any], Any]:
    """Register a family of checkpoints under `name` (class decorator).

    Parameters
    ----------
    name
        Registry key, e.g. ``"geneformer"``.

    Returns
    -------
    The decorator.

    Raises
    ------
    OptionError
        If `name` belongs to another class.

    Examples
    --------
    >>> @register_family("mine")
    ... class Mine:
    ...     def recognises(self, source):
    ...         return (source / "mine.json").exists()
    ...
    ...     def read(self, source, *, medians=None):
    ...         raise NotImplementedError("return a Foreign: names, sizes and weights")
    >>> "mine" in list_families()
    True
    """
    return FAMILIES.register(name)


def list_families() -> list[str]:
    """Return the names of all families of checkpoints, sorted.

    Returns
    -------
    Names that :func:`read_checkpoint` takes as `family`.

    Examples
    --------
    >>> list_families()
    ['geneformer', 'scdiva', 'scfoundation', 'scgpt']
    """
    return FAMILIES.names()


def read_checkpoint(source: str | os.PathLike[str], family: str | None = None, **options: Any) -> Foreign:
    """Read a published checkpoint.

    Parameters
    ----------
    source
        Its folder or file.
    family
        One of :func:`list_families`; None takes the one that recognises it.
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
        If no family recognises it, or several do, or an option is not one of the family.
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
        family = _recognised(path)
    cls = FAMILIES.get(family)
    parameters = inspect.signature(cls.read).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        check_options("option", family, options, known)
    return cls().read(path, **options)


def _recognised(path: Path) -> str:
    """Return the family of a checkpoint."""
    found = [name for name in FAMILIES.names() if FAMILIES.get(name)().recognises(path)]
    if len(found) == 1:
        return found[0]
    if found:
        raise OptionError(f"the checkpoint {str(path)!r} could be of {listing(found)}; say which with family=...")
    raise OptionError(
        f"the checkpoint {str(path)!r} is of no known family (known: {listing(FAMILIES.names())}); say which it is "
        "with family=..., or register one."
    )
