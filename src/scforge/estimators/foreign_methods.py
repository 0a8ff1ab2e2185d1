"""Front-class models of published checkpoints, and models written as other packages publish theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scforge.errors import ModelFileError, ScforgeError, first_line
from scforge.estimators.defaults import recipe_for
from scforge.estimators.shape_check import UNUSABLE, Shapes, TooManyError, described_shapes, refuse_counts
from scforge.estimators.spec import ModelSpec
from scforge.foreign.base import Foreign

if TYPE_CHECKING:
    import pandas as pd

    type Dictionary = pd.DataFrame | str | os.PathLike[str] | Mapping[str, Any]


def expected_of(found: Foreign) -> Shapes | None:
    """Return the shapes of the weights that a checkpoint's config asks for; see :func:`described_shapes`.

    Raises
    ------
    ModelFileError
        If it describes no model that can be made, or one of far more parts than the checkpoint has weights.
    """
    architecture, tokenizer, objective = (dict(part) for part in (found.architecture, found.tokenizer, found.objective))
    name, *others = (part.pop("name") for part in (architecture, tokenizer, objective))
    refuse_counts({**architecture, **tokenizer}, {name: tuple(value.shape) for name, value in found.tensors.items()})
    spec, _ = ModelSpec.resolve(
        recipe_for(name, architecture),
        found.vocab,
        tokenizer=(others[0], tokenizer),
        objective=(others[1], objective),
        options=architecture,
    )
    try:
        return described_shapes(spec, len(found.tensors))
    except TooManyError:
        raise ModelFileError(
            f"the config of {found.source!r} describes a model of far more parts than the {len(found.tensors):,} "
            "weights that are there; give the config that belongs to the checkpoint."
        ) from None
    except ScforgeError:
        raise
    except UNUSABLE as error:
        raise ModelFileError(
            f"the config of {found.source!r} describes no model that can be made: {first_line(error)}."
        ) from error
