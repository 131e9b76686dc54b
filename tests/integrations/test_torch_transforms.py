"""Tangents and transforms of attention in PyTorch: every way to them is an error that names the operator."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_torch_integration import attention  # noqa: E402
from test_torch_options import FIRST, tensor  # noqa: E402

from cattn.integrations import torch as bridge  # noqa: E402

TRANSFORMS: dict[str, Any] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.vmap(f), (x,), (x,)),
    "vmap of jvp": lambda f, x: torch.vmap(lambda y: torch.func.jvp(f, (y,), (y,)))(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).sum())(y).sum())(x),
    "compiled jvp": lambda f, x: torch.compile(lambda y: torch.func.jvp(f, (y,), (y,)), backend="aot_eager")(x),
    # here the compiler leaves the transform to Python and compiles the functions inside
    "jvp, backend eager": lambda f, x: torch.compile(lambda y: torch.func.jvp(f, (y,), (y,)), backend="eager")(x),
    "jacfwd, backend eager": lambda f, x: torch.compile(lambda y: torch.func.jacfwd(f)(y), backend="eager")(x),
    "grad, backend eager": lambda f, x: torch.compile(
        lambda y: torch.func.grad(lambda z: f(z).sum())(y), backend="eager"
    )(x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # a warning from PyTorch's own code
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", ["function", "operator"])
def test_forward_mode_and_transforms_are_an_error_that_names_the_operator(way: str, transform: str) -> None:
    function = attention if way == "function" else FIRST["the operator"]
    x = tensor(1, 2, 4, 3)
    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match=r"query .*cattn's attention \(torch\.ops\.cattn.*MATH\)"):
        TRANSFORMS[transform](lambda y: function(y, y, y), x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_compiled_tangent_inside_use_cattn_is_an_error() -> None:
    """It was 0 with the backend "eager"."""
    x = tensor(1, 2, 4, 3)

    def call(y: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        with bridge.use_cattn(), pytest.raises(NotImplementedError):
            torch.compile(lambda y: torch.func.jvp(call, (y,), (y,)), backend=backend)(x)
