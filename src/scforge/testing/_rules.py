"""Rules of the checks in :mod:`scforge.testing`, and errors for broken rules."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from scforge.errors import OptionError


class BrokenRuleError(Exception):
    """Error that describes how a rule was broken."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise BrokenRuleError(sentence)


def saved_config(made: Any) -> dict[str, Any]:
    """Return config() after writing and reading it as JSON, which must not change it; no option may be missing."""
    config = made.config()
    unnamed = set(config) ^ set(made.option_names())
    require(not unnamed, f"config() and the keyword-only options differ in {sorted(unnamed)}.")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(config))
    except TypeError as error:
        raise BrokenRuleError(f"config() cannot be written as JSON: {error}.") from error
    require(copy == config, "config() changes when it is written as JSON and read again.")
    return copy


def apply_rules(name: str, rules: Mapping[str, Callable[..., None]], *subject: Any) -> None:
    """Raise an AssertionError for the first rule (a mapping from description to check) that `subject` violates."""
    for rule, check in rules.items():
        try:
            check(*subject)
        except BrokenRuleError as broken:
            raise AssertionError(f"{name}: {broken}") from None
        except Exception as error:
            # The whole message stands in the cause; some of torch's are pages long.
            raised = textwrap.shorten(repr(error), 400, placeholder=" ...")
            raise AssertionError(f"{name}: checking that {rule} raised {raised}.") from error


def class_of[T](argument: str, given: Any, options: dict[str, Any], base: type[T], registry: Any) -> type[T] | None:
    """Return the class to check, or None for an instance, which accepts no options."""
    if isinstance(given, base):
        if options:
            raise OptionError("have no effect with an instance; pass them to its constructor.", options=options)
        return None
    cls = registry.get(given) if isinstance(given, str) else given
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise OptionError(
            "cannot be checked; pass a registered name, a class or an instance.", argument=argument, value=given
        )
    return cls
