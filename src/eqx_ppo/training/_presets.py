"""Published settings for the environments of MuJoCo Playground, by name.

The numbers are those that Playground 0.2 publishes for PPO in brax, in the terms of this
library. A training step of brax collects `batch_size * num_minibatches / num_envs` unrolls of
`unroll_length` steps from each environment; an unroll is a segment of the rollout here. brax
counts steps of the environment, this library counts actions, so that an action repeat divides
the lengths of a run and of an episode.
"""

import difflib
from dataclasses import replace

from eqx_ppo._checks import typed
from eqx_ppo.algorithms import PPOConfig
from eqx_ppo.training._preset import Preset


@typed
def load_preset(name: str) -> Preset:
    """The published settings for an environment of MuJoCo Playground.

    These are numbers alone: Playground need not be installed.

    **Arguments:**

    - `name`: of the environment, for example `"CartpoleBalance"`.

    **Returns:** the preset; see `Preset` for how to train with it.

    **Raises:** `ValueError` for an unknown name.

    **Source:** Zakka et al., "MuJoCo Playground" (2025), as of version 0.2 of the package.

    ```python
    >>> from eqx_ppo.training import load_preset
    >>> preset = load_preset("CartpoleBalance")
    >>> preset.ppo.n_envs, preset.ppo.rollout_length, preset.ppo.n_segments
    (2048, 480, 16)

    ```
    """
    if name not in _PRESETS:
        close = difflib.get_close_matches(name, _PRESETS, n=5)
        hint = f"Close matches: {', '.join(close)}. " if close else ""
        raise ValueError(
            f"There is no preset `{name}`. {hint}`preset_names()` lists those that there are."
        )
    return replace(_PRESETS[name], name=name, env_name=name)


def preset_names() -> tuple[str, ...]:
    """The names of all presets, which are the environments of MuJoCo Playground 0.2."""
    return tuple(_PRESETS)


_DEEP = (256, 256, 256, 256, 256)

_DM_CONTROL = Preset(
    name="DM Control suite",
    env_name="",
    needs_models=False,
    ppo=PPOConfig(
        total_steps=60_000_000,
        n_envs=2048,
        rollout_length=16 * 30,
        segment_length=30,
        n_minibatches=32,
        n_epochs=16,
        discounting_factor=0.995,
        learning_rate=1e-3,
        # As brax has it unless told otherwise. Its value loss is half of half the squared
        # error, and is computed in each minibatch with the current critic.
        gae_lambda=0.95,
        clip_range=0.3,
        critic_loss_weight=0.5,
        advantages="minibatch",
        truncation="mask",
    ),
    entropy_weight=1e-2,
    actor_hidden_sizes=(32, 32, 32, 32),
    critic_hidden_sizes=_DEEP,
    reward_scale=10.0,
)

_LOCOMOTION = replace(
    _DM_CONTROL,
    name="locomotion",
    needs_models=True,
    actor_hidden_sizes=(128, 128, 128, 128),
    reward_scale=1.0,
).with_ppo(
    total_steps=100_000_000,
    n_envs=8192,
    rollout_length=20,
    segment_length=20,
    n_epochs=4,
    discounting_factor=0.97,
    learning_rate=3e-4,
    gradient_clipping=1.0,
)

_GO1 = replace(
    _LOCOMOTION,
    name="quadrupeds",
    actor_hidden_sizes=(512, 256, 128),
    critic_hidden_sizes=(512, 256, 128),
    critic_obs_key="privileged_state",
)
_BERKELEY = replace(_GO1, name="humanoids", entropy_weight=5e-3, n_evals=14).with_ppo(
    clip_range=0.2, total_steps=150_000_000
)
_HUMANOID = replace(_BERKELEY, n_evals=19).with_ppo(total_steps=200_000_000)

_PANDA = replace(
    _LOCOMOTION,
    name="manipulation",
    actor_hidden_sizes=(32, 32, 32, 32),
    max_len=150,
    entropy_weight=2e-2,
    n_evals=3,
).with_ppo(
    total_steps=20_000_000,
    n_envs=2048,
    rollout_length=8 * 10,
    segment_length=10,
    n_epochs=8,
    learning_rate=1e-3,
    gradient_clipping=None,
)
_HAND = replace(_GO1, name="dexterous hands", max_len=500).with_ppo(
    rollout_length=40, segment_length=40, gradient_clipping=None
)

