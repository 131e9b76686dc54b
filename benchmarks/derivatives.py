"""python -m benchmarks.derivatives [--tokens 512 2048] [--rounds 5]: five uses of second derivatives, beside PyTorch.

Each use is one function of the attention that it calls. It runs by cattn's function for PyTorch and by PyTorch's math
backend, which is the only one of PyTorch with second derivatives on a CPU. Both have one thread, and take turns in
processes of their own, which also measure the peak of their memory. Their results must agree.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .machine import cpu_name

HEADS, WIDTH = 4, 64  # of a head
Attend = Callable[..., Tensor]


def heads(x: Tensor) -> Tensor:
    """Split (..., T, HEADS * WIDTH) into heads, (..., HEADS, T, WIDTH)."""
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(-3, -2)


class Block(nn.Module):
    """A layer of a transformer: attention and two products, with residuals."""

    def __init__(self, attend: Attend, is_causal: bool) -> None:
        super().__init__()
        size = HEADS * WIDTH
        self.attend, self.is_causal = attend, is_causal
        self.project, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (..., T, HEADS * WIDTH) after the layer."""
        q, k, v = (heads(part) for part in self.project(self.norm(x)).chunk(3, dim=-1))
        context = self.attend(q, k, v, is_causal=self.is_causal).transpose(-3, -2).flatten(-2)
        x = x + self.out(context)
        return x + self.down(torch.tanh(self.up(x)))


def hessian_vector(attend: Attend, tokens: int) -> Callable[[], list[Tensor]]:
    """Return the product of the Hessian of a causal transformer of four layers and a vector."""
    model = nn.Sequential(*(Block(attend, is_causal=True) for _ in range(4)))
    x = torch.randn(1, tokens, HEADS * WIDTH)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    vector = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    return lambda: list(torch.func.jvp(torch.func.grad(loss), (weights,), (vector,))[1].values())


def forces(attend: Attend, tokens: int) -> Callable[[], list[Tensor]]:
    """Return a step that fits forces, the negative gradients of an energy of atoms."""
    embed, block, read = nn.Linear(3, HEADS * WIDTH), Block(attend, is_causal=False), nn.Linear(HEADS * WIDTH, 1)
    weights = [*embed.parameters(), *block.parameters(), *read.parameters()]
    positions, wanted = torch.randn(1, tokens, 3), torch.randn(1, tokens, 3)

    def step() -> list[Tensor]:
        atoms = positions.clone().requires_grad_()
        energy = read(block(embed(atoms))).sum()
        (gradient,) = torch.autograd.grad(energy, atoms, create_graph=True)
        loss = (-gradient - wanted).square().mean()
        return list(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))

    return step


def penalty(attend: Attend, tokens: int) -> Callable[[], list[Tensor]]:
    """Return a step with a penalty on the gradient of a critic."""
    block, read = Block(attend, is_causal=True), nn.Linear(HEADS * WIDTH, 1)
    weights, x = [*block.parameters(), *read.parameters()], torch.randn(2, tokens, HEADS * WIDTH)

    def step() -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(read(block(inputs)).sum(), inputs, create_graph=True)
        loss = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return list(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))

    return step


def learning(attend: Attend, tokens: int) -> Callable[[], list[Tensor]]:
    """Return a gradient by way of a step of gradient descent, of four tasks at once (MAML)."""
    tasks, weight = torch.randn(4, HEADS, tokens, WIDTH), torch.eye(WIDTH)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return (attend(x @ weight, x, x, is_causal=True, enable_gqa=True) - x.roll(1, -2)).square().mean()

    def adapted(weight: Tensor, x: Tensor) -> Tensor:
        return loss(weight - 0.1 * torch.func.grad(loss)(weight, x), x)

    def mean(weight: Tensor) -> Tensor:
        return torch.vmap(adapted, in_dims=(None, 0))(weight, tasks).mean()

    return lambda: [torch.func.grad(mean)(weight)]


def equation(attend: Attend, tokens: int) -> Callable[[], list[Tensor]]:
    """Return a step on the residual of Burgers' equation, u_t + u u_x, of a network over all points at once."""
    embed, block, read = nn.Linear(2, HEADS * WIDTH), Block(attend, is_causal=False), nn.Linear(HEADS * WIDTH, 1)
    weights = [*embed.parameters(), *block.parameters(), *read.parameters()]
    points = torch.rand(1, tokens, 2)

    def step() -> list[Tensor]:
        at = points.clone().requires_grad_()
        u = read(block(torch.sin(embed(at))))
        (slope,) = torch.autograd.grad(u.sum(), at, create_graph=True)
        loss = (slope[..., :1] + u * slope[..., 1:]).square().mean()
        return list(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))

    return step


USES: dict[str, Callable[[Attend, int], Callable[[], list[Tensor]]]] = {
    "Hessian times vector, four layers": hessian_vector,
    "forces": forces,
    "penalty on a gradient": penalty,
    "learning to learn": learning,
    "differential equation": equation,
}


def of_pytorch(*arguments: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    """PyTorch's function; `enable_gqa` says to cattn that three dimensions have heads."""
    return nn.functional.scaled_dot_product_attention(*arguments, **options)


def child(use: str, library: str, tokens: int, path: str) -> None:
    """Run one use; save its numbers, and print the seconds of two runs and the peak of memory beyond the inputs."""
    import cattn
    from cattn.integrations.torch import scaled_dot_product_attention

    torch.set_num_threads(1)
    cattn.set_num_threads(1)
    torch.manual_seed(0)
    run = USES[use](scaled_dot_product_attention if library == "cattn" else of_pytorch, tokens)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for _ in range(2):
            start = time.perf_counter()
            found = run()
            seconds.append(time.perf_counter() - start)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    np.save(path, torch.cat([x.detach().flatten() for x in found]).numpy())
    print(json.dumps({"seconds": min(seconds), "peak": peak}))


def measure(use: str, tokens: int, rounds: int) -> str:
    """Return a row of the table: the best times, their ratio, and the peaks."""
    seconds: dict[str, list[float]] = {"cattn": [], "torch": []}
    peaks: dict[str, list[int]] = {"cattn": [], "torch": []}
    with tempfile.TemporaryDirectory() as work:
        for _ in range(rounds):
            for library in seconds:
                path = str(Path(work) / f"{library}.npy")
                command = [sys.executable, "-m", "benchmarks.derivatives", "--child", use, library, str(tokens), path]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row = json.loads(done.stdout)
                seconds[library].append(row["seconds"])
                peaks[library].append(row["peak"])
        ours, theirs = (np.load(Path(work) / f"{library}.npy") for library in seconds)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max(), err_msg=use)
    best = {library: min(times) for library, times in seconds.items()}
    mib = {library: min(found) / 2**20 for library, found in peaks.items()}
    return (
        f"| {use} | {tokens} | {best['cattn'] * 1e3:.0f} ms | {best['torch'] * 1e3:.0f} ms "
        f"| {best['torch'] / best['cattn']:.1f} | {mib['cattn']:.0f} MiB | {mib['torch']:.0f} MiB |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        use, library, tokens, path = given.child
        child(use, library, int(tokens), path)
        return
    print(f"{cpu_name()}, one thread, float32, {HEADS} heads of {WIDTH} columns\n")
    print("| use | T | cattn | PyTorch math | ratio | memory of cattn | of PyTorch |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tokens in given.tokens:
        for use in USES:
            print(measure(use, tokens, given.rounds), flush=True)


if __name__ == "__main__":
    main()
