import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy import sparse

from scforge.cli import main
from scforge.data import CellOrder, GeneVocab, convert, open_cells
from scforge.data.conversion import _working_folder
from scforge.data.joining import join_obs
from scforge.data.store import StoreInfo, inspect_store, read_measured
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeWarning
from scforge.testing import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* genes that are not measured in all sources"),
    pytest.mark.filterwarnings("ignore:.* not in the vocabulary of the store"),
]

KILLS = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import annbatch  # what takes long to import, once
from scforge.data import conversion, convert
from scforge.data.matrix import Matrix
from scforge.data.store import StoreInfo, inspect_store

folder, n_kills = Path(sys.argv[1]), int(sys.argv[2])
conversion.dataset_size = lambda *_: 512
Matrix.row_chunks.__defaults__ = (1000,)
target = folder / "s.zarr"

def run(work, seconds=None):
    # A process of its own, as threads of zarr do not survive a fork; it is killed after some seconds.
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return "killed" if os.WIFSIGNALED(status) else "done" if os.WEXITSTATUS(status) == 0 else "failed"

def append():
    convert(folder / "b.h5ad", target, append=True, progress=False)

def append_until(step):
    # Killed before a step of moving the new parts into the store.
    left = [step]

    def counted(move):
        def move_or_die(path, other):
            if target in (*path.parents, *Path(other).parents):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            return move(path, other)
        return move_or_die

    Path.rename, Path.replace = counted(Path.rename), counted(Path.replace)
    append()

def verify():
    assert inspect_store(target, verify=True).verified

assert run(lambda: convert(folder / "a.h5ad", target, progress=False)) == "done"
old = StoreInfo.read(target)
shutil.copytree(target, folder / "old.zarr")
begin = time.monotonic()
assert run(append) == "done"
whole_run = time.monotonic() - begin
expected = StoreInfo.read(target).content_hash
random.seed(7)
killed, completed, step = 0, 0, 0
while killed < n_kills:
    if StoreInfo.read(target).content_hash == expected:  # begin again
        shutil.rmtree(target)
        shutil.copytree(folder / "old.zarr", target)
    if killed % 2:
        outcome = run(lambda: append_until(step))
        step = step + 1 if outcome == "killed" else 0
    else:
        outcome = run(append, seconds=random.uniform(0, whole_run))
    assert outcome != "failed"
    killed += outcome == "killed"
    assert run(verify) == "done"
    info = StoreInfo.read(target)
    completed += info.content_hash == expected
    assert info == old or info.content_hash == expected
if info == old:
    assert run(append) == "done"
assert StoreInfo.read(target).content_hash == expected
left = sorted(path.name for path in [*target.iterdir(), *folder.glob(".*")])
print(json.dumps({"killed": killed, "completed": completed, "left": left}))
"""


def make(name: str, n_cells: int, genes: range, *, seed: int) -> ad.AnnData:
    generator = np.random.default_rng(seed)
    counts = generator.poisson(0.5, (n_cells, len(genes))) + (np.array(genes) == 35)
    obs = pd.DataFrame(
        {
            "group": pd.Categorical(generator.choice(["x", "y", name], n_cells)),
            "depth": generator.random(n_cells),
            "batch": generator.integers(0, 3, n_cells),
        },
        index=[f"{name}{i}" for i in range(n_cells)],
    )
    obs.loc[obs.index[3], "group"] = None
    var = pd.DataFrame(index=[f"gene{gene}" for gene in genes])
    return ad.AnnData(sparse.csr_matrix(counts), obs=obs, var=var)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Three files with other genes; those of the second are all in the first."""
    paths = {}
    for seed, (name, n_cells, genes) in enumerate(
        [("a", 900, range(60)), ("b", 600, range(20, 50)), ("c", 300, range(30, 70))]
    ):
        paths[name] = tmp_path / f"{name}.h5ad"
        make(name, n_cells, genes, seed=seed).write_h5ad(paths[name])
    return paths


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scforge.data.conversion.dataset_size", lambda *_: 512)


def by_name(path: Path) -> ad.AnnData:
    """The cells of a store, sorted by name."""
    cells = open_cells(path)
    block = cells.block(np.arange(len(cells)))
    obs = cells.obs.assign(source=cells.sources().astype(str), total=block.totals).set_index(cells.names())
    obs["group"] = obs["group"].astype(object)
    counts = sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=(len(cells), cells.vocab.n_genes))
    adata = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=list(cells.vocab.genes)))
    return adata[np.argsort(adata.obs_names)].copy()


