"""Count the operations of torch and the Triton kernels that would be launched on a GPU.

`launch.py`, in contrast, starts processes.
"""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

WITHOUT_LAUNCH = {
    # Allocation, and changes of a tensor's storage or shape.
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
    # A view, although its schema does not say so.
    "_unsafe_view",
    # Queries of properties, and messages to the allocator.
    "_has_same_storage_numel",
    "is_pinned",
    "promote_types",
    "record_stream",
    "result_type",
}
"""Names of operations, besides views, that launch nothing."""


class CountLaunches(TorchDispatchMode):
    """Counts operations within the context that would launch a kernel or a copy on a GPU.

    Views, allocations and queries do not count. Collectives count, and so do copies from the GPU
    that the host waits for.

    The numbers are estimates from runs on a CPU. `_foreach_*` and fused operations count once,
    although the GPU splits those of many tensors into several launches. An operation counts once
    even if the GPU needs several kernels for it, such as a reduction of a large tensor. Triton's
    kernels do not count, nor do copies of numbers to the GPU, such as `torch.tensor(1.0)`.
    """

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        """Number of calls by operation, such as `aten::add_`."""

    @property
    def total(self) -> int:
        """Number of all counted operations."""
        return self.counts.total()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operation = function._schema.name
        namespace, _, name = operation.partition("::")
        # `prim::device` and the like return properties of a tensor, and the profiler's operations
        # mark ranges.
        is_query = namespace in ("prim", "profiler")
        if not is_query and not function.is_view and name not in WITHOUT_LAUNCH:
            self.counts[operation] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counting_triton(launches: CountLaunches):
    """Add the launches of Triton kernels within the context to `launches`, without running the
    kernels: their results are uninitialized.

    Requires Triton's interpreter.
    """
    from triton.runtime.interpreter import GridExecutor

    def count(executor, *arguments, **options):
        """Replace the call of a kernel on a grid."""
        launches.counts[executor.fn.__name__] += 1

    with mock.patch.object(GridExecutor, "__call__", count):
        yield
