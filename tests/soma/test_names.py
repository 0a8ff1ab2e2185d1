import importlib
import inspect
import pkgutil

import pytest

published = pytest.importorskip("soma_models", reason="the published package is not installed")

_INNER = {"soma_models.utils.dict", "soma_models.utils.remap"}
"""The parts of a package whose names all stand in the package itself; scforge has one file for it."""


def modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(published.__path__, "soma_models.") if m.name not in _INNER]


def names(module) -> list[str]:
    own = (name for name, value in vars(module).items() if _published(name, value, module))
    return sorted({*getattr(module, "__all__", ()), *own})


def _published(name, value, module) -> bool:
    if name.startswith("_") or inspect.ismodule(value):
        return False
    if inspect.isclass(value) or inspect.isfunction(value):
        # A package hands on what its parts define.
        return value.__module__.startswith(module.__name__)
    # Constants that a module takes from ``configs`` are not names of its own.
    return name.isupper() and isinstance(value, int | float) and (name[:3] != "V1_" or "configs" in module.__name__)


@pytest.mark.parametrize("name", modules())
def test_published_names(name):
    if ".flax" in name:
        pytest.importorskip("flax.nnx", reason="flax comes with the extra flax")
    theirs = importlib.import_module(name)
    ours = importlib.import_module(name.replace("soma_models", "scforge.soma", 1))
    for thing in names(theirs):
        assert hasattr(ours, thing)
        cls = getattr(theirs, thing)
        own = vars(cls) if inspect.isclass(cls) else []
        methods = [method for method in own if not method.startswith("_") and callable(getattr(cls, method))]
        assert all(hasattr(getattr(ours, thing), method) for method in methods)
    if name.endswith((".torch.modules", ".flax.modules")):
        with pytest.raises(AttributeError, match="Decoder"):
            ours.Decoder  # noqa: B018
    assert {"Serde", "Serializable"} <= set(names(importlib.import_module("soma_models.v1.torch.serde")))