def test_a_grown_store_has_the_cells_of_a_store_that_was_made_at_once(files, small_steps, tmp_path):
    grown = convert(files["a"], tmp_path / "s.zarr")
    for name in "bc":
        grown = convert(files[name], tmp_path / "s.zarr", append=True)
    genes = GeneVocab.from_genes([f"gene{i}" for i in range(60)])
    whole = convert(list(files.values()), tmp_path / "t.zarr", vocab=genes)
    one, other = by_name(tmp_path / "s.zarr"), by_name(tmp_path / "t.zarr")
    pd.testing.assert_frame_equal(one.obs, other.obs)
    assert (one.X != other.X).nnz == 0
    assert one.var_names.equals(other.var_names)
    assert grown == StoreInfo.read(tmp_path / "s.zarr") == inspect_store(tmp_path / "s.zarr", verify=True).info
    assert (grown.n_cells, len(grown.datasets), grown.n_nonzeros) == (1800, 5, whole.n_nonzeros)
    assert grown.sources == whole.sources
    assert grown.counts_kept == pytest.approx(whole.counts_kept, rel=1e-12)
    assert grown.vocab_hash == StoreInfo.read(tmp_path / "s.zarr").vocab_hash != whole.vocab_hash  # medians stay
    measured = (read_measured(zarr.open_group(tmp_path / name, mode="r")) for name in ("s.zarr", "t.zarr"))
    np.testing.assert_array_equal(*measured)
    described = inspect_store(tmp_path / "s.zarr")
    assert described.columns["group"] == "5 categories"
    assert "appended 300 cells: seed=0" in str(described)
    assert not list(tmp_path.glob(".*"))


def test_an_epoch_of_a_grown_store_has_each_cell_once_from_all_datasets(files, tmp_path):
    for number, name in enumerate("abc"):
        convert(files[name], tmp_path / "s.zarr", append=number > 0)
    cells = open_cells(tmp_path / "s.zarr")
    order = CellOrder(np.arange(len(cells)), 64, chunk_size=64, window_cells=512)
    blocks = list(cells.stream(order.windows()))
    rows = np.concatenate([block.rows for block in blocks])
    np.testing.assert_array_equal(np.sort(rows), np.arange(1800))
    sources = cells.sources().to_numpy()
    assert {len(set(sources[block.rows])) for block in blocks[:5]} & {2, 3}


def test_the_order_of_new_cells_depends_on_the_seed(files, tmp_path):
    hashes = []
    for number, seed in enumerate([0, 0, 1]):
        convert(files["a"], tmp_path / f"{number}.zarr")
        hashes.append(convert(files["b"], tmp_path / f"{number}.zarr", append=True, seed=seed).content_hash)
    assert hashes[0] == hashes[1] != hashes[2]
    convert(files["a"], tmp_path / "s.zarr", shuffle=False)
    with raises(OptionError, "shuffle"):
        convert(files["b"], tmp_path / "s.zarr", append=True)
    convert(files["b"], tmp_path / "s.zarr", append=True, shuffle=False)
    names = open_cells(tmp_path / "s.zarr").names().tolist()
    assert names == [f"a{i}" for i in range(900)] + [f"b{i}" for i in range(600)]


def test_what_is_outside_of_the_vocabulary_is_reported(files, tmp_path):
    convert(files["a"], tmp_path / "s.zarr")
    share = 1 - make("c", 300, range(30, 70), seed=2)[:, :30].X.sum() / make("c", 300, range(30, 70), seed=2).X.sum()
    outside = f"10 of 40 genes, with {share:.1%} of the counts, are not in the vocabulary of the store"
    with (
        pytest.warns(ScforgeWarning, match=r"^\d+% of the counts are in genes that are not measured in all sources"),
        pytest.warns(ScforgeWarning, match=outside),
    ):
        info = convert(files["c"], tmp_path / "s.zarr", append=True)
    assert info.sources[1]["counts_kept"] == pytest.approx(1 - share)
    assert 1 - share < info.counts_kept < 1


def test_counts_too_large_for_the_store_are_refused(tmp_path):
    convert(make("a", 100, range(60), seed=0), tmp_path / "s.zarr")
    more = make("b", 60, range(60), seed=1)
    more.X.data[more.X.indptr[5]] = 70_000
    with pytest.raises(DataError, match=r"the count 70000, but the largest count of the store is 65,535; convert all"):
        convert(more, tmp_path / "s.zarr", append=True)
    assert inspect_store(tmp_path / "s.zarr", verify=True).info.n_cells == 100


