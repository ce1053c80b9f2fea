"""What of a traced function depends on what."""

from jax.extend import core


def sources(closed: core.ClosedJaxpr) -> list[set[int]]:
    """For each output of a traced function, the positions of the inputs that it depends on.

    An inner function counts as one operation, whose every output depends on all its inputs.
    """
    known = {variable: {index} for index, variable in enumerate(closed.jaxpr.invars)}

    def of(atom):
        return set() if isinstance(atom, core.Literal) else known.get(atom, set())

    for equation in closed.jaxpr.eqns:
        found = set().union(*map(of, equation.invars))
        known.update(dict.fromkeys(equation.outvars, found))
    return [of(atom) for atom in closed.jaxpr.outvars]


def without_dead_code(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same function without the operations that no output depends on."""
    needed = set(_variables(closed.jaxpr.outvars))
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(_variables(equation.invars))
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=kept[::-1]))


def _variables(atoms: list[core.Var | core.Literal]) -> list[core.Var]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]
