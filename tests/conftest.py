import os
import sys
from pathlib import Path

# These tests are of the CPU path, on any machine; those of the kernels run on a GPU with TESTS_ON=gpu.
if os.environ.get("TESTS_ON") != "gpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))
