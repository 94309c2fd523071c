"""Lets autograd handle fake CUDA tensors on a machine without a GPU.

There a `torch._subclasses.FakeTensor` may name a CUDA device, but the first backward pass fails or even ends the
process: autograd asks two C++ tables for the device, the registry of device guards and the virtual table of CUDA's
hooks. In a torch without CUDA they are empty, and in one with CUDA they ask the driver. This module fills them through
ctypes. Symbols and offsets belong to a version of torch, hence the list of known versions. Nothing runs on a device.
Where there is a GPU, everything is left as it is.

Other ways do not lead here. From Python, torch registers guards and hooks for the device type PrivateUse1 alone, which
may not be called "cuda", and the code that is rehearsed asks for CUDA by name. Registering them in C++ needs a compiler
on the user's machine. A fake tensor that names its device to Python only, and the CPU to C++, makes autograd content;
but then torch's own C++ code copies tensors that are on the GPU already, does not see copies to the host, and makes
tensors on the wrong device, which are the things that a rehearsal is to count.
"""

from ctypes import CDLL, CFUNCTYPE, POINTER, addressof, c_bool, c_int8, c_void_p, cast, py_object, pythonapi
from typing import Any

import torch

from megatron_tape.errors import refuse

KNOWN_VERSIONS = ("2.11", "2.13")
DEVICE_TYPES = 21  # of c10::DeviceType
CUDA = 1  # among them
GUARD_SLOTS = 64  # at least as many as DeviceGuardImplInterface has virtual functions
HOOKS_SLOTS = 80  # at least as many as CUDAHooksInterface has, and the two words before them
IS_BUILT, HAS_PRIMARY_CONTEXT = 4, 6  # indices of two of these functions

_filled = False


def fill_cuda_hooks() -> None:
    """Fill the tables, once per process; `ConfigError` for a version of torch whose tables are not known."""
    global _filled
    if _filled or torch.cuda.is_available():
        return
    version = torch.__version__
    refuse(
        version.partition("+")[0].rsplit(".", 1)[0] not in KNOWN_VERSIONS,
        "torch",
        f"is {version}, but without a GPU rehearsals support only torch {' and '.join(KNOWN_VERSIONS)}",
        "install one of these versions",
    )
    _register_guard()
    _replace_hooks()
    _filled = True


def _register_guard() -> None:
    libraries = torch.__path__[0] + "/lib/"
    symbol = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (c_void_p * DEVICE_TYPES).in_dll(CDLL(libraries + "libc10.so"), symbol)
    functions = _table([_constant(c_int8, 0)] * GUARD_SLOTS)
    guard = _table([addressof(functions)])
    registry[CUDA] = addressof(guard)
    # Torch replaces a guard that counts no devices with its own, which does nothing.
    torch._C._ensureCUDADeviceGuardSet()


def _replace_hooks() -> None:
    get_hooks = CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = c_void_p
    hooks = cast(get_hooks(), POINTER(c_void_p))
    before = 2 * 8  # bytes: a virtual table's pointer points behind its offset and type information
    slots = cast(hooks[0] - before, POINTER(c_void_p))[:HOOKS_SLOTS]
    slots[IS_BUILT] = _constant(c_bool, True, c_void_p)
    slots[HAS_PRIMARY_CONTEXT] = _constant(c_bool, False, c_void_p, c_int8)
    hooks[0] = addressof(_table(slots)) + before


def _table(slots: list[int]) -> Any:
    return _kept((c_void_p * len(slots))(*slots))


def _constant(result: type, value: object, *arguments: type) -> int:
    """Return the address of a C function that returns `value`."""
    return cast(_kept(CFUNCTYPE(result, *arguments)(lambda *_: value)), c_void_p).value


def _kept(thing: Any) -> Any:
    """Keep `thing` forever: static destructors call it after Python has ended."""
    pythonapi.Py_IncRef(py_object(thing))
    return thing
