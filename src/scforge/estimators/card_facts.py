"""What only people know of a model, for its card: licence, data, figures, citation; and where it is to be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge.errors import ModelFileError, OptionError
from scforge.estimators.card_scores import Score, scores_of

if TYPE_CHECKING:
    import pandas as pd

    from scforge.eval.report import Report
    from scforge.foreign.base import Foreign


@dataclass(frozen=True)
class Origin:
    """Where the weights of a model can be had again.

    Attributes
    ----------
    name, revision
        Name that others can use, a repository of the hub or a name of the registry, and the commit; None if there is
        none.
    folder
        Folder on this machine.
    n_epochs
        Epochs that the model had been trained for: with more of them its weights are others.
    is_given
        Whether somebody gave the name for one push; it counts there, and is not kept.
    """

    name: str | None = None
    revision: str | None = None
    folder: Path | None = None
    n_epochs: int = 0
    is_given: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return name and revision."""
        return {"name": self.name, "revision": self.revision}

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> Origin | None:
        """Read what :meth:`to_json` wrote; None for None."""
        if content is None:
            return None
        if not isinstance(content, Mapping) or not _is_text(content.get("name")):
            raise ModelFileError(f"the description in {source!r} names its base model oddly; copy it again.")
        revision = content.get("revision")
        return cls(content["name"], revision if _is_text(revision) else None)


@dataclass(frozen=True)
class CardFacts:
    """What a card says and a model cannot know by itself.

    Attributes
    ----------
    licence
        Identifier, e.g. ``"apache-2.0"``, or name of the licence.
    data
        What the model was trained on.
    citation
        How to cite it.
    table
        Figures beside baselines, as Markdown.
    scores
        The same for machines.
    n_epochs
        Epochs that the model had been trained for when the figures were given: with more of them they are not its own.
    base
        The model before fine-tuning.
    checkpoint
        The published checkpoint that the first weights are from.
    """

    licence: str | None = None
    data: tuple[str, ...] = ()
    citation: str | None = None
    table: str = ""
    scores: tuple[Score, ...] = ()
    n_epochs: int | None = None
    base: Origin | None = None
    checkpoint: str | None = None

    @classmethod
    def of_checkpoint(cls, found: Foreign) -> CardFacts:
        """Return what is known of a published checkpoint: its family, and how its file or folder is called."""
        family = " ".join(part for part in (found.family, found.version) if part)
        return cls(checkpoint=f"{family}, `{Path(found.source).resolve().name}`")

    def with_given(
        self,
        *,
        licence: str | None = None,
        data: str | Sequence[str] | None = None,
        citation: str | None = None,
        metrics: Report | pd.DataFrame | None = None,
        n_epochs: int = 0,
    ) -> CardFacts:
        """Return the same, with what was given in the place of what was known.

        `n_epochs` is how long the model that `metrics` are of has been trained.

        Raises
        ------
        OptionError
            If something is no text, or `metrics` has no baselines.
        """
        changes: dict[str, Any] = {}
        for name, value in (("licence", licence), ("citation", citation)):
            if value is not None:
                if not _is_text(value):
                    raise OptionError(f"{name}={value!r} is no text; give some, or leave it out.")
                changes[name] = value.strip()
        if data is not None:
            named = (data,) if isinstance(data, str) else tuple(data)
            if not named or not all(_is_text(one) for one in named):
                raise OptionError(f"data={data!r} names no data; give text, or a list of it.")
            changes["data"] = named
        if metrics is not None:
            changes["table"], changes["scores"] = scores_of(metrics)
            changes["n_epochs"] = n_epochs
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, JSON-safe; without what is not known."""
        content = {
            "licence": self.licence,
            "data": list(self.data),
            "citation": self.citation,
            "table": self.table,
            "scores": [vars(score) for score in self.scores],
            "n_epochs": self.n_epochs if self.table else None,
            "base": None if self.base is None else self.base.to_json(),
            "checkpoint": self.checkpoint,
        }
        return {name: value for name, value in content.items() if value not in (None, "", [])}

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> CardFacts:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ModelFileError
            If it is something else.
        """
        if content is None:
            return cls()
        try:
            scores = tuple(Score(**score) for score in content.get("scores", ()))
            facts = cls(
                licence=content.get("licence"),
                data=tuple(content.get("data", ())),
                citation=content.get("citation"),
                table=content.get("table", ""),
                scores=scores,
                n_epochs=content.get("n_epochs"),
                base=Origin.from_json(content.get("base"), source=source),
                checkpoint=content.get("checkpoint"),
            )
        except (AttributeError, TypeError) as error:
            raise ModelFileError(f"the card in the description of {source!r} cannot be read; copy it again.") from error
        told = (facts.licence, facts.citation, facts.checkpoint, *(score.data for score in scores))
        texts = (facts.table, *facts.data, *(one for one in told if one is not None))
        figures = [figure for score in scores for figure in (score.value, *score.beside.values())]
        fits = all(isinstance(one, str) for one in texts) and all(isinstance(one, int | float) for one in figures)
        if not fits or not isinstance(facts.n_epochs, int | None):
            raise ModelFileError(f"the card in the description of {source!r} cannot be read; copy it again.")
        return facts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
