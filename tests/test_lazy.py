import io
import sys
import time
from collections.abc import Callable

import pytest

from scforge import _lazy
from scforge._lazy import announced_loading, lazy_names, silent_loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Load for longer than the patience, in front of a terminal; return what it shows."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(_lazy, "_PATIENCE_S", 0.01)

    def load(what: Callable[[], object] = lambda: time.sleep(0.1)) -> str:
        terminal = Terminal()
        with monkeypatch.context() as changed:
            changed.setattr(sys, "stderr", terminal)
            with announced_loading():
                what()
        return terminal.getvalue()

    return load


def test_a_long_import_is_announced_once(load, tmp_path, monkeypatch):
    (tmp_path / "slow_part.py").write_text("import time, slow_inner\nslow_part = time.sleep(0.1)")
    (tmp_path / "slow_inner.py").write_text("import time\ntime.sleep(0.1)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_lazy._LARGE, "slow_inner", "a large package")
    monkeypatch.setattr(_lazy, "_PATIENCE_S", 0.1)
    get, _ = lazy_names("slow_part", {"slow_part": "slow_part"})
    assert load(lambda: get("slow_part")) == "scforge: loading a large package ...\n"
    assert load(lambda: get("slow_part")) == ""  # it is loaded


def test_a_notebook_is_told_where_it_is_not_red(load, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert load() == ""
    assert capsys.readouterr().out == "scforge: loading packages ...\n"


def test_other_processes_and_quiet_commands_announce_nothing(load, monkeypatch):
    assert load()
    with silent_loading():
        assert load() == ""
    with monkeypatch.context() as changed:
        changed.setenv("RANK", "1")
        assert load() == ""
    with monkeypatch.context() as changed:
        changed.setattr("multiprocessing.parent_process", lambda: "a parent")
        assert load() == ""
    with monkeypatch.context() as changed:
        changed.setattr(Terminal, "isatty", lambda self: False)
        assert load() == ""
