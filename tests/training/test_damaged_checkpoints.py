"""Checkpoints that are not what was written, and that reading one never runs code."""

import ast
import builtins
import os
import pickle
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from eqx_ppo.networks import Dense
from eqx_ppo.training import Checkpointer, CheckpointError, DamagedCheckpointError, restore_network
from tests.training.saving import bits, state_of

ROOT = Path(__file__).parents[2]


def state(seed):
    """Two states of one structure, whose numbers do not compress."""
    noise = jax.random.bits(jax.random.key(seed), (300,))
    return state_of(Dense(2, 3, key=jax.random.key(seed)), {"noise": noise}, steps=seed, seed=seed)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of 1 and 2 steps."""
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    checkpointer = Checkpointer(folder, asynchronous=False)
    for steps in (1, 2):
        checkpointer.save(state(steps), steps)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def files_of(folder, step):
    return sorted(path for path in (folder / str(step)).rglob("*") if path.is_file())


def truncate(content):
    return content[: len(content) // 2]


def empty(content):
    return b""


def flip_a_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


def replace_by_text(content):
    return b"These are my notes on pendulums.\n"


def replace_by_zeros(content):
    return bytes(len(content))


DAMAGES = (truncate, empty, flip_a_bit, replace_by_text, replace_by_zeros)


@pytest.mark.filterwarnings("ignore:The checkpoint .* is damaged, or is none")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_no_damage_gives_wrong_numbers(folder, damage):
    """File by file: the checkpoint is right to the last bit, or refused and the older one taken."""
    refused = []
    for path in files_of(folder, 2):
        content = path.read_bytes()
        path.write_bytes(damage(content))
        expected = bits(state(2))
        try:
            assert bits(Checkpointer(folder).restore(state(9), step=2)) == expected
        except DamagedCheckpointError:
            refused.append(path.relative_to(folder / "2"))
            expected = bits(state(1))
        assert bits(Checkpointer(folder).restore(state(9))) == expected
        path.write_bytes(content)
    names = {path.name for path in refused}
    assert names == {"metadata.json", "network.bin", "rest.bin"}  # the others are not read


def test_the_newest_sound_one_is_taken_and_said(folder):
    (folder / "2" / "checkpoint" / "metadata.json").write_text("")
    checkpointer = Checkpointer(folder)
    with pytest.warns(UserWarning, match=r"checkpoints/2` is damaged.* of 1 steps") as caught:
        restored = checkpointer.restore(state(9))
    assert len(caught) == 1
    assert "`metadata.json` is not JSON" in str(caught[0].message)
    assert bits(restored) == bits(state(1))
    with pytest.warns(UserWarning, match="is damaged"):
        assert checkpointer.metadata().steps == 1
    with pytest.warns(UserWarning, match="is damaged"):
        restore_network(folder, Dense(2, 3, key=jax.random.key(0)))
    with pytest.raises(DamagedCheckpointError, match="checkpoints/2` is damaged, or is none"):
        checkpointer.restore(state(9), step=2)


def test_metadata_is_that_of_what_is_restored(folder):
    """Also where only the arrays are damaged, of which the network needs but one file."""
    damaged = folder / "2" / "checkpoint" / "network.bin"
    damaged.write_bytes(flip_a_bit(damaged.read_bytes()))
    checkpointer, dense = Checkpointer(folder), Dense(2, 3, key=jax.random.key(0))
    with pytest.warns(UserWarning, match="`network.kernel` have changed|`network.bias` have"):
        assert checkpointer.metadata().steps == 1
    with pytest.warns(UserWarning, match="have changed"):
        network, metadata = checkpointer.network_and_metadata(dense)
    assert metadata.steps == 1
    np.testing.assert_array_equal(network.kernel, state(1).network.kernel)
    assert checkpointer.metadata(2).steps == 2
    shutil.copyfile(folder / "1" / "checkpoint" / "network.bin", damaged.with_name("rest.bin"))
    damaged.write_bytes(flip_a_bit(damaged.read_bytes()))
    assert checkpointer.network_and_metadata(dense)[1].steps == 2
    with pytest.warns(UserWarning, match="its arrays should take"):
        assert checkpointer.metadata().steps == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"digest": "", "checkpoint": NaN}',
        f'{{"digest": "", "checkpoint": {"[" * 900 + "]" * 900}}}',
    ],
    ids=["nested", "NaN", "nested and whole"],
)
def test_strange_json_is_damage(folder, text):
    (folder / "2" / "checkpoint" / "metadata.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match="checkpoints/2` is damaged, or is none"):
        Checkpointer(folder).metadata(2)


def test_none_is_sound(folder):
    for step in (1, 2):
        (folder / str(step) / "checkpoint" / "rest.bin").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"no sound checkpoint.*/2`.*/1`"):
        Checkpointer(folder).restore(state(9))


def test_bytes_that_have_changed_are_named(folder):
    """The digest says which array; the network can still be restored."""
    path = folder / "2" / "checkpoint" / "rest.bin"
    noise, content = state(2).optimizer_state["noise"], path.read_bytes()
    path.write_bytes(flip_a_bit(content[: noise.nbytes]) + content[noise.nbytes :])
    checkpointer = Checkpointer(folder)
    with pytest.raises(DamagedCheckpointError, match=r"`optimizer_state\['noise'\]` have changed"):
        checkpointer.restore(state(9), step=2)
    network = restore_network(folder, Dense(2, 3, key=jax.random.key(0)), step=2)
    np.testing.assert_array_equal(network.kernel, state(2).network.kernel)
    path.write_bytes(content + b"\0")
    with pytest.raises(
        DamagedCheckpointError, match=r"its arrays should take \d+ bytes, but there"
    ):
        checkpointer.restore(state(9), step=2)
    path.write_bytes(content)
    assert bits(checkpointer.restore(state(9))) == bits(state(2))


def test_unfinished_saves_are_not_checkpoints(folder):
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    (folder / "notes.txt").write_text("mine")
    checkpointer = Checkpointer(folder)
    assert checkpointer.steps() == [1, 2]
    checkpointer.save(state(3), 3)
    checkpointer.close()
    assert checkpointer.steps() == [1, 2, 3]
    assert not (folder / "3.orbax-checkpoint-tmp").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_folders_of_others_are_not_checkpoints(tmp_path):
    """Numbered like a checkpoint, with files of any kind in it."""
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "network.eqx").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(DamagedCheckpointError, match="is damaged, or is none"):
        restore_network(tmp_path, Dense(2, 3, key=jax.random.key(0)))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="There is no folder"):
        restore_network(tmp_path / "file", Dense(2, 3, key=jax.random.key(0)))


def test_a_later_format_says_so(folder, monkeypatch):
    from eqx_ppo.training._checkpoint import _metadata

    monkeypatch.setattr(_metadata, "_FORMAT", 2)
    checkpointer = Checkpointer(folder, asynchronous=False)
    checkpointer.save(state(3), 3)
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match=r"has format 2, which this version .* reads format 1"
    ):
        checkpointer.restore(state(9))


# --- No code --------------------------------------------------------------------------------

FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "runpy"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def test_nothing_in_the_library_could_load_code():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
            elif isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", f"{path}:{node.value.lineno}"
            found = {name.split(".")[0] for name in names} & FORBIDDEN
            assert not found, f"{path} imports {found}"


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (builtins.open, (str(self.path), "w"))


@pytest.mark.filterwarnings("ignore:The checkpoint .* is damaged, or is none")
def test_no_code_of_a_file_is_run(folder, tmp_path, monkeypatch):
    """Every file becomes a pickle with a trap; and nothing unpickles anything at all."""
    sprung = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(sprung))).close()
    assert sprung.exists()  # the trap works
    os.remove(sprung)

    def refuse(*args, **kwargs):
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert bits(Checkpointer(folder).restore(state(9))) == bits(state(2))
    for path in files_of(folder, 2):
        path.write_bytes(pickle.dumps(Trap(sprung)))
        assert bits(Checkpointer(folder).restore(state(9))) in (bits(state(1)), bits(state(2)))
    with pytest.raises(DamagedCheckpointError):
        Checkpointer(folder).restore(state(9), step=2)
    assert not sprung.exists()
