"""What a model folder says of its model, beside weights and vocabulary: the description and the card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scforge.estimators.card import model_card
from scforge.estimators.card_facts import facts_of
from scforge.models._utils import count_parameters

if TYPE_CHECKING:
    from scforge.estimators.base import CellModel

__all__ = ["card_of", "content_of"]


def content_of(model: CellModel) -> dict[str, Any]:
    """Return the description of a model, JSON-safe."""
    facts = facts_of(model).to_json()
    return {
        "class": type(model).__name__,
        **model._spec.to_json(),
        "setup": dict(model.registry_["setup_args"]),
        "seed": model.seed,
        "is_trained": model.is_trained_,
        "n_epochs": model.n_epochs_,
        "history": {name: frame[name].tolist() for name, frame in model.history_.items()},
        **({"card": facts} if facts else {}),
    }


def card_of(model: CellModel, *, name: str | None = None, is_adapter: bool = False) -> str:
    """Return the text of ``README.md``.

    Parameters
    ----------
    model
        The model.
    name
        How others load it; None for the folder that the card is in.
    is_adapter
        Whether the folder has the adapters alone.
    """
    last = {key: frame[key].iloc[-1] for key, frame in model.history_.items() if len(frame)}
    return model_card(
        model._spec,
        n_epochs=model.n_epochs_,
        is_trained=bool(model.is_trained_),
        parameters=count_parameters(model.module, trainable_only=is_adapter),
        last_figures=last,
        facts=facts_of(model),
        name=name,
        is_adapter=is_adapter,
    )
