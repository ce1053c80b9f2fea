"""ONNX models of a policy act as it does, and what ONNX cannot say is refused by name."""

import importlib.util
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import make_policy
from eqx_ppo.networks import (
    GRU,
    BetaSampler,
    CategoricalSampler,
    Lift,
    RandomModule,
    Sequential,
    StatefulModuleOutput,
    advance,
    draw_keys,
    make_mlp_actor_critic,
    make_recurrent_actor_critic,
)
from eqx_ppo.training import export_onnx
from tests.helpers.networks import DICT, dict_heads, heads
from tests.training.test_export import OBS, CallsBack, build

needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("jax2onnx") is None, reason="needs the extra `onnx`"
)
N_ENVS, LENGTH = 3, 40

NETWORKS = {
    "mlp": lambda key: build("mlp"),
    "lstm": lambda key: build("lstm"),
    "graph": lambda key: build("graph"),
    "gru": lambda key: Sequential(
        [make_recurrent_actor_critic(3, 1, 6, cell=GRU, key=key, normalize_obs=False)]
    ),
    "categorical": lambda key: make_mlp_actor_critic(
        3, 1, [8], [8], key=key, sampler=CategoricalSampler(4, entropy_weight=0.0)
    ),
    "beta": lambda key: make_mlp_actor_critic(
        3, 2, [8], [8], key=key, sampler=BetaSampler(entropy_weight=0.0)
    ),
}


class Models:
    """The models of a folder, by what `policy.json` says of them."""

    def __init__(self, folder):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.description = json.loads((folder / "policy.json").read_text())
        self.names = {path.name for path in folder.iterdir()}
        self.sessions = {
            name: onnxruntime.InferenceSession(folder / f"{name}.onnx", options)
            for name in self.description["models"]
        }

    def __call__(self, name, *arrays):
        model = self.description["models"][name]
        inputs = dict(zip(model["inputs"], arrays, strict=True))
        return self.sessions[name].run(model["outputs"], inputs)


@needs_converter
@pytest.mark.parametrize("batch_size", [N_ENVS, None])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_models_act_as_the_policy(name, batch_size, getkey, tmp_path):
    policy = make_policy(NETWORKS[name](getkey()))
    export_onnx(policy, tmp_path / "policy", OBS, batch_size=batch_size)
    models = Models(tmp_path / "policy")
    has_carry = bool(models.description["carry"])
    assert has_carry is (name in ("lstm", "graph", "gru"))
    expected_files = {"init.onnx", "act.onnx", "reset.onnx"} if has_carry else {"act.onnx"}
    assert models.names == {"policy.json", *expected_files}

    rng = np.random.default_rng(0)
    rows = () if batch_size is None else (N_ENVS,)
    observations = rng.normal(size=(LENGTH, *rows, 3)).astype(np.float32)
    dones = rng.random((LENGTH, *rows)) < 0.1
    act, reset = eqx.filter_jit(policy.act), eqx.filter_jit(policy.reset)
    ours = policy.init(getkey(), batch_size)
    carry = models("init") if has_carry else []
    seen = []
    for obs, done in zip(observations, dones, strict=True):
        action, *carry = models("act", *carry, obs)
        carry = models("reset", *carry, np.asarray(done)) if has_carry else []
        expected, ours = act(ours, obs)
        ours = reset(ours, done)
        np.testing.assert_allclose(action, expected, rtol=0.0, atol=1e-6)
        seen.append(action)
    assert np.std(np.stack(seen).astype(np.float32)) > 1e-4
    assert np.sum(dones) > 0


@needs_converter
def test_structures_are_named_and_what_is_not_read_may_stay(getkey, tmp_path):
    network = Sequential([Lift(lambda x: x["proprio"]), dict_heads(3, DICT.action_size, getkey())])
    policy = make_policy(network)
    sample = {"proprio": OBS, "clock": jax.ShapeDtypeStruct((), jnp.int32)}
    export_onnx(policy, tmp_path / "policy", sample)
    models = Models(tmp_path / "policy")
    model = models.description["models"]["act"]
    assert (model["inputs"], model["outputs"]) == (
        ["obs/clock", "obs/proprio"],
        ["action/arm", "action/leg"],
    )
    obs = {"proprio": np.ones(3, np.float32), "clock": np.array(3, np.int32)}
    arm, leg = models("act", obs["clock"], obs["proprio"])
    expected, _ = policy.act(policy.init(getkey()), obs)
    np.testing.assert_allclose(arm, expected["arm"], atol=1e-6)
    np.testing.assert_allclose(leg, expected["leg"], atol=1e-6)


@needs_converter
@pytest.mark.parametrize("name", ["mlp", "graph"])
def test_the_lines_of_the_description_run(name, tmp_path, monkeypatch):
    export_onnx(make_policy(build(name)), tmp_path / "policy", OBS)
    description = json.loads((tmp_path / "policy" / "policy.json").read_text())
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("\n".join(description["usage"]), names)
    (action,) = names["action"]
    assert action.shape == (1,)


# --- What cannot be carried -----------------------------------------------------------------


class AlwaysNoisy(RandomModule):
    def __call__(self, state, x, rollout_extras=None):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,), jnp.float32))
        return StatefulModuleOutput(x + noise(draw_keys(state)), advance(state))


@needs_converter
def test_random_numbers_are_refused_with_their_place(getkey, tmp_path):
    noisy = Sequential([AlwaysNoisy(), heads(3, 1, getkey())])
    for policy, place in (
        (make_policy(build("mlp"), deterministic=False), r"state\[2\]\['action'\]\[1\].keys"),
        (make_policy(noisy), r"state\[0\].keys"),
    ):
        with pytest.raises(ValueError, match=rf"no counterpart.*{place}.*deterministic=True"):
            export_onnx(policy, tmp_path / "policy", OBS)
    assert list(tmp_path.iterdir()) == []


@needs_converter
def test_an_unknown_operation_is_named(getkey, tmp_path):
    policy = make_policy(Sequential([CallsBack(), heads(3, 1, getkey())]))
    with pytest.raises(ValueError, match=r"`act`.*cannot be carried to ONNX.*pure_callback"):
        export_onnx(policy, tmp_path / "policy", OBS)
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'jax2onnx and onnxruntime.*"eqx-ppo\[onnx\]"'):
        export_onnx(make_policy(build("mlp")), tmp_path / "policy", OBS)
    assert list(tmp_path.iterdir()) == []
