"""The interface of a sink, and what it is told about the run."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import final

from eqx_ppo._typing import Tree


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a sink is told when a run begins.

    **Arguments:**

    - `total_steps`: environment steps at which the run will end.
    - `resumed_at`: `None` for a new run. Otherwise the environment steps that were done
        before: rows up to and including this step stay, later ones are dropped (they will
        come again), and new ones are appended.
    - `config`: the settings in readable form: nested mappings, sequences, strings, numbers,
        booleans and `None`.
    """

    total_steps: int
    resumed_at: int | None = None
    config: Mapping[str, Tree] = dataclasses.field(default_factory=dict)


class Sink(abc.ABC):
    """Where metrics go; subclass it for a place of your own.

    ```python
    class Last(Sink):
        def start(self, run):
            self.row = {}

        def write(self, metrics, steps):
            self.row = {"step": steps, **metrics}

        def close(self):
            pass


    train_ppo(env, network, config, sinks=[Last()])
    ```

    A sink sees plain Python numbers on the host and never runs inside compiled code. After
    `close` it may be started again.
    """

    @abc.abstractmethod
    def start(self, run: RunInfo) -> None:
        """Opens what is written to.

        Called before anything is compiled or trained; an error ends the run here.
        """

    @abc.abstractmethod
    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        """Takes the metrics of one iteration.

        **Arguments:**

        - `metrics`: flat, with `/` in the names; values may be NaN or infinite. Not every
            iteration has the same names: those of evaluations come only now and then.
        - `steps`: environment steps so far; never decreasing. A step comes twice where a
            continued run begins with an evaluation.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends a run that was started; called also when the run failed."""
