import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from eqx_ppo import envs
from eqx_ppo.envs._robot_models import robots_of


def test_a_missing_playground_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    for call in (lambda: envs.load_playground("CartpoleBalance"), envs.playground_names):
        with pytest.raises(ImportError, match=r'pip install "eqx-ppo\[playground\]"'):
            call()


def test_envs_does_not_import_playground():
    code = "import sys, eqx_ppo.envs; print([m for m in sys.modules if m.startswith('mujoco')])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.fixture
def playground():
    return pytest.importorskip("mujoco_playground")


@pytest.fixture
def no_models(playground, monkeypatch, tmp_path):
    """No robot models, and nothing that could fetch them."""
    from mujoco_playground._src import mjx_env

    def refuse(*args, **kwargs):
        raise AssertionError("tried to download")

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "missing")
    monkeypatch.setenv("MENAGERIE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MENAGERIE_ROOT", raising=False)
    monkeypatch.setattr(mjx_env, "_clone_with_progress", refuse)


@pytest.mark.playground
def test_load_and_step(no_models):
    env = envs.EpisodeWrapper(envs.load_playground("CartpoleBalance"), 2)
    assert isinstance(env, envs.Env)
    assert (env.observation_size, env.action_size) == (5, 1)
    state = jax.jit(env.reset)(jax.random.key(0))
    assert isinstance(state, envs.EnvState)
    step, ends = jax.jit(env.step), []
    for _ in range(2):
        state = step(state, jnp.array([0.5]))
        ends.append([bool(flag) for flag in envs.episode_end(state)])
    assert ends == [[False, False], [False, True]]
    assert state.done.dtype == jnp.float32
    assert 0.0 < float(state.reward) <= 1.0  # the pole is still nearly upright
    assert float(state.obs[0]) > 0.0  # the cart was pushed from rest, near the middle


@pytest.mark.playground
def test_overrides(no_models):
    env = envs.load_playground("CartpoleBalance", config_overrides={"ctrl_dt": 0.02})
    assert env.dt == 0.02
    assert env.mjx_model.impl.value == "jax"


@pytest.mark.playground
def test_the_users_implementation_wins(playground, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        playground.registry,
        "load",
        lambda name, config_overrides: seen.update(config_overrides) or envs.Pendulum(),
    )
    overrides = {"impl": "warp", "ctrl_dt": 0.02}
    envs.load_playground("CartpoleBalance", config_overrides=overrides)
    assert seen == overrides
    seen.clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    envs.load_playground("CartpoleBalance")
    assert seen == {}


@pytest.mark.playground
def test_unknown_name(no_models):
    with pytest.raises(ValueError, match=r"`CartpoleBallance`.*Close matches: CartpoleBalance"):
        envs.load_playground("CartpoleBallance")
    with pytest.raises(ValueError, match=r"`Xyzzy` is not an environment.*playground_names"):
        envs.load_playground("Xyzzy")


@pytest.mark.playground
@pytest.mark.parametrize(
    ("name", "robots"),
    [
        ("Go1JoystickFlatTerrain", "unitree_go1"),
        ("PandaPickCube", "franka_emika_panda"),
        ("PandaRobotiqPushCube", "franka_emika_panda robotiq_2f85_v4"),
    ],
)
def test_robots_without_models_are_refused(no_models, name, robots):
    message = rf"`{name}` needs robot models.*prefetch {robots}`.*CartpoleBalance"
    with pytest.raises(RuntimeError, match=message):
        envs.load_playground(name)


@pytest.fixture
def read_from(no_models, playground, monkeypatch):
    """Loads nothing; tells in which folder Playground would have looked for a robot."""
    from mujoco_playground._src import mjx_env

    def folder(name, robot, **options):
        looked = []

        def load(name, config_overrides):
            assert mjx_env.MENAGERIE_PATH.exists()  # or Playground would clone it
            looked.append(str(mjx_env.MENAGERIE_PATH / robot))
            return envs.Pendulum()

        before = mjx_env.MENAGERIE_PATH
        monkeypatch.setattr(playground.registry, "load", load)
        envs.load_playground(name, **options)
        assert mjx_env.MENAGERIE_PATH is before
        return looked[0]

    return folder


