"""The folder of a training run: its outputs, and the training state in its checkpoints."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout
from safetensors import SafetensorError

from scforge._io import (
    check_folder,
    is_model,
    locked,
    others_in,
    read_json,
    remove_model,
    remove_working,
    sha256_of,
    sha256_of_json,
)
from scforge._version import __version__
from scforge.errors import MissingFileError, ModelFileError, OptionError, TrainingError, first_line, spelled, warn

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("scforge")

FORMAT = 1
"""Version of the training state in a checkpoint."""

_TENSOR, _ITEMS, _TUPLE = "__tensor__", "__items__", "__tuple__"

FINAL = "final"
"""Name of the trained model in a run folder."""

CONFIG_FILE = "config.yaml"
"""Name of the configuration in a run folder."""

_STATE, _TENSORS, _LOCK, _PART = "state.json", "state.safetensors", ".lock", "training"

_OUTPUT = re.compile(rf"(step|epoch)=\d+|{FINAL}")

_ORDER = ("step", "epoch", FINAL)


def pack(content: Any, *, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split `content` into a JSON-safe part and its tensors.

    Parameters
    ----------
    content
        Mappings, lists, tuples, plain values, tensors and arrays, nested to any depth.
    where
        Name of the content in errors, and prefix of the tensors' names.

    Returns
    -------
    JSON-safe content, and a mapping from name to tensor (on the CPU, contiguous).

    Raises
    ------
    TrainingError
        If `content` contains anything else.

    Examples
    --------
    >>> import torch
    >>> plain, tensors = pack({"step": 3, 0: (torch.ones(2), None)}, where="state")
    >>> list(tensors)
    ['state.0']
    >>> unpack(plain, tensors)
    {'step': 3, 0: (tensor([1., 1.]), None)}
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(content, where, tensors), tensors


def unpack(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the content that was split by :func:`pack`."""
    if isinstance(plain, list):
        return [unpack(value, tensors) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensors[plain[_TENSOR]]
    if _TUPLE in plain:
        return tuple(unpack(value, tensors) for value in plain[_TUPLE])
    if _ITEMS in plain:
        return {key: unpack(value, tensors) for key, value in plain[_ITEMS]}
    return {key: unpack(value, tensors) for key, value in plain.items()}


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    import numpy as np
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        # A safetensors file cannot contain tensors that share memory, hence the copy.
        key = f"{name.partition('.')[0]}.{len(tensors)}"
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        items = [(key, _pack(part, f"{name}.{key}", tensors)) for key, part in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("__") for key, _ in items)
        if not all(isinstance(key, str | int) for key, _ in items):
            raise TrainingError(f"{name} has a key that cannot be saved; use only strings and integers as keys.")
        return dict(items) if plain else {_ITEMS: [list(item) for item in items]}
    if isinstance(value, list | tuple):
        parts = [_pack(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    raise TrainingError(
        f"{name} is of type {type(value).__name__!r}, which cannot be saved in a checkpoint; use only numbers, "
        "strings, lists, dictionaries and tensors in the state of a callback."
    )


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the training state into a new model folder."""
    from safetensors.torch import save_file

    part = folder / _PART
    part.mkdir()
    plain, tensors = pack(state, where="state")
    save_file(tensors, part / _TENSORS)
    content = {"sha256": {_TENSORS: sha256_of(part / _TENSORS), "state": sha256_of_json(plain)}, "state": plain}
    (part / _STATE).write_text(json.dumps(content), encoding="utf-8")


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the training state of a checkpoint.

    Raises
    ------
    MissingFileError
        If there is no checkpoint.
    ModelFileError
        If the checkpoint is corrupted.
    """
    from safetensors.torch import load_file

    check_state(Path(folder))
    part = Path(folder) / _PART
    try:
        content = read_json(part / _STATE)
        sums = {_TENSORS: sha256_of(part / _TENSORS), "state": sha256_of_json(content["state"])}
        if wrong := [name for name, checksum in sums.items() if checksum != content["sha256"][name]]:
            file = part / (_TENSORS if _TENSORS in wrong else _STATE)
            raise ModelFileError(f"{str(file)!r} is corrupted: its checksum does not match the one in {_STATE}.")
        state = unpack(content["state"], load_file(part / _TENSORS))
        if state["format"] != FORMAT:
            raise TrainingError(
                f"the checkpoint {str(folder)!r} has the format {state['format']!r} (of scforge "
                f"{state.get('scforge_version')}), but scforge {__version__} reads the format {FORMAT}; resume "
                "training with the version that saved the checkpoint."
            )
        if not all(isinstance(state[name], int) and state[name] >= 0 for name in ("epoch", "step")):
            raise TypeError("epoch and step must be numbers")
        if not isinstance(state["settings"], dict):
            raise TypeError("settings must be a mapping")
    except ModelFileError:
        raise
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise ModelFileError(f"{str(part / _STATE)!r} is not a training checkpoint: {first_line(error)}.") from error
    return state


def check_state(path: Path, run: RunFolder | None = None) -> None:
    """Raise an error if `path` is not a checkpoint folder; no file is read.

    Parameters
    ----------
    path
        The value of `resume`.
    run
        The folder of the training run to resume.

    Raises
    ------
    MissingFileError
        If `path` is not a checkpoint; the message suggests checkpoints.
    """
    if (path / _PART / _STATE).is_file():
        return
    problem = "contains no training checkpoint" if path.is_dir() else "does not exist"
    states = sorted(path.glob("step=*"))
    auto = spelled("resume='auto'", "--resume auto")
    ways = [auto] if run is not None and states and path.resolve() == run.path.resolve() else []
    ways += [os.fspath(state) for state in states[-1:]]
    meant = (
        f"did you mean {', or '.join(ways)}?" if ways else "pass a checkpoint such as ckpt/step=00000100, or 'auto'."
    )
    raise MissingFileError(f"{problem}; {meant}", argument=spelled("resume", "--resume"), value=str(path))


class RunFolder:
    """The folder in which a training run saves its outputs; only one run at a time can use it.

    Parameters
    ----------
    path
        The folder, which need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_folder("checkpoint_dir", path)
        self.path = Path(path)

    def parts(self) -> list[Path]:
        """Return the outputs of training runs: checkpoints (oldest first), best epochs, and the trained model."""
        outputs = (part for part in self.path.glob("*") if _OUTPUT.fullmatch(part.name))
        return sorted(outputs, key=lambda part: (_ORDER.index(part.name.partition("=")[0]), part))

    def models(self) -> list[Path]:
        """Return the outputs that are model folders."""
        return [part for part in self.parts() if (part / "config.json").is_file()]

    def states(self) -> list[Path]:
        """Return the checkpoint folders, from oldest to newest."""
        return [part for part in self.parts() if part.name.startswith("step=")]

    def latest(self, read: Callable[[Path], Any] = lambda path: None) -> tuple[Path, dict[str, Any], Any] | None:
        """Return the newest intact checkpoint, or None if there are no checkpoints.

        Parameters
        ----------
        read
            Function called with a checkpoint folder. It returns the model, or raises an error if the folder is
            corrupted.

        Returns
        -------
        The folder, the training state, and the return value of `read`.

        Raises
        ------
        ModelFileError
            If all checkpoints are corrupted.
        """
        states = self.states()
        for path in reversed(states):
            try:
                model = read(path)
                return path, read_state(path), model
            except (MissingFileError, ModelFileError) as error:
                if path == states[0]:
                    raise ModelFileError(
                        f"has no intact checkpoint ({str(error).rstrip('.')}); pass "
                        f"{spelled('overwrite=True', '--overwrite')} to start a new run.",
                        checkpoint_dir=str(self.path),
                    ) from error
                warn(f"{error} Training resumes from the previous checkpoint.")
        return None

    def holds(self, state: Path) -> bool:
        """Return whether a checkpoint folder is inside this folder."""
        return self.path.resolve() in (state.parent.resolve(), state.resolve().parent)

    def check_free(self, *, resumes: bool = False, overwrite: bool = False) -> None:
        """Raise an error if the folder contains outputs of another training run, or other files in their place.

        Parameters
        ----------
        resumes
            Whether training resumes from the last checkpoint, or starts if there are no checkpoints. A run may have
            ended after saving its first best epoch but before saving its first checkpoint.
        overwrite
            Whether outputs of another training run may be replaced.

        Raises
        ------
        OptionError
            If the folder contains outputs; the message names the options.
        """
        outputs = self.parts()
        if others := [part for part in outputs if overwrite and not is_model(part)]:
            inside = others_in(others[0]) if others[0].is_dir() and not others[0].is_symlink() else []
            name = f"{others[0].name}/{inside[0]}" if inside else others[0].name
            raise OptionError(
                f"contains {name!r}, which is not part of an scforge model; move it, or choose another folder.",
                checkpoint_dir=str(self.path),
            )
        if overwrite:
            return
        if resumes and (self.states() or all(part.name.startswith("epoch=") for part in outputs)):
            return
        if outputs:
            ways = spelled("resume='auto'", "--resume auto"), spelled("overwrite=True", "--overwrite")
            raise OptionError(
                f"already contains a training run ({outputs[-1].name}); pass "
                f"{ways[0]} to resume, {ways[1]} to replace it, or another folder.",
                checkpoint_dir=str(self.path),
            )

    def clear(self, *, states_only: bool = False) -> None:
        """Remove the outputs of training runs."""
        for part in self.states() if states_only else self.parts():
            remove_model(part)

    def go_back_to(self, step: int, n_epochs: int) -> None:
        """Remove checkpoints and epochs later than the checkpoint to resume from; the resumed run writes them again."""
        for kind, most in (("step", step), ("epoch", n_epochs - 1)):
            for part in self.path.glob(f"{kind}=*"):
                number = part.name.removeprefix(f"{kind}=")
                if part.is_dir() and number.isdecimal() and int(number) > most:
                    logger.info("%s was saved after the checkpoint to resume from and is removed.", part)
                    remove_model(part)

    def keep_last(self, n: int) -> None:
        """Remove all checkpoints except the last `n`."""
        for part in self.states()[:-n]:
            remove_model(part)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this training run; the lock is released when the process ends.

        Raises
        ------
        OptionError
            If another training run has locked the folder, or it is not writable.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.path / _LOCK, blocking=False))
            except OSError as error:
                taken = isinstance(error, Timeout)
                problem = (
                    "is in use by another training run"
                    if taken
                    else f"cannot be written to ({error.strerror or error})"
                )
                wait = "wait for that run to finish, or " if taken else ""
                raise OptionError(f"{problem}; {wait}choose another folder.", checkpoint_dir=str(self.path)) from error
            for name in {part.name.split(".")[1] for part in self.path.glob(".*.saving")}:
                if _OUTPUT.fullmatch(name):
                    remove_working(self.path, f".{name}")  # of killed processes
            yield
