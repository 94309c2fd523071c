"""Triton without a GPU: kernels interpreted on the CPU (see conftest.py), or compiled for other
GPUs.
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from megatron_tape.ops.backends import choice

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def rounding_to_nearest():
    """Fix Triton's interpreter within the context: it truncates to bf16, and multiplies bf16 as
    integers.
    """
    import triton

    if not triton.knobs.runtime.interpret:
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    cut = interpreter.InterpreterBuilder.create_dot

    def to_nearest(values, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(values, source, target, rounding)

    def dot(self, a, b, c, *arguments):
        def wide(x):
            if x.dtype.scalar != tl.bfloat16:
                return x
            return interpreter.TensorHandle(
                (x.data.astype(np.uint32) << 16).view(np.float32), tl.float32
            )

        return cut(self, wide(a), wide(b), c, *arguments)

    with (
        mock.patch.object(interpreter, "_convert_float", to_nearest),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        mock.patch.object(choice, "why_not_interpreted", lambda dtype: None),
    ):
        yield


SHARED_MEMORY = {86: 99, 80: 163, 90: 227, 89: 99, 100: 227, 120: 99}
"""KiB of shared memory, by compute capability."""
BF16 = torch.bfloat16
FP32 = torch.float32
FORMS = [
    (256, 256, 1, 8, False, FP32, True),
    (200, 200, 3, 8, True, BF16, False),
    (256, 256, 1, 8, False, BF16, False),
    (256, 256, 1, 8, False, BF16, True),
    (256, 256, 2, 8, True, BF16, False),
    (1, 1, 1, 1, False, BF16, False),
    (1, 200, 3, 8, True, torch.float16, False),
]
"""Cases of attention: queries, keys, sequences, heads (four per group), packed, dtype,
deterministic. Triton compiles special kernels for lengths and strides that are 1 or divisible by
16."""
UPDATES = [
    (32, 128, FP32),
    (32, 128, BF16),
    (12, 48, BF16),
]
"""Cases of the position update: groups, width of the position MLP, dtype of the state."""


def compiled(dim, capability, form=None):
    """Compile the kernels of attention and of the update: for all cases, or for the ones numbered
    `form`.
    """
    chosen = slice(None) if form is None else slice(form, form + 1)

    def run():
        for queries, keys, batch, heads, packed, kind, repeatable in FORMS[chosen]:
            launch_attention(
                dim, heads, max(1, heads // 4), packed, queries, keys, batch, kind, repeatable
            )
        for groups, inner, state in UPDATES[chosen]:
            launch_update(groups, groups, dim, inner, state)
        launch_rotation(dim, heads=8, groups=2)

    return binaries(run, capability)


def of_training(dim, heads, groups, packed, repeatable, capability):
    """Compile the kernels that a training run in bf16 launches for attention and the update."""

    def run():
        launch_attention(dim, heads, groups, packed, repeatable=repeatable)
        launch_update(groups, heads, dim, 4 * heads)
        launch_rotation(dim, heads, groups)

    return binaries(run, capability)


def launch_attention(
    dim, heads, groups, packed, queries=4096, keys=4096, batch=2, kind=BF16, repeatable=False
):
    """Launch the kernels of attention, forward and backward."""
    from megatron_tape.ops.kernels import triton_attention

    def draw(length, count):
        return torch.empty(length, batch, count, dim, dtype=kind, requires_grad=True)

    if packed:
        bounds = torch.zeros(2, batch, keys, dtype=torch.int32)
    else:
        bounds = None
    with mock.patch.object(triton_attention, "sums_in_one_order", lambda: repeatable):
        inputs = draw(queries, heads), *(draw(keys, groups) for _ in range(3))
        o, u = triton_attention.attention(*inputs, True, bounds, rotate=queries == keys)
        (o.sum() + u.sum()).backward()


def launch_rotation(dim, heads, groups):
    """Launch the kernels before and after attention of a library, forward and backward."""
    from megatron_tape.ops.kernels import triton_rotation, triton_split

    def draw(heads, width):
        return torch.empty(64, 2, heads, width, dtype=BF16, requires_grad=True)

    widths = [heads // groups * dim, dim, dim]
    q, k, v = triton_split.split(draw(groups, sum(widths)), widths)
    q = q.reshape(64, 2, heads, dim)
    joined = draw(groups, 2 * dim).detach()
    z = joined[..., dim:].requires_grad_()
    prepared = triton_rotation.rotated_and_joined(q, k, v, z, True, joined)
    averages = triton_split.split(draw(heads, 2 * dim), [dim, dim])
    for outputs in (prepared, averages):
        torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])


def launch_update(groups, heads, dim, inner, state=FP32):
    """Launch the kernels of the position update, forward and backward."""
    from megatron_tape.ops.kernels import triton_position_update

    def draw(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    matrices = draw(groups, heads), draw(inner, groups), draw(groups, inner)
    z = draw(32, groups, dim, dtype=state)
    rounded = None if state is BF16 else draw(32, groups, dim)
    tensors = z, rounded, draw(32, heads, dim), draw(32, inner), *matrices
    new, for_attention, for_update = triton_position_update.update(*tensors)
    (for_attention.sum() + for_update.sum()).backward()


def binaries(run, capability):
    """Compile the kernels that `run` launches for GPUs of this capability; describe each binary.

    A description has the kernel's name and stages, bytes of shared memory, bytes of the stack
    (which holds spilled registers), and for each wait in a loop the number of copies to shared
    memory that may still be in flight.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_tape.ops.kernels import triton_attention

    launches = []

    def launch(kernel, *arguments, grid, warmup, **named):
        launches.append((kernel, dict(zip(kernel.arg_names, arguments)) | named))

    with (
        mock.patch.object(triton.JITFunction, "run", launch),
        mock.patch.object(
            triton_attention, "shared_memory", lambda device: SHARED_MEMORY[capability]
        ),
    ):
        run()
    kinds = {
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.float32: "*fp32",
        torch.int32: "*i32",
    }
    kernels = []
    for kernel, arguments in launches:
        constant = {p.name for p in kernel.params if p.is_constexpr}
        signature = {}
        constants = {}
        attributes = {}
        for place, name in enumerate(kernel.arg_names):
            value = arguments[name]
            if name in constant or value is None or (isinstance(value, int) and value == 1):
                signature[name], constants[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name], attributes[(place,)] = (
                    kinds[value.dtype],
                    [["tt.divisibility", 16]],
                )
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        options = {
            name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments
        }
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        kernels.append(
            {
                "name": kernel.__name__,
                "stages": binary.metadata.num_stages,
                "shared": binary.metadata.shared,
                "stack": _stack(binary.asm["cubin"]),
                "waits": _waits_in_loops(binary.asm["ttgir"]),
            }
        )
    return kernels


def _stack(cubin):
    """Return a GPU binary's bytes of stack, according to Triton's cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        completed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", completed.stdout + completed.stderr).group(1))


def _waits_in_loops(ttgir):
    """Return the copies in flight at each wait inside a loop; waits after a loop are for all
    copies.
    """
    waits = []
    ends = []
    for line in ttgir.splitlines():
        indentation = len(line) - len(line.lstrip())
        if ends and indentation == ends[-1] and line.lstrip().startswith("}"):
            ends.pop()
        elif "scf.for" in line:
            ends.append(indentation)
        elif ends and (wait := re.search(r"async_wait .*num = (\d+)", line)):
            waits.append(int(wait.group(1)))
    return waits
