"""What the programs of a comparison load, for the process that starts them on CPUs (`set_forkserver_preload`).

torch, megatron-core and deepspeed take seconds to load, as long as a small model takes for a hundred steps. One process
loads them and is copied for every program.
"""

import logging
import os
import signal
import warnings

# It passes on how its programs end, and must outlive them; it ends with the comparison.
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no accelerator
for noisy in ("DeepSpeed", "megatron", "torch", "numba", "matplotlib"):
    logging.getLogger(noisy).setLevel(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import transformers.generation.utils  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import megatron_tape.evaluation.transformers_model  # noqa: F401
    import megatron_tape.huggingface.export.to_transformers  # noqa: F401
    import megatron_tape.training.trainer  # noqa: F401
