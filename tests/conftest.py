import os
import sys
from pathlib import Path

import pytest

# These tests are of the CPU path, on any machine; those of the kernels run on a GPU with TESTS_ON=gpu.
if os.environ.get("TESTS_ON") != "gpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"
    # Tensors are small and processes many: threads would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
else:
    import torch

    if not torch.cuda.is_available():
        pytest.exit("TESTS_ON=gpu, but torch sees no GPU here; leave it out to interpret the kernels", returncode=1)

sys.path.insert(0, str(Path(__file__).parent))

LONGEST = ("test_training.py", "test_resuming.py", "test_demo.py", "test_export.py", "test_train_command.py")


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest, so that no worker of pytest-xdist is left with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