def test_files_of_one_name_in_several_folders(files, tmp_path, monkeypatch):
    stats = files["a"].stat()
    for number, name in enumerate("ab"):
        folder = tmp_path / f"sample {name}"
        folder.mkdir()
        moved = files[name].rename(folder / "cells.h5ad")
        os.utime(moved, ns=(stats.st_atime_ns, stats.st_mtime_ns))
        monkeypatch.chdir(folder)
        info = convert("cells.h5ad", tmp_path / "s.zarr", append=number > 0)
    assert info.n_cells == 1500
    shutil.copy("cells.h5ad", "copy.h5ad")
    with pytest.warns(ScforgeWarning, match="the names of 600 of 600 cells are in the store already"):
        convert("copy.h5ad", tmp_path / "s.zarr", append=True)


def test_names_sources_categories_and_wide_counts_of_cells_in_memory(tmp_path):
    first, second = make("a", 100, range(60), seed=0), make("a", 60, range(60), seed=1)
    first.obs["batch"] = first.obs["batch"].astype("category")
    second.obs["batch"] = second.obs["batch"].astype(float).astype("category")
    second.obs["depth"] = np.arange(60)
    first.X.data[first.X.indptr[5]] = 70_000
    convert(first, tmp_path / "s.zarr")
    in_store = "the names of {} of {} cells are in the store already; check that these are not the same cells"
    with pytest.warns(ScforgeWarning, match=in_store.format(60, 60)):
        convert(second, tmp_path / "s.zarr", append=True)
    with pytest.warns(ScforgeWarning, match=in_store.format(30, 30)):
        info = convert(second[:30].copy(), tmp_path / "s.zarr", append=True)
    assert info.counts_dtype == "uint32"
    cells = open_cells(tmp_path / "s.zarr")
    assert sorted(cells.names()) == sorted(
        [f"a{i}" for i in range(100)] + [f"a{i}-1" for i in range(60)] + [f"a{i}-2" for i in range(30)]
    )
    assert cells.sources().value_counts().to_dict() == {"adata": 100, "adata-1": 60, "adata-2": 30}
    assert cells.block(np.arange(190)).counts.max() == 70_000
    data = (zarr.open_array(tmp_path / f"s.zarr/dataset_{number}/X/data", mode="r") for number in range(3))
    assert {array.dtype for array in data} == {np.dtype(np.uint32)}
    assert cells.obs["depth"].max() == 59
    assert cells.obs["batch"].cat.categories.tolist() == [0, 1, 2]


def test_readers_keep_working_and_a_second_writer_is_refused(files, tmp_path):
    store = tmp_path / "s.zarr"
    convert(files["a"], store)
    assert json.loads((store / "zarr.json").read_text())["attributes"]["scforge"]["format"] == 1
    reader, unopened = open_cells(store), open_cells(store)
    before = reader.block(np.arange(900)).counts
    with _working_folder(store), pytest.raises(OptionError, match=r"another conversion is writing to '.*s\.zarr'"):
        convert(files["b"], store, append=True)
    convert(files["b"], store, append=True)
    for cells in (reader, unopened):
        np.testing.assert_array_equal(cells.block(np.arange(900)).counts, before)
    np.testing.assert_array_equal(open_cells(store).block(np.arange(900)).counts, before)


def test_a_store_that_another_process_has_changed_meanwhile_is_not_changed(files, tmp_path, monkeypatch):
    def append_first(streams, columns, onto):
        monkeypatch.undo()
        convert(files["c"], tmp_path / "s.zarr", append=True)
        return join_obs(streams, columns, onto)

    convert(files["a"], tmp_path / "s.zarr")
    monkeypatch.setattr("scforge.data.conversion.join_obs", append_first)
    with pytest.raises(OptionError, match="has changed since the append began; run it again"):
        convert(files["b"], tmp_path / "s.zarr", append=True)
    assert inspect_store(tmp_path / "s.zarr", verify=True).info.n_cells == 1200


