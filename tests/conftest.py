import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are of the CPU path, on any machine

sys.path.insert(0, str(Path(__file__).parent))
