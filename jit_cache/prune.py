"""Arguments that a traced function does not use.

A dead argument still costs at every call: it is flattened, checked and dropped again (77 parameter leaves of
which 2 are used: 18 us a call with all of them, 6 us with the 2). So a program is compiled over live ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

# Primitives that run their one inner jaxpr once, argument by argument. Loops and branches are not among
# them: there an argument may matter through a later turn, so all of theirs count as live.
_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
    }
)


def live_arguments(closed: core.ClosedJaxpr) -> list[bool]:
    """Whether each argument can reach an output or an effect.

    Liveness, backwards through the equations (Aho, Lam, Sethi, Ullman: Compilers, 2nd ed., section 9.2.5);
    an argument that is called live may still be dead, never the other way round.

    Args:
        closed: of a traced function.
    """
    return _live(closed.jaxpr, [True] * len(closed.jaxpr.outvars))


def _live(jaxpr: core.Jaxpr, outputs: Sequence[bool]) -> list[bool]:
    live = {var for var, used in zip(jaxpr.outvars, outputs, strict=True) if used and _is_var(var)}
    for eqn in reversed(jaxpr.eqns):
        wanted = [var in live for var in eqn.outvars]
        if not any(wanted) and not eqn.effects:
            continue
        inner = _inner(eqn)
        used = [True] * len(eqn.invars) if inner is None else _live(inner, wanted)
        live.update(var for var, one in zip(eqn.invars, used, strict=True) if one and _is_var(var))
    return [var in live for var in jaxpr.invars]


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _inner(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    if eqn.primitive.name not in _CALLS or eqn.effects:
        return None
    bodies = [value for value in eqn.params.values() if isinstance(value, core.ClosedJaxpr | core.Jaxpr)]
    if len(bodies) != 1:
        return None
    body = bodies[0].jaxpr if isinstance(bodies[0], core.ClosedJaxpr) else bodies[0]
    same = len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars)
    return body if same else None


def over_live(closed: core.ClosedJaxpr, live: Sequence[bool]) -> Callable[..., list[Any]]:
    """The traced function as one of its live arguments alone.

    Args:
        closed: of a function that returns a flat list.
        live: for each argument, as `live_arguments` gives it.

    Returns:
        A function of the live arguments, in order.
    """
    run = core.jaxpr_as_fun(closed)
    avals = closed.in_avals

    def pruned(*used: Any) -> list[Any]:
        left = iter(used)
        # Zeros stand in for dead arguments inside nested calls; XLA removes them with what reads them.
        return list(
            run(
                *(
                    next(left) if one else jax.numpy.zeros(a.shape, a.dtype)
                    for one, a in zip(live, avals, strict=True)
                )
            )
        )

    return pruned


def constants(closed: core.ClosedJaxpr) -> list[Any]:
    """Arrays that a traced function closes over, those of nested functions included."""
    found = list(closed.consts)
    todo = [closed.jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            found += [atom.val for atom in eqn.invars if isinstance(atom, core.Literal)]
            for value in eqn.params.values():
                for one in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(one, core.ClosedJaxpr):
                        found += one.consts
                        todo.append(one.jaxpr)
                    elif isinstance(one, core.Jaxpr):
                        todo.append(one)
    # One array may be met several times; each program holds it once.
    return list({id(one): one for one in found if getattr(one, "nbytes", 0)}.values())
