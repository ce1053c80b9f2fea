import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from eqx_ppo import envs


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
@pytest.mark.parametrize("name", ["Go1JoystickFlatTerrain", "PandaPickCube"])
def test_robots_without_models_are_refused(no_models, name):
    with pytest.raises(RuntimeError, match=rf"`{name}` needs robot models.*CartpoleBalance"):
        envs.load_playground(name)


@pytest.mark.playground
def test_robots_with_models_are_loaded(playground, monkeypatch, tmp_path):
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path)
    monkeypatch.setattr(playground.registry, "load", lambda name, config_overrides: envs.Pendulum())
    assert isinstance(envs.load_playground("Go1JoystickFlatTerrain"), envs.Pendulum)
    assert set(envs.playground_names()) == set(playground.registry.ALL_ENVS)


@pytest.mark.playground
def test_names(no_models, playground):
    names = envs.playground_names()
    assert len(names) == len(set(names)) == 25
    assert {"CartpoleBalance", "CheetahRun", "HumanoidRun"} <= set(names)
    assert not any(name.startswith(("Go1", "Panda")) for name in names)
    assert len(playground.registry.ALL_ENVS) == 54
