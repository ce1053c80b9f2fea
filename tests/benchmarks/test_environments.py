"""Every environment is checked and trained by the script; here the cheapest of Playground."""

import sys

import jax.numpy as jnp
import pytest

from benchmarks import environments
from benchmarks.environments import Row, all_finite, examine
from tests.helpers.broken_envs import SumsRewards

CHEAPEST = (
    "CartpoleBalance",
    "CartpoleSwingupSparse",
    "PendulumSwingup",
    "AcrobotSwingup",
    "PointMass",
)


@pytest.mark.playground
@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAPEST)
def test_it_passes_the_check_and_trains(name):
    row = Row(name)
    examine(row)
    assert row.check.startswith("passes")
    assert row.trains == "yes"
    assert float(row.speed.replace(",", "")) > 0


def test_a_finding_is_told_and_a_failure_fails(monkeypatch, capsys):
    def load(name):
        if name == "Missing":
            raise ValueError("`Missing` is no environment.\nReally.")
        return SumsRewards()

    monkeypatch.setattr(environments.ep, "load_playground", load)
    monkeypatch.setattr(sys, "argv", ["environments", "Walk", "Missing"])
    assert environments.main() == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    cells = dict(zip(environments._HEADER, map(str.strip, first.split(" | ")), strict=True))
    assert cells["environment"] == "Walk"
    assert cells["check"].startswith(
        "[reward and done] env.env, next_state.reward: `step` must not"
    )
    assert cells["trains"] == "yes"
    assert second.endswith("| ValueError: `Missing` is no environment.")


def test_numbers_that_are_not_finite_are_seen():
    assert all_finite(({"loss": jnp.zeros(3)}, [jnp.ones(2, jnp.int32)]))
    assert not all_finite(({"loss": jnp.array([0.0, jnp.nan])}, []))
