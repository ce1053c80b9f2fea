"""The libraries that are compared, behind one protocol."""

from typing import NamedTuple, Protocol

from benchmarks._settings import Counts, Setting


class Runner(Protocol):
    """Training that has been set up, and goes on when it is told to.

    `chunk` is the number of iterations that it runs at least; the first `run` compiles.
    """

    chunk: int

    def run(self, n_iterations: int) -> None:
        """Trains for some iterations, a multiple of `chunk`, and waits for the result."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class Point(NamedTuple):
    """An evaluation during training.

    - `steps`: environment steps so far.
    - `seconds`: since training was called, compilation and evaluations included.
    - `mean_return`: over the episodes of the evaluation, acting deterministically.
    """

    steps: int
    seconds: float
    mean_return: float


class Evaluation(NamedTuple):
    """How a learning run is followed: every `every_steps`, over `n_envs` episodes."""

    every_steps: int
    n_envs: int = 64


class Peer(Protocol):
    """A library that can train on a `Setting`."""

    name: str

    def refusal(self, setting: Setting) -> str | None:
        """Why it cannot run this setting, or `None` if it can."""
        ...

    def counts(self, setting: Setting) -> Counts:
        """The work of an iteration, from the arguments that the library will get."""
        ...

    def prepare(self, setting: Setting, seed: int) -> Runner:
        """Training without evaluation and logging."""
        ...

    def learn(
        self, setting: Setting, seed: int, total_steps: int, evaluation: Evaluation
    ) -> list[Point]:
        """A whole training run, evaluated before, during and after."""
        ...


def all_peers() -> list[Peer]:
    """This library first."""
    from benchmarks.peers.brax import Brax
    from benchmarks.peers.nnx import NnxPPO
    from benchmarks.peers.ours import EqxPPO

    return [EqxPPO(), NnxPPO(), Brax()]


def able_peers(names: tuple[str, ...], setting: Setting) -> list[Peer]:
    """The peers of these names that can run the setting; says why others are left out."""
    able = []
    for peer in all_peers():
        if peer.name not in names:
            continue
        refusal = peer.refusal(setting)
        if refusal is None:
            able.append(peer)
        else:
            print(f"  skipped {peer.name} on {setting.name}: {refusal}", flush=True)
    return able
