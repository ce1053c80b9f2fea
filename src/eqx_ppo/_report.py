"""What the checkers of users' own code find, and how they say it."""

import re
from collections.abc import Sequence
from typing import NamedTuple, final


class Finding(NamedTuple):
    """One broken rule.

    - `rule`: its name, as the documentation lists it.
    - `path`: where, such as `network.layers[1]`.
    - `leaf`: the array that shows it, such as `next_state['h']`; empty where there is none.
    - `message`: what was expected, what came, and the way out.
    """

    rule: str
    path: str
    leaf: str
    message: str

    def __str__(self) -> str:
        leaf = f", {self.leaf}" if self.leaf else ""
        return f"[{self.rule}] {self.path}{leaf}: {self.message}"


@final
class ContractError(Exception):
    """A module or an environment does not keep its contract.

    - `findings`: every broken rule that was found, in the order of the report.
    """

    def __init__(self, subject: str, findings: Sequence[Finding]):
        self.subject = subject
        self.findings = tuple(findings)
        rules = "one rule" if len(findings) == 1 else f"{len(findings)} rules"
        lines = [f"{subject} breaks {rules} of its contract:"]
        lines += [f"{index}. {finding}" for index, finding in enumerate(findings, 1)]
        super().__init__("\n".join(lines))


def first_paragraph(error: Exception) -> str:
    """What an error of JAX says before its explanations."""
    return re.split(r"\n\n|\n-----|\nThe error occurred while tracing", str(error))[0].strip()
