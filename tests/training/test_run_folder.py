import hashlib
import json
import os
import shutil

import numpy as np
import pytest
import torch

from scforge.errors import MissingFileError, ModelFileError, OptionError, ScforgeWarning, TrainingError
from scforge.testing import raises
from scforge.training.run_folder import RunFolder, pack, read_state, unpack, write_state

STATE = {
    **{"format": 1, "settings": {}, "epoch": 2, "step": 7, "total_steps": None, "finished": None, "schedules": []},
    **{"optimizer": {"state": {0: {"exp_avg": torch.arange(3.0)}}}, "precision": {}, "means": [{}], "callbacks": {}},
    **{"data": {}, "random": [{}]},
}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    for step in (1, 2, 10):
        place = run.path / f"step={step:08d}"
        place.mkdir(parents=True)
        write_state(place, {**STATE, "step": step})
        (place / "config.json").write_text('{"scforge_version": "1", "sha256": {}}')
    return run


def test_the_last_states_are_kept_and_found(folder):
    folder.keep_last(2)
    assert [path.name for path in folder.states()] == ["step=00000002", "step=00000010"]
    path, state, _ = folder.latest()
    assert path.name == "step=00000010"
    assert state["step"] == 10
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], torch.arange(3.0))

    def check(path) -> None:
        if path.name.endswith("10"):
            raise ModelFileError("its weights are damaged.")

    # The model of a state is looked at, too.
    with pytest.warns(ScforgeWarning, match="its weights are damaged"):
        assert folder.latest(check)[0].name == "step=00000002"
    for path in folder.states():
        (path / "training" / "state.json").write_text("{")
    with pytest.warns(ScforgeWarning), raises(ModelFileError, "checkpoint_dir"):
        folder.latest()


def cut(place):
    (place / "state.safetensors").write_bytes((place / "state.safetensors").read_bytes()[:-4])


def change(place):
    content = json.loads((place / "state.json").read_text())
    content["state"]["step"] = 3
    (place / "state.json").write_text(json.dumps(content))


def rewrite(place):
    shutil.rmtree(place)
    write_state(place.parent, {**STATE, "format": 99})


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (cut, ModelFileError),
        (change, ModelFileError),
        (lambda place: (place / "state.json").unlink(), MissingFileError),
        (rewrite, TrainingError),
    ],
)
def test_damage_is_told(folder, damage, error):
    last = folder.states()[-1]
    damage(last / "training")
    with pytest.raises(
        error, match="resume training with the version that saved the checkpoint" if error is TrainingError else None
    ):
        read_state(last)
    if error is not TrainingError:
        with pytest.warns(ScforgeWarning, match="Training resumes from the previous checkpoint"):
            assert folder.latest()[0].name == "step=00000002"


DEEP = b"[" * 50_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "is not a JSON file"),
        (b"[]", "is not a training checkpoint"),
        (b"\xff\xfe", "is not a JSON file"),
        (None, "is not a training checkpoint"),
        ({"x": {"__tensor__": ["a"]}}, "is not a training checkpoint"),
        ({}, "is not a training checkpoint"),
    ],
)
def test_hostile_states(content, message, folder):
    """Some with the right checksums."""
    place = folder.states()[-1] / "training"
    if not isinstance(content, bytes):
        sums = json.loads((place / "state.json").read_text())["sha256"]
        sums["state"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        content = json.dumps({"sha256": sums, "state": content}).encode()
    (place / "state.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_state(place.parent)
    assert "\n" not in str(caught.value)


def test_what_a_killed_process_left_is_removed(folder):
    for name in (".step=00000011.0123abcd.saving", ".epoch=03.0123abcd.saving", ".final.0123abcd.saving"):
        (folder.path / name / "part").mkdir(parents=True)
    (folder.path / "epoch=01").mkdir()
    with folder.locked():
        names = sorted(path.name for path in folder.path.iterdir() if path.name != ".lock")
        with raises(OptionError, "checkpoint_dir"), folder.locked():
            pass
    assert names == ["epoch=01", "step=00000001", "step=00000002", "step=00000010"]
    with folder.locked():
        pass


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(OptionError, match="cannot be written to"), RunFolder(tmp_path / "run").locked():
        pass


def test_what_goes_in_comes_out():
    whole = torch.arange(6.0)
    state = {
        "plain": [3, 0.1 + 0.2, float("inf"), None, "text", (1, (2.5,))],
        "nested": {0: {"exp_avg": whole}, "shared": whole[2:]},
        "numpy": (np.arange(4, dtype=np.uint32), np.float64(1 / 3), np.int64(7)),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
    }
    plain, tensors = pack(state, where="state")
    assert len({value.data_ptr() for value in tensors.values()}) == len(tensors), "no two share memory"
    found = unpack(json.loads(json.dumps(plain)), tensors)
    assert list(found) == list(state)
    assert found["plain"] == state["plain"]
    assert torch.equal(found["nested"][0]["exp_avg"], whole)
    assert torch.equal(found["nested"]["shared"], whole[2:])
    assert found["numpy"][0].tolist() == [0, 1, 2, 3]
    assert found["numpy"][1:] == (1 / 3, 7)
    assert found["scalar"].dtype == torch.int64
    assert (found["a.b"], found["a"]["b"]) == (1.0, 2.0)
    for odd in (object(), {1.5: 2}, {"a": {1, 2}}):
        with pytest.raises(TrainingError, match=r"^state"):
            pack({"odd": odd} if not isinstance(odd, dict) else odd, where="state")