_PRESETS = {
    # DM Control suite
    "AcrobotSwingup": _DM_CONTROL.with_ppo(total_steps=100_000_000),
    "AcrobotSwingupSparse": _DM_CONTROL.with_ppo(total_steps=100_000_000),
    "BallInCup": _DM_CONTROL.with_ppo(discounting_factor=0.95),
    "CartpoleBalance": _DM_CONTROL,
    "CartpoleBalanceSparse": _DM_CONTROL,
    "CartpoleSwingup": _DM_CONTROL,
    "CartpoleSwingupSparse": _DM_CONTROL,
    "CheetahRun": _DM_CONTROL,
    "FingerSpin": _DM_CONTROL.with_ppo(discounting_factor=0.95),
    "FingerTurnEasy": _DM_CONTROL,
    "FingerTurnHard": _DM_CONTROL,
    "FishSwim": _DM_CONTROL,
    "HopperHop": _DM_CONTROL,
    "HopperStand": _DM_CONTROL,
    "HumanoidStand": _DM_CONTROL,
    "HumanoidWalk": _DM_CONTROL,
    "HumanoidRun": _DM_CONTROL,
    # Playground 0.2 has this entry under a misspelled name, where it takes no effect.
    "PendulumSwingup": replace(_DM_CONTROL, action_repeat=4, max_len=1000 // 4).with_ppo(
        total_steps=60_000_000 // 4, n_epochs=4
    ),
    "PointMass": _DM_CONTROL,
    "ReacherEasy": _DM_CONTROL,
    "ReacherHard": _DM_CONTROL,
    "SwimmerSwimmer6": _DM_CONTROL.with_ppo(total_steps=100_000_000),
    "WalkerRun": _DM_CONTROL.with_ppo(total_steps=100_000_000),
    "WalkerStand": _DM_CONTROL,
    "WalkerWalk": _DM_CONTROL,
    # Locomotion
    "ApolloJoystickFlatTerrain": _HUMANOID,
    "BarkourJoystick": _LOCOMOTION,
    "BerkeleyHumanoidJoystickFlatTerrain": _BERKELEY,
    "BerkeleyHumanoidJoystickRoughTerrain": _BERKELEY,
    "G1JoystickFlatTerrain": _HUMANOID,
    "G1JoystickRoughTerrain": _HUMANOID,
    "Go1JoystickFlatTerrain": _GO1.with_ppo(total_steps=200_000_000),
    "Go1JoystickRoughTerrain": _GO1.with_ppo(total_steps=200_000_000),
    "Go1Getup": replace(_GO1, max_len=300, n_evals=4).with_ppo(total_steps=50_000_000),
    "Go1Handstand": replace(_GO1, max_len=500, n_evals=4),
    "Go1Footstand": replace(_GO1, max_len=500, n_evals=4),
    "H1InplaceGaitTracking": _LOCOMOTION,
    "H1JoystickGaitTracking": _LOCOMOTION,
    "Op3Joystick": _LOCOMOTION,
    "SpotFlatTerrainJoystick": _LOCOMOTION,
    "SpotGetup": replace(_LOCOMOTION, max_len=300),
    "SpotJoystickGaitTracking": _LOCOMOTION,
    "T1JoystickFlatTerrain": _HUMANOID,
    "T1JoystickRoughTerrain": _HUMANOID,
    # Manipulation
    "AlohaHandOver": replace(
        _PANDA, actor_hidden_sizes=(256, 256, 256), max_len=250, n_evals=24
    ).with_ppo(
        total_steps=100_000_000, rollout_length=8 * 15, segment_length=15, gradient_clipping=1.0
    ),
    "AlohaSinglePegInsertion": replace(
        _PANDA,
        actor_hidden_sizes=(256, 256, 256, 256),
        entropy_weight=1e-2,
        action_repeat=2,
        max_len=1000 // 2,
        n_evals=9,
    ).with_ppo(
        total_steps=150_000_000 // 2,
        n_envs=1024,
        rollout_length=16 * 40,
        segment_length=40,
        learning_rate=3e-4,
    ),
    "PandaPickCube": _PANDA,
    "PandaPickCubeOrientation": _PANDA,
    "PandaPickCubeCartesian": replace(
        _PANDA,
        actor_hidden_sizes=(256, 256),
        entropy_weight=7.5e-3,
        max_len=200,
        reward_scale=0.1,
        n_evals=4,
    ).with_ppo(
        total_steps=5_000_000,
        n_envs=1024,
        rollout_length=2 * 10,
        n_minibatches=8,
        learning_rate=5e-4,
        gradient_clipping=1.0,
    ),
    "PandaOpenCabinet": _PANDA.with_ppo(total_steps=40_000_000),
    "PandaRobotiqPushCube": replace(
        _PANDA,
        actor_hidden_sizes=(64, 64, 64, 64),
        entropy_weight=1e-2,
        action_repeat=4,
        max_len=3000 // 4,
        n_evals=9,
        n_eval_envs=32,
    ).with_ppo(
        total_steps=1_800_000_000 // 4,
        n_envs=8192,
        rollout_length=2 * 100,
        segment_length=100,
        discounting_factor=0.994,
        learning_rate=6e-4,
    ),
    "LeapCubeReorient": replace(_HAND, max_len=1000, n_evals=19).with_ppo(
        total_steps=200_000_000, discounting_factor=0.99
    ),
    "LeapCubeRotateZAxis": _HAND,
    "AeroCubeRotateZAxis": _HAND.with_ppo(total_steps=300_000_000),
}
