"""Triton without a GPU: kernels interpreted on the CPU (see conftest.py), and compiled for GPUs that are not here."""

from contextlib import contextmanager
from unittest import mock

import torch

from megatron_tape.ops.backends import choice

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def rounding_to_nearest():
    """Correct the interpreter, which truncates to bf16 instead of rounding and multiplies bf16 as integers.

    That of Triton 3.6 also reads the bounds of loops in a way that newer versions of numpy refuse.
    """
    import triton

    if not triton.knobs.runtime.interpret:
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert, cut = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    def to_nearest(values, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(values, source, target, rounding)

    def dot(self, a, b, c, *arguments):
        def wide(x):
            if x.dtype.scalar != tl.bfloat16:
                return x
            return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

        return cut(self, wide(a), wide(b), c, *arguments)

    with (
        mock.patch.object(interpreter, "_convert_float", to_nearest),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_tensor),
        mock.patch.object(choice, "why_not_interpreted", lambda dtype: None),
    ):
        yield


SHARED_MEMORY = {86: 99, 80: 163, 90: 227}
"""KiB, by compute capability."""


def compiled(dim, capability, form=None):
    """Compile what attention and the update launch on a GPU; (name, bytes of shared memory) of each kernel.

    That is all of it, or one form of attention and of the update, by its number.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_tape.ops.kernels import triton_attention, triton_position_update

    launches = []

    def launch(kernel, *arguments, grid, warmup, **named):
        launches.append((kernel, dict(zip(kernel.arg_names, arguments)) | named))

    def draw(*shape, dtype=torch.bfloat16):
        return torch.ones(shape, dtype=dtype, requires_grad=True)

    def chosen(forms):
        return forms if form is None else forms[form : form + 1]

    with (
        mock.patch.object(triton.JITFunction, "run", launch),
        mock.patch.object(triton_attention, "shared_memory", lambda device: SHARED_MEMORY[capability]),
        mock.patch.object(triton_attention, "sums_in_one_order") as repeatable,
    ):
        # Triton compiles lengths and strides of 1, and those that 16 divides, apart.
        forms = [
            (256, 256, 1, 8, False, torch.float32, torch.float32, True),
            (200, 200, 3, 8, True, torch.bfloat16, torch.float32, False),
            (256, 256, 1, 8, False, torch.bfloat16, torch.bfloat16, False),
            (256, 256, 1, 8, False, torch.bfloat16, torch.bfloat16, True),
            (256, 256, 2, 8, True, torch.bfloat16, torch.bfloat16, False),
            (1, 1, 1, 1, False, torch.bfloat16, torch.bfloat16, False),
            (1, 200, 3, 8, True, torch.float16, torch.float16, False),
        ]
        for queries, keys, batch, heads, packed, kind, state, repeatable.return_value in chosen(forms):
            bounds = torch.zeros(2, batch, keys, dtype=torch.int32) if packed else None
            G = max(1, heads // 4)
            q, k, v = (draw(*shape, dim, dtype=kind) for shape in ((queries, batch, heads), *[(keys, batch, G)] * 2))
            z = draw(keys, batch, G, dim, dtype=state)
            o, u = triton_attention.attention(q, k, v, z, True, bounds, rotate=queries == keys)
            (o.sum() + u.sum()).backward()
        sizes = [(32, 128, torch.float32), (32, 128, torch.bfloat16), (12, 48, torch.bfloat16)]
        for groups, inner, state in chosen(sizes):
            matrices = draw(groups, groups), draw(inner, groups), draw(groups, inner)
            states = draw(32, groups, dim, dtype=state), draw(32, groups, dim), draw(32, inner)
            triton_position_update.update(*states, *matrices).sum().backward()

    kinds = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
    found = []
    for kernel, arguments in launches:
        constant = {p.name for p in kernel.params if p.is_constexpr}
        signature, constants, attributes = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = arguments[name]
            if name in constant or (isinstance(value, int) and value == 1):
                signature[name], constants[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name], attributes[(place,)] = kinds[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found.append((kernel.__name__, binary.metadata.shared))
    return found
