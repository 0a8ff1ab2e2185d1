"""Flipped bits in stores, saved models and checkpoints: refused in one sentence, or of no consequence."""

import hashlib
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from scforge.data.store import StoreCells, StoreInfo
from scforge.errors import ScforgeError, ScforgeWarning
from scforge.estimators import Encoder

LIGHT = {"hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4}
PLAIN = {"progress_bar": False, "accelerator": "cpu", "batch_size": 20}
N_QUICK, N_ALL = 15, 250


@pytest.fixture(scope="module")
def cells(many_adata: ad.AnnData) -> ad.AnnData:
    return many_adata[:60].copy()


def made(cells: ad.AnnData) -> Encoder:
    adata = cells.copy()
    Encoder.setup_anndata(adata)
    return Encoder(adata, **LIGHT)


@pytest.fixture(scope="module")
def folders(cells: ad.AnnData, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store, a model, a model with an annotation head and an adapter, and a checkpoint."""
    root = tmp_path_factory.mktemp("flips")
    model = made(cells)
    model.train(2, checkpoint_dir=root / "run", checkpoint_every_n_steps=2, keep_last=9, **PLAIN)
    model.save(root / "model")
    base = Encoder.load(root / "model", adata=cells.copy())
    annotator = base.finetune(task="annotation", labels_key="group", lora=True, max_epochs=1, **PLAIN)
    annotator.save(root / "annotator")
    return {
        "store": Path(shutil.copytree(store, root / "store.zarr")),
        "model": root / "model",
        "annotator": root / "annotator",
        "checkpoint": root / "run" / "step=00000002",
    }


def digest(*parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else repr(part).encode())
    return found.hexdigest()


def of_store(path: Path, cells: ad.AnnData) -> str:
    info = StoreInfo.read(path)
    opened = StoreCells.open(path, obs=[*info.obs_columns, "scforge_source"])
    blocks = [opened.block(np.arange(start, start + 35)) for start in range(0, len(opened), 35)]
    arrays = [part for block in blocks for part in (block.indptr, block.genes, block.counts, block.totals)]
    columns = [opened.column(key).tolist() for key in opened.obs]
    names = opened.names().tolist()
    return digest(
        *arrays, opened.measured, columns, names, opened.vocab.hash, opened.chunk_size, opened.counts_kept, info
    )


def of_weights(model: Encoder) -> list[Any]:
    weights = [(name, value.numpy().tobytes()) for name, value in sorted(model.module.state_dict().items())]
    history = {name: frame.to_numpy().tolist() for name, frame in model.history_.items() if "second" not in name}
    return [weights, history, model.spec.to_json(), model.vocab.hash, model.n_epochs_, model.is_trained_]


def of_model(path: Path, cells: ad.AnnData) -> str:
    model = Encoder.load(path)
    return digest(model.get_latent_representation(cells, key_added=None), *of_weights(model))


def of_annotator(path: Path, cells: ad.AnnData) -> str:
    model = Encoder.load(path, adata=cells.copy())
    split = model.fitted.split_of(model.open_cells())
    assert split is not None
    return digest(model.predict(cells.copy()).to_csv(), split.train, split.validation, split.test, *of_weights(model))


def of_checkpoint(path: Path, cells: ad.AnnData) -> str:
    model = made(cells)
    model.train(2, resume=path, **PLAIN)
    return digest(*of_weights(model))


READ: dict[str, Callable[[Path, ad.AnnData], str]] = {
    "store": of_store,
    "model": of_model,
    "annotator": of_annotator,
    "checkpoint": of_checkpoint,
}


def kind_of(file: Path, folder: Path) -> str:
    """Return the kind of a file; chunks and metadata of inner arrays have many names."""
    if folder.suffix != ".zarr":
        return file.relative_to(folder).as_posix()
    name = file.relative_to(folder).as_posix()
    return "chunks" if file.name != "zarr.json" else name if name == "zarr.json" else "inner zarr.json"


def flip_all(folder: Path, read: Callable[[Path], str], n: int, seed: int) -> tuple[Counter, list[str]]:
    """Flip `n` bits one after another; return the outcomes of each kind of file, and those that must not be."""
    generator = np.random.default_rng(seed)
    kinds: dict[str, list[Path]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.stat().st_size and not file.name.startswith("."):
            kinds.setdefault(kind_of(file, folder), []).append(file)
    expected = read(folder)
    assert read(folder) == expected
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong = []
    for number in range(n):
        kind = list(kinds)[number % len(kinds)]
        file = kinds[kind][generator.integers(len(kinds[kind]))]
        content = file.read_bytes()
        changed = bytearray(content)
        place, bit = generator.integers(len(content)), generator.integers(8)
        changed[place] ^= 1 << bit
        file.write_bytes(changed)
        try:
            outcome = "identical" if read(folder) == expected else "silent"
        except ScforgeError:
            outcome = "refused"
        except Exception as error:  # noqa: BLE001 -- counted and shown
            outcome = f"foreign {type(error).__name__}"
        file.write_bytes(content)
        outcomes[kind, outcome] += 1
        if outcome not in ("identical", "refused"):
            wrong.append(f"{outcome}: bit {bit} of byte {place} of {file.relative_to(folder)}")
    assert read(folder) == expected
    return outcomes, wrong


@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning", "ignore:Adding dataset with dtype")
@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("n", [N_QUICK, pytest.param(N_ALL, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_or_of_no_consequence(kind, n, folders, cells, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScforgeWarning)
        outcomes, wrong = flip_all(folders[kind], lambda path: READ[kind](path, cells), n, seed=n)
    with capsys.disabled():
        if n == N_ALL:
            print(
                f"\n{kind}:", *(f"{name}: {outcome} {m}" for (name, outcome), m in sorted(outcomes.items())), sep="\n  "
            )
    assert not wrong