def robot_names(names):
    return {name for name in names if name.startswith(("Go1", "Panda", "Aloha", "Spot"))}


GO1 = {
    "Go1Footstand",
    "Go1Getup",
    "Go1Handstand",
    "Go1JoystickFlatTerrain",
    "Go1JoystickRoughTerrain",
}


@pytest.mark.playground
def test_robots_from_a_folder(read_from, tmp_path):
    (tmp_path / "mine" / "unitree_go1").mkdir(parents=True)
    for models in (tmp_path / "mine", str(tmp_path / "mine")):
        assert robot_names(envs.playground_names(models=models)) == GO1
        found = read_from("Go1Getup", "unitree_go1", models=models)
        assert found == str(tmp_path / "mine" / "unitree_go1")
    with pytest.raises(RuntimeError, match="boston_dynamics_spot"):
        envs.load_playground("SpotGetup", models=tmp_path / "mine")


@pytest.mark.playground
def test_robots_from_where_playground_keeps_them(read_from, monkeypatch, tmp_path):
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path)
    (tmp_path / "unitree_go1").mkdir()
    assert robot_names(envs.playground_names()) == GO1
    assert read_from("Go1Getup", "unitree_go1") == str(tmp_path / "unitree_go1")


@pytest.mark.playground
def test_robots_that_the_package_has_fetched(read_from, monkeypatch, tmp_path):
    menagerie = pytest.importorskip("mujoco_menagerie")
    for robot in ("franka_emika_panda", "robotiq_2f85_v4"):
        folder = menagerie.Cache().model_path(menagerie.get(robot))
        folder.mkdir(parents=True)
        assert "PandaRobotiqPushCube" not in envs.playground_names()
        (folder / ".complete").write_text("{}")
    pandas = {name for name in envs.playground_names() if name.startswith("Panda")}
    assert robot_names(envs.playground_names()) == pandas
    assert "PandaRobotiqPushCube" in pandas
    assert read_from("PandaRobotiqPushCube", "robotiq_2f85_v4") == str(folder)
    assert str(folder).startswith(str(tmp_path / "cache"))
    (tmp_path / "checkout" / "unitree_go1").mkdir(parents=True)
    monkeypatch.setenv("MENAGERIE_ROOT", str(tmp_path / "checkout"))
    assert robot_names(envs.playground_names()) == GO1


@pytest.mark.playground
def test_every_robot_is_known(playground, monkeypatch):
    """Which folders Playground reads, for each of its environments that have a robot."""
    from etils import epath
    from mujoco_playground._src import mjx_env

    class Folders(dict):
        def exists(self):
            return True

        def __truediv__(self, robot):
            return self.setdefault(robot, epath.Path("/nowhere") / robot)

    registry = playground.registry
    names = set(registry.ALL_ENVS) - set(playground.dm_control_suite.ALL_ENVS)
    for name in names:
        read = Folders()
        monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", read)
        with pytest.raises(ValueError, match="Error opening file"):
            registry.load(name)
        assert set(robots_of(name)) == read.keys()
    assert len(names) == 29


@pytest.mark.playground
def test_an_environment_that_was_added_needs_a_whole_checkout(read_from, playground, monkeypatch):
    registry = playground.registry
    monkeypatch.setattr(registry, "ALL_ENVS", (*registry.ALL_ENVS, "MyRobot"))
    with pytest.raises(RuntimeError, match="`MyRobot` needs robot models"):
        envs.load_playground("MyRobot")


@pytest.mark.playground
def test_names(no_models, playground):
    names = envs.playground_names()
    assert len(names) == len(set(names)) == 25
    assert {"CartpoleBalance", "CheetahRun", "HumanoidRun"} <= set(names)
    assert not any(name.startswith(("Go1", "Panda")) for name in names)
    assert len(playground.registry.ALL_ENVS) == 54
