"""Compare two implementations of a function in results and all gradients, with random float64
tensors.
"""

import importlib.util
from importlib.machinery import PathFinder

import torch


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def draw_qkvz(length, heads, groups, dim, queries=None, dtype=torch.float64):
    """Return queries, keys, values and a state of two sequences; `queries` if fewer than keys."""
    q = draw(queries or length, 2, heads, dim, dtype=dtype)
    return [q, *(draw(length, 2, groups, dim, seed=seed, dtype=dtype) for seed in (1, 2, 3))]


def with_gradients(outputs, leaves):
    """Return the outputs that are not None, and the gradients of all leaves for random output
    directions.
    """
    outputs = [
        x for x in ([outputs] if isinstance(outputs, torch.Tensor) else outputs) if x is not None
    ]
    directions = [draw(*x.shape, seed=9 + i).detach().to(x) for i, x in enumerate(outputs)]
    return [
        *outputs,
        *torch.autograd.grad(
            outputs, leaves, directions, retain_graph=True, materialize_grads=True
        ),
    ]


def assert_same(ours, theirs, leaves, **tolerance):
    torch.testing.assert_close(
        with_gradients(ours, leaves), with_gradients(theirs, leaves), **tolerance
    )


def authors_form(name):
    """Return flash-linear-attention's naive `ops/NAME` without importing the package, which needs a
    GPU.
    """
    package = PathFinder.find_spec("fla").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(f"naive_{name}", f"{package}/ops/{name}/naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
