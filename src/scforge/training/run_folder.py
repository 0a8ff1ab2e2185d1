"""The folder of a training: states to go on with (``step=NNNNNNNN``), the best epochs (``epoch=NN``), the last model.

A state is a model folder with a folder ``training`` in it, of ``state.json`` and ``state.safetensors``. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from scforge._io import check_folder, read_json, remove_folder, sha256_of
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line, warn
from scforge.training.packing import pack, unpack
from scforge.training.resuming import check_format

__all__ = ["FINAL", "RunFolder", "check_state", "read_state", "write_state"]

logger = logging.getLogger("scforge")

FINAL = "final"
"""Name of the trained model in the folder of a training."""

_STATE, _TENSORS, _LOCK, _PART = "state.json", "state.safetensors", ".lock", "training"
_PARTS = ("step=*", "epoch=*", FINAL)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state of a training into a model folder that is being made."""
    place = folder / _PART
    place.mkdir()
    plain, tensors = pack(state, where="state")
    save_file(tensors, place / _TENSORS)
    content = {"sha256": {_TENSORS: sha256_of(place / _TENSORS), "state": _sum(plain)}, "state": plain}
    (place / _STATE).write_text(json.dumps(content), encoding="utf-8")


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state of a training.

    Raises
    ------
    MissingFileError
        If there is none.
    ModelFileError
        If it is damaged.
    """
    place = Path(folder) / _PART
    if not (place / _STATE).is_file() or not (place / _TENSORS).is_file():
        raise MissingFileError(
            f"resume={str(folder)!r} holds no state of a training; give a folder such as checkpoints/step=00000100, or "
            "'auto' for the last one in checkpoint_dir."
        )
    try:
        content = read_json(place / _STATE, finite=False)
        for name, found in ((_TENSORS, sha256_of(place / _TENSORS)), ("state", _sum(content["state"]))):
            if found != content["sha256"][name]:
                file = place / (_TENSORS if name == _TENSORS else _STATE)
                raise ModelFileError(f"{str(file)!r} is corrupted: its checksum is not the one in {_STATE}.")
        state = unpack(content["state"], load_file(place / _TENSORS))
        check_format(state, where=str(folder))
    except (ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{str(place / _STATE)!r} is no state of a training: {first_line(error)}.") from error
    return state


def check_state(path: Path, run: RunFolder | None = None) -> None:
    """Raise unless `path` is the folder of a state; cheap, as nothing is read.

    Parameters
    ----------
    path
        What a user gave as `resume`.
    run
        The folder of the training that is to go on.

    Raises
    ------
    MissingFileError
        Saying what could have been meant.
    """
    if not path.is_dir():
        raise MissingFileError(
            f"resume={str(path)!r} does not exist (--resume); give the folder of a state, e.g. ckpt/step=00000100, "
            "or 'auto'."
        )
    if (path / _PART).is_dir():
        return
    states = RunFolder(path).states()
    ways = ["--resume auto"] if run is not None and states and path.resolve() == run.path.resolve() else []
    ways += [os.fspath(state) for state in states[-1:]]
    meant = f"did you mean {', or '.join(ways)}?" if ways else "give one such as ckpt/step=00000100, or 'auto'."
    raise MissingFileError(f"resume={str(path)!r} holds no state of a training (--resume); {meant}")


def _sum(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


class RunFolder:
    """The folder in which one training at a time keeps what it saves.

    Parameters
    ----------
    path
        The folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_folder("checkpoint_dir", path)
        self.path = Path(path)

    def parts(self) -> list[Path]:
        """Return what trainings have left here."""
        return sorted(part for pattern in _PARTS for part in self.path.glob(pattern) if part.is_dir())

    def models(self) -> list[Path]:
        """Return the folders of models: of states, of the best epochs, and last the trained one."""
        parts = [part for pattern in _PARTS for part in sorted(self.path.glob(pattern))]
        return [part for part in parts if (part / "config.json").is_file()]

    def states(self) -> list[Path]:
        """Return the folders of states, the oldest first."""
        return sorted(part for part in self.path.glob("step=*") if part.is_dir())

    def latest(self, read: Callable[[Path], Any] = lambda path: None) -> tuple[Path, dict[str, Any], Any] | None:
        """Return the last state that is whole, or None if there is none at all.

        Parameters
        ----------
        read
            Called with the folder of a state; returns the model in it, or raises if that is damaged.

        Returns
        -------
        The folder, the state, and what `read` returned.

        Raises
        ------
        ModelFileError
            If there are states, but none that is whole.
        """
        states = self.states()
        for path in reversed(states):
            try:
                model = read(path)
                return path, read_state(path), model
            except (MissingFileError, ModelFileError) as error:
                if path == states[0]:
                    raise ModelFileError(
                        f"checkpoint_dir={str(self.path)!r} has no state that is whole ({error}); pass overwrite=True "
                        "(--overwrite) to start anew."
                    ) from error
                warn(f"{error} The state before it is taken.")
        return None

    def holds(self, state: Path) -> bool:
        """Return whether the folder of a state lies in here."""
        return self.path.resolve() in (state.parent.resolve(), state.resolve().parent)

    def check_free(self, *, goes_on: bool = False) -> None:
        """Raise if a training has left something here.

        Parameters
        ----------
        goes_on
            Whether the training goes on with the last state in here, or starts where there is none yet: one may have
            ended after its first epoch was kept, and before its first state was saved.

        Raises
        ------
        OptionError
            Saying what can be done.
        """
        found = self.parts()
        if goes_on and (self.states() or all(part.name.startswith("epoch=") for part in found)):
            return
        if found:
            raise OptionError(
                f"checkpoint_dir={str(self.path)!r} holds a training already ({found[-1].name}); pass resume='auto' "
                "(--resume auto) to go on with it, overwrite=True (--overwrite) to replace it, or another folder."
            )

    def clear(self, *, states_only: bool = False) -> None:
        """Remove what trainings have left here."""
        for part in self.states() if states_only else self.parts():
            remove_folder(part)

    def go_back_to(self, step: int, n_epochs: int) -> None:
        """Remove what a training left behind a state of it, as it will come again: later states, and later epochs."""
        for kind, most in (("step", step), ("epoch", n_epochs - 1)):
            for part in self.path.glob(f"{kind}=*"):
                number = part.name.removeprefix(f"{kind}=")
                if part.is_dir() and number.isdecimal() and int(number) > most:
                    logger.info("%s came later, and is removed.", part)
                    remove_folder(part)

    def keep_last(self, n: int) -> None:
        """Remove all states but the last `n`."""
        for part in self.states()[:-n]:
            remove_folder(part)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainings out while this one runs; the lock ends with the process, however it ends.

        Raises
        ------
        OptionError
            If another training holds the folder, or it cannot be written to.
        """
        lock = FileLock(self.path / _LOCK)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            raise OptionError(
                f"checkpoint_dir={str(self.path)!r} is in use by another training; wait for it, or choose another "
                "folder."
            ) from None
        except OSError as error:
            raise OptionError(
                f"checkpoint_dir={str(self.path)!r} cannot be written to: {error.strerror or error}; choose another "
                "folder."
            ) from error
        try:
            self._sweep()
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Remove what processes that were killed have left half done."""
        for pattern in (".step=*", ".epoch=*", f".{FINAL}.*"):
            for part in self.path.glob(pattern):
                if part.is_dir():
                    shutil.rmtree(part, ignore_errors=True)
                else:
                    part.unlink(missing_ok=True)
