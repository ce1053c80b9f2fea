"""Training states that cost nothing to make, for tests of what is saved of them."""

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo.algorithms import TrainingState, split_network
from eqx_ppo.algorithms._training_state import Counts
from eqx_ppo.algorithms._transition import RolloutState
from eqx_ppo.envs._batched import EnvSpec
from eqx_ppo.networks import Dense, Sequential
from eqx_ppo.ops import new_counter
from tests.helpers.trees import as_numpy

_NO_ENV = EnvSpec(jax.tree.structure(()), (), ())


def state_of(network=None, optimizer_state=(), env_state=(), steps=0, seed=0):
    """A state of parts that need not fit each other."""
    network = Sequential([Dense(2, 3, key=jax.random.key(0))]) if network is None else network
    arrays, remainder = split_network(network)
    return TrainingState(
        arrays=arrays,
        optimizer_state=optimizer_state,
        rollout_state=RolloutState(
            env_state, (), (), fresh=jnp.ones(2, jnp.bool_), begun=jnp.array(True)
        ),
        key=jax.random.key(seed),
        counts=Counts(*(new_counter(steps) for _ in Counts._fields)),
        remainder=remainder,
        env_spec=_NO_ENV,
    )


def bits(tree):
    """The bytes of every leaf, with its dtype and shape."""
    leaves = [(leaf.dtype, as_numpy(leaf)) for leaf in jax.tree.leaves(tree)]
    return [
        (str(dtype), leaf.shape, np.ascontiguousarray(leaf).tobytes()) for dtype, leaf in leaves
    ]
