"""Selective activation checkpointing: attention is recorded and replayed, the rest of a layer is
recomputed.

A checkpointed layer runs twice: first without gradients, then in the backward pass. In the first
run, `AttentionRecorder` computes attention and keeps its autograd graph. The graph keeps the
tensors that attention saves, usually its outputs and log-sum-exp, but not its inputs. The second
run recomputes the inputs, inserts them into the graph, and returns the recorded outputs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks

AttentionFunction = Callable[..., tuple[Tensor, ...]]
"""A function from tensors (or None) to attention's outputs. Every tensor that needs a gradient must
be an argument.
"""


def run_directly(function: AttentionFunction, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return `function(*tensors)`. Selective checkpointing calls `AttentionRecorder.run`
    instead.
    """
    return function(*tensors)


class AttentionRecorder:
    """Records attention in the first run of each checkpointed layer, and replays it in the
    second.
    """

    def __init__(self):
        self._calls: dict[Hashable, deque[_RecordedCall]] = defaultdict(deque)
        """For each layer, the recorded calls that are not yet replayed, the oldest first. Shifted
        sparse attention calls attention twice in a layer.
        """

    def run(
        self,
        layer: Hashable,
        function: AttentionFunction,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return `function(*tensors)` in the first run of a layer, and the recorded outputs in the
        second.

        If a layer was recorded several times, the oldest call is replayed first. The backward pass
        computes the gradients of all `tensors`, because the first run cannot tell which of them the
        second run needs. Raises RuntimeError if there is no recorded call to replay.
        """
        # Checkpointing disables gradients in the first run only.
        if not torch.is_grad_enabled():
            call = _RecordedCall(function, tensors)
            self._calls[layer].append(call)
            return call.results()
        if not self._calls[layer]:
            raise RuntimeError(
                f"layer {layer} has no recorded attention; run it under torch.no_grad() first"
            )
        return _Replay.apply(self._calls[layer].popleft(), *tensors)


class _RecordedCall:
    """A recorded call of attention. Its autograd graph receives the recomputed inputs in the
    backward pass.

    The graph refers to the call weakly, because Python cannot collect reference cycles through an
    autograd graph.
    """

    def __init__(self, function: AttentionFunction, tensors: tuple[Tensor | None, ...]):
        self._inputs = tensors
        """During the first run the inputs of attention, which `_pack` recognizes among the tensors
        that attention saves; in the backward pass the recomputed inputs; otherwise empty.
        """
        self.gradients: tuple[Tensor | None, ...] = ()
        """Gradients of the inputs, which the graph sets as its last step."""
        weak_call = ref(self)
        hooks = saved_tensors_hooks(
            lambda saved: weak_call()._pack(saved), lambda packed: weak_call()._unpack(packed)
        )
        # Detached, since attached parameters would be leaves of this graph, and their hooks would
        # run without a gradient.
        detached = (None if x is None else x.detach() for x in tensors)
        # Autograd builds a graph only if an argument requires a gradient; no detached tensor does.
        requires_grad = torch.empty(0, requires_grad=True)
        with torch.enable_grad(), hooks:
            self._outputs = function(*_GraphInputs.apply(weak_call, requires_grad, *detached))
        # The inputs are recomputed before the backward pass, so they need no memory until then.
        self._inputs = ()

    def results(self) -> tuple[Tensor, ...]:
        """Return the outputs, detached from the graph."""
        return tuple(output.detach() for output in self._outputs)

    def backward(
        self, inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the recomputed `inputs`, given the `gradients` of the outputs,
        and free the graph.
        """
        # `_unpack` gives the recomputed inputs to the graph, which sets `self.gradients`.
        self._inputs = inputs
        torch.autograd.backward(self._outputs, gradients)
        input_gradients = self.gradients

        self._inputs = ()
        self._outputs = ()
        self.gradients = ()
        return input_gradients

    def _pack(self, saved: Tensor) -> Tensor | int:
        """Return what the graph keeps of a tensor that attention saves for its backward pass.

        This is the index of `saved` among the inputs or, if it is not an input, `saved` itself,
        detached.
        """
        key = _storage_key(saved)
        for i, x in enumerate(self._inputs):
            if x is not None and _storage_key(x) == key:
                return i
        # Detached: an operation that saves its own output would otherwise form a reference cycle.
        return saved.detach()

    def _unpack(self, packed: Tensor | int) -> Tensor:
        """Return the saved tensor for the result of `_pack`: an input of the second run, or the
        tensor itself.
        """
        if isinstance(packed, int):
            return self._inputs[packed]
        return packed


@contextmanager
def saved_without_copy(x: Tensor) -> Iterator[Tensor]:
    """Yield x (S, B, H, D) as (S, B, H * D).

    If this is a copy, autograd saves x instead within the context, and copies it again in the
    backward pass. This needs less memory if autograd keeps the memory of x in any case.
    """
    flat = x.flatten(2)
    memory, *_ = _storage_key(flat)
    if memory == _storage_key(x)[0]:
        yield flat
        return

    kept = x.detach()

    def pack(saved: Tensor) -> Tensor | tuple:
        """Return the saved tensor or, if it is part of the copy, its shape, strides and offset."""
        saved_memory, offset, _, shape, stride = _storage_key(saved)
        if saved_memory != memory:
            return saved
        return shape, stride, offset

    def unpack(packed: Tensor | tuple) -> Tensor:
        """Return the saved tensor for the result of `pack`."""
        if isinstance(packed, Tensor):
            return packed
        return kept.flatten(2).as_strided(*packed)

    with saved_tensors_hooks(pack, unpack):
        yield flat


def _storage_key(x: Tensor) -> tuple:
    """Return a key that is equal for tensors with the same memory, dtype, shape and strides."""
    # `_cdata` instead of `data_ptr`, since fake tensors have no address.
    return x.untyped_storage()._cdata, x.storage_offset(), x.dtype, x.shape, x.stride()


class _GraphInputs(Function):
    """Identity between the inputs and a recorded graph; its backward pass stores the gradients of
    the inputs.
    """

    @staticmethod
    def forward(
        ctx,
        weak_call: ref[_RecordedCall],
        requires_grad: Tensor,
        *tensors: Tensor | None,
    ):
        ctx.weak_call = weak_call
        # The gradient of an input that attention does not use stays None.
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.detach() for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.weak_call().gradients = gradients
        # The arguments are detached, so nothing needs their gradients.
        return None, None, *(None for _ in gradients)


class _Replay(Function):
    """Maps the inputs of the second run to the recorded outputs; its backward pass runs the
    recorded graph.
    """

    @staticmethod
    def forward(ctx, call: _RecordedCall, *tensors: Tensor | None):
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.results()

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *ctx.call.backward(ctx.saved_tensors, gradients)
