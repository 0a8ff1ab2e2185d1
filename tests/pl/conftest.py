from collections.abc import Callable, Iterator

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture
def texts() -> Callable[..., list[str]]:
    """Return a function that reads labels of a figure."""
    return lambda labels: [label.get_text() for label in labels]
