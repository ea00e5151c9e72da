"""Every implementation of every op on its table, against sequential NumPy in float64."""

import pytest

from tests.cases import base
from tests.cases.ops import OPS


def runs():
    """The first case of a table and every fourth after it are in `make test`."""
    for op, table in OPS.items():
        for number, name in enumerate(table.cases):
            for implementation in table.implementations:
                if table.lacks(table.cases[name], implementation):
                    continue
                marks = [base.MARKS[implementation]] if implementation in base.MARKS else []
                marks += [pytest.mark.slow] if table.is_slow(name, implementation) else []
                marks += [pytest.mark.thorough] if number % 4 else []
                case = f"{op}: {name}-{implementation}"
                yield pytest.param(op, name, implementation, marks=marks, id=case)


@pytest.mark.parametrize(("op", "name", "implementation"), [*runs()])
def test_errors_are_within_their_budgets(op, name, implementation):
    """A kernel has a second budget, relative to XLA's error: not a widened tolerance."""
    OPS[op].check(OPS[op].cases[name], implementation)
