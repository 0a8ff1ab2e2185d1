"""Count what a reader of the code meets: functions, files, and moves between files in four flows, and in scVI's.

A function counts once if a flow calls it, and so does a file. A move is a call of a function in another file, counted
once per pair of functions. Generated functions (dataclasses, named tuples) and comprehensions do not count::

    python tools/trace_flows.py
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anndata as ad
import scvi

import scforge
from scforge.models import Encoder

QUICK = {"max_epochs": 1, "progress_bar": False, "accelerator": "cpu"}


class Trace:
    """Functions of a package that are called, and calls between its files."""

    def __init__(self, package: Any) -> None:
        self._root = str(Path(package.__file__).parent)
        self.functions: set[CodeType] = set()
        self.moves: set[tuple[CodeType, CodeType]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not self._counts(code):
            return
        self.functions.add(code)
        caller = frame.f_back
        while caller is not None and not self._counts(caller.f_code):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.moves.add((caller.f_code, code))

    def _counts(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._root) and not code.co_name.startswith("<")

    def row(self, name: str) -> str:
        return (
            f"| {name} | {len(self.functions)} | {len({f.co_filename for f in self.functions})} | {len(self.moves)} |"
        )


@contextlib.contextmanager
def traced(package: Any) -> Iterator[Trace]:
    """Trace the calls in all threads."""
    trace = Trace(package)
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def cells() -> ad.AnnData:
    adata = scforge.datasets.pbmc3k()
    return adata[adata.obs["cell_type"].notna()][:600].copy()


def notebook() -> Encoder:
    adata = cells()
    Encoder.setup_anndata(adata, labels_key="cell_type")
    model = Encoder(adata)
    model.train(**QUICK)
    model.get_latent_representation()
    return model


def command_line() -> None:
    from scforge.config import load_config, recipe_path
    from scforge.workflows import train_from_config

    cells().write_h5ad("cells.h5ad")
    overrides = ["data.paths=cells.h5ad", "training.max_epochs=1", "training.accelerator=cpu"]
    train_from_config(load_config(recipe_path("light"), overrides), progress_bar=False)


def fine_tuning(model: Encoder) -> None:
    annotator = model.finetune("annotation", **QUICK)
    annotator.predict()
    annotator.evaluate()


def query(model: Encoder) -> None:
    mapped = Encoder.load_query_data(cells()[::2].copy(), model)
    mapped.get_latent_representation()
    mapped.transfer_labels(labels_key="cell_type", reference=model)


def scvi_notebook() -> None:
    adata = cells()
    scvi.model.SCVI.setup_anndata(adata)
    model = scvi.model.SCVI(adata)
    model.train(1, enable_progress_bar=False, accelerator="cpu")
    model.get_latent_representation()


def main() -> None:
    warnings.simplefilter("ignore")
    model = notebook()  # imports and caches, which are not counted
    flows: dict[str, tuple[Any, Callable[[], object]]] = {
        "setup, Encoder, train, latent": (scforge, notebook),
        "scforge train --config": (scforge, command_line),
        "finetune, predict, evaluate": (scforge, lambda: fine_tuning(model)),
        "load_query_data, latent, transfer_labels": (scforge, lambda: query(model)),
        "scVI: setup, model, train, latent": (scvi, scvi_notebook),
    }
    print("| flow | functions | files | moves |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, (package, flow) in flows.items():
            with traced(package) as trace:
                flow()
            print(trace.row(name), flush=True)


if __name__ == "__main__":
    main()
