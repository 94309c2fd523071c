"""Triton kernels compiled for other GPUs fit into shared memory, spill few registers and
prefetch.
"""

import json
import os
import subprocess
import sys

import pytest
from ops_interpreter import SHARED_MEMORY

from megatron_tape.ops.position_update import MAX_GROUPS, MAX_HEADS

FEW = [(128, 86, 0), (64, 90, 1)]
# All forms for the smallest shared memory, and those of odd lengths for the others.
ALL = [(128, 86), *((128, capability, form) for capability in (80, 90) for form in (1, 6))]
RECIPES = [
    (64, 12, 12, False, False),
    (128, 16, 16, False, False),
    (128, 32, 8, True, False),
]
"""Head dimension, heads and groups of the recipes for 155M and 1B parameters, and with grouped
heads; whether documents are packed, and whether runs are deterministic.
"""
MORE = [
    *RECIPES,
    (64, 12, 4, True, False),
    (64, 12, 12, False, True),
    (128, 16, 16, False, True),
]
LOOPS = ("_forward", "_backward_keys", "_backward_queries")
SPILLS = {
    80: {
        "_forward 128": 184,
        "_backward_keys 64": 104,
        "_backward_queries 128": 104,
        "_update_backward 128": 232,
    },
    86: {
        "_backward_keys 64": 24,
        "_form_matrices 64": 16,
        "_update 128": 32,
        "_update_backward 128": 136,
    },
    89: {
        "_backward_keys 64": 24,
        "_form_matrices 64": 16,
        "_update 128": 32,
        "_update_backward 128": 136,
    },
    90: {"_update 128": 24, "_update_backward 128": 144},
    100: {"_backward_queries 128": 8, "_form_matrices 64": 16, "_update_backward 128": 168},
    120: {"_backward_keys 64": 120, "_form_matrices 64": 24, "_update_backward 128": 184},
}
"""Bytes of registers that each thread may spill, by compute capability and by kernel and head
dimension; 0 for other kernels. Each is the largest number of the cases in `MORE`, with Triton 3.6
and 3.9.
"""


def compile_apart(program):
    """Evaluate `program`, which uses `ops_interpreter`, in a process without the interpreter;
    return the result.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = f"import json, ops_interpreter as ops\nprint(json.dumps({program}))"
    completed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_kernels_compile_for_other_gpus(cases):
    """Triton includes the assembler, so the test finds compiler errors and excessive shared memory
    without a GPU.
    """
    kernels = compile_apart(f"[ops.compiled(*case) for case in {cases}]")
    compiled = [
        (case[1], kernel)
        for case, of_case in zip(cases, kernels, strict=True)
        for kernel in of_case
    ]
    assert len({kernel["name"] for _, kernel in compiled}) == 12
    for capability, kernel in compiled:
        assert kernel["shared"] <= SHARED_MEMORY[capability] * 1024, kernel


def test_the_largest_fused_position_update_fits_into_the_smallest_shared_memory():
    for kernel in compile_apart(
        f"ops.binaries(lambda: ops.launch_update({MAX_GROUPS}, {MAX_HEADS}, 128, 512), 86)"
    ):
        assert kernel["shared"] <= SHARED_MEMORY[86] * 1024, kernel


@pytest.mark.parametrize(
    "capability, cases",
    [
        pytest.param(90, RECIPES, id="90 few"),
        *(pytest.param(number, MORE, marks=pytest.mark.slow, id=str(number)) for number in SPILLS),
    ],
)
def test_kernels_of_training_prefetch_and_spill_no_more_than_allowed(capability, cases):
    compiled = compile_apart(f"[ops.of_training(*case, {capability}) for case in {cases}]")
    for (dim, *_), kernels in zip(cases, compiled, strict=True):
        assert {*LOOPS[:2]} <= {kernel["name"] for kernel in kernels}
        for kernel in kernels:
            assert kernel["shared"] <= SHARED_MEMORY[capability] * 1024, kernel
            allowed = SPILLS[capability].get(f"{kernel['name']} {dim}", 0)
            assert kernel["stack"] <= allowed, (dim, kernel)
            # While a loop in three stages waits for one tile, copies of the next are in flight.
            if kernel["name"] in LOOPS and kernel["stages"] > 2:
                assert kernel["waits"] and min(kernel["waits"]) >= 2, kernel