@pytest.mark.parametrize(
    ("change", "options", "error", "match"),
    [
        (
            "",
            {"vocab": "human_protein_coding"},
            OptionError,
            "has other genes than the store, whose vocabulary is kept",
        ),
        ("", {"obs": ["group"]}, OptionError, r"columns of the store, which are kept \('group', 'depth', 'batch'\)"),
        ("", {"overwrite": True}, OptionError, "cannot replace a store and add to it; omit append or overwrite"),
        ("", {"path": "memory://s.zarr"}, OptionError, "is a URL; append to a local copy, and then upload the store"),
        ("", {"path": "other.zarr"}, MissingFileError, r"other\.zarr' does not exist; omit append=True to create it"),
        ("", {"path": "."}, DataError, "is not a store; pass a folder that was written by scforge convert"),
        ("same", {}, OptionError, r"contains '.*a\.h5ad', which is in the store already; nothing to append"),
        ("newer", {}, OptionError, r"contains '.*a\.h5ad', of which the store has an earlier version"),
        ("column", {}, DataError, r"has no column 'depth'"),
        ("kind", {}, DataError, r"'depth' contains text in '.*b\.h5ad' and numbers in the store"),
        ("genes", {}, GeneMismatchError, "has only 0 of the 60 genes"),
        ("logs", {}, DataError, "contains values that are not whole numbers"),
    ],
)
def test_a_refused_append_changes_nothing(files, tmp_path, monkeypatch, change, options, error, match):
    monkeypatch.chdir(tmp_path)
    info = convert(files["a"], "s.zarr")
    adata = ad.read_h5ad(files["b"])
    if change == "newer":
        adata.write_h5ad(files["a"])
    if change == "column":
        del adata.obs["depth"]
    if change == "kind":
        adata.obs["depth"] = "deep"
    if change == "genes":
        adata.var_names = [f"other{i}" for i in range(30)]
    if change == "logs":
        adata.X = np.log1p(adata.X)
    adata.write_h5ad(files["b"])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=match):
        convert(files["a" if change in ("same", "newer") else "b"], **{"path": "s.zarr", "append": True, **options})
    assert sorted(tmp_path.rglob("*")) == before
    assert inspect_store("s.zarr", verify=True).info == info


def test_options_of_the_first_conversion_may_be_repeated(files, tmp_path):
    genes = GeneVocab.from_genes([f"gene{i}" for i in range(25, 60)])
    convert(files["a"], tmp_path / "s.zarr", vocab=genes, obs=["group"])
    info = convert(files["b"], tmp_path / "s.zarr", vocab=genes, obs=["group"], append=True)
    assert (info.obs_columns, info.n_cells, info.n_genes) == (["group"], 1500, 35)


def test_append_on_the_command_line(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "a.h5ad", "-o", "s.zarr", "--quiet"]) == 0
    assert main(["convert", "b.h5ad", "-o", "s.zarr", "--append"]) == 0
    assert "1,500 x 60" in capsys.readouterr().out
    assert main(["convert", "b.h5ad", "-o", "s.zarr", "--append"]) == 2
    assert "'b.h5ad', which is in the store already; nothing to append." in capsys.readouterr().err
    assert main(["convert", "b.h5ad", "-o", "t.zarr", "--append"]) == 2
    assert "does not exist; omit --append to create it." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("n_kills", [6, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_kills_at_any_moment_leave_the_old_store(files, tmp_path, n_kills):
    command = [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path), str(n_kills)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout.splitlines()[-1])
    assert outcome["killed"] == n_kills
    assert outcome["left"] == ["dataset_0", "dataset_1", "dataset_2", "dataset_3", "scforge", "zarr.json"]


def test_a_store_with_parts_of_a_killed_append_grows_or_is_replaced(files, small_steps, tmp_path, monkeypatch):
    class KilledError(BaseException):
        pass

    def replace(path, target):
        if target == store / "zarr.json":
            raise KilledError
        return whole(path, target)

    whole, store = Path.replace, tmp_path / "s.zarr"
    old = convert(files["a"], store)
    for last in (False, True):
        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(KilledError):
            convert(files["b"], store, append=True)
        monkeypatch.setattr(Path, "replace", whole)
        assert (store / "dataset_3").exists()
        assert inspect_store(store, verify=True).info == old
        assert len(open_cells(store)) == 900
        if last:
            assert convert(files["b"], store, overwrite=True).n_cells == 600
            assert not (store / "dataset_3").exists()
        else:
            assert convert(files["c"], store, append=True).n_cells == 1200
            assert not (store / "dataset_3").exists()
            old = convert(files["a"], store, overwrite=True)
    (store / "dataset_9").mkdir()
    (store / "dataset_9" / "zarr.json").write_text("{}")
    with raises(OptionError, "path"):
        convert(files["c"], store, overwrite=True)
