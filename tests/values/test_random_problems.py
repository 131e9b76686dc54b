"""Random problems of attention with every option: values, signs of zeros, bits, strides, poison, parts.

`tools/soak problems` checks as many as wanted.
"""

import pytest
from hypothesis import given, settings

from support.calls import drawn
from support.laws import Problem, check, problem


@pytest.mark.promise(
    "formula", "stages", "gradients", "paths and tables", "threads and batch", "strides", "hidden keys"
)
@given(drawn(problem))
@settings(max_examples=settings().max_examples if settings().max_examples > 100 else 40)
def test_random_problems(chosen: Problem) -> None:
    check(chosen)
