import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks._environments import Sizes
from benchmarks._parts import arrays_of
from benchmarks._settings import (
    CARTPOLE,
    CARTPOLE_64,
    CARTPOLE_LSTM,
    CARTPOLE_LSTM_ALONE,
    CHEETAH,
    LARGE,
    Counts,
    Plan,
    Setting,
    tiny,
)
from benchmarks.peers import able_peers, all_peers
from benchmarks.peers.ours import make_network

SETTINGS = [
    CARTPOLE,
    CARTPOLE_64,
    CARTPOLE_LSTM,
    CARTPOLE_LSTM_ALONE,
    CHEETAH,
    LARGE,
    tiny(CARTPOLE),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("peer", all_peers(), ids=lambda peer: peer.name)
def test_every_peer_does_the_same_work(peer, setting):
    assert peer.counts(setting) == setting.counts


def test_counts_by_hand():
    assert CARTPOLE.counts == Counts(env_steps=5120, gradient_steps=16, samples_per_gradient=1280)


def test_a_peer_that_cannot_run_a_setting_is_left_out_with_a_reason(capsys):
    able = able_peers(("eqx-ppo", "brax"), Setting(env="Pendulum"))
    assert [peer.name for peer in able] == ["eqx-ppo"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "skipped brax on Pendulum" in line


def test_peers_that_were_not_asked_for_are_left_out_silently(capsys):
    assert able_peers((), CARTPOLE) == []
    assert capsys.readouterr().out == ""


def test_a_peer_that_is_not_installed_is_left_out_with_a_reason(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [peer.name for peer in able_peers(Plan().peers, CARTPOLE)] == ["eqx-ppo"]
    out = capsys.readouterr().out
    assert "nnx-ppo is not installed" in out
    assert "brax is not installed" in out


def test_brax_has_no_recurrent_networks(capsys):
    assert able_peers(("brax",), CARTPOLE_LSTM) == []
    out = capsys.readouterr().out
    assert "no recurrent networks" in out or "not installed" in out


@pytest.mark.parametrize("setting", [CARTPOLE, CARTPOLE_LSTM_ALONE], ids=lambda one: one.name)
def test_an_actor_that_begins_alike_has_a_last_layer_of_full_size(setting):
    sizes = Sizes(obs=5, action=1)
    small = make_network(setting, sizes, seed=0)
    full = make_network(dataclasses.replace(setting, begin_alike=True), sizes, seed=0)
    *_, last, _ = full.modules[-1].action.modules
    assert last.kernel.shape == (64, 2)
    assert 0.9 * (3 / 64) ** 0.5 < jnp.abs(last.kernel).max() < (3 / 64) ** 0.5  # LeCun uniform
    same = jax.tree.map(lambda a, b: bool((a == b).all()), *map(arrays_of, (small, full)))
    assert same.count(False) == 1


def test_plan_chooses_environments_and_sizes():
    assert Plan().workloads(CARTPOLE, CHEETAH) == [CARTPOLE, CHEETAH]
    assert Plan(envs=("CheetahRun",)).workloads(CARTPOLE, CHEETAH) == [CHEETAH]
    assert Plan(envs=("Pendulum",)).workloads(CARTPOLE) == [
        dataclasses.replace(CARTPOLE, env="Pendulum")
    ]
    assert Plan(networks=("lstm",)).workloads(CARTPOLE, CARTPOLE_LSTM) == [CARTPOLE_LSTM]
    quick = Plan(quick=True).workloads(CHEETAH)
    assert [setting.counts.env_steps for setting in quick] == [32]
