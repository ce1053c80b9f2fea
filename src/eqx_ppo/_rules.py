"""The rules of a contract: what one of them is, and how all of them are tested in turn."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from eqx_ppo._report import Finding

_Trial = TypeVar("_Trial")


class Fault(NamedTuple):
    """A leaf that breaks a rule, and how."""

    leaf: str
    message: str


Faults: TypeAlias = Iterator[Fault]


class Rule(NamedTuple, Generic[_Trial]):
    """A rule of a contract.

    - `test`: yields what is wrong in a trial.
    - `needs`: rules that must hold for the test to mean anything.
    """

    test: Callable[[_Trial], Faults]
    needs: tuple[str, ...] = ()


def apply_rules(
    rules: Mapping[str, Rule[_Trial]],
    trial: _Trial,
    path: str,
    blame: Callable[[str, Exception], Finding],
    allowed: Collection[str] = (),
) -> list[Finding]:
    """The findings of every rule that can be tested; one that fails to run is broken too.

    **Arguments:**

    - `rules`: in the order in which they are tested.
    - `trial`: what they are tested on.
    - `path`: where that is, for the findings.
    - `blame`: the finding for a rule whose test raised an error.
    - `allowed`: rules that others are tested without.
    """
    findings: list[Finding] = []
    untested: set[str] = set()
    for name, rule in rules.items():
        broken = (untested | {finding.rule for finding in findings}) - set(allowed)
        if broken & {name, *rule.needs}:
            untested.add(name)
            continue
        try:
            findings += [Finding(name, path, *fault) for fault in rule.test(trial)]
        except Exception as error:
            findings.append(blame(name, error))
            untested.add(name)
    return findings
