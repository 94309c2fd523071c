"""Build the index of a run's data, which defines the order of its sequences, before the job.

    python tools/build_index.py --config pretrain/recipes/tape_demo.yaml [--section.key value ...]

Pass the same settings as for the run. The run then finds the index in data.cache_directory, so its
GPUs need not wait. The index depends on the data, data.split, data.long_documents,
model.seq_length, train.seed, and the number of sequences of the run.
"""

import logging
import os
import warnings

from megatron_tape import command_line
from megatron_tape.checkpoint.saved_settings import checked_start_checkpoint
from megatron_tape.checkpoint.saved_tokenizer import with_saved_tokenizer
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.data import SAMPLE_SOURCES
from megatron_tape.data.inputs import check_datasets
from megatron_tape.data.tokenizer import load_run_tokenizer


def main() -> None:
    """Parse the settings, check the datasets and build their index."""
    config = parse_run_config(purpose=__doc__)
    check(config, Level.FILES)
    # A run that continues a checkpoint uses the tokenizer saved with it.
    start = checked_start_checkpoint(config)
    config = with_saved_tokenizer(config, start)
    check_datasets(config)
    if config.data.source in SAMPLE_SOURCES:
        command_line.log(f"data.{config.data.source} needs no index; nothing to do")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("DeepSpeed", "megatron", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Megatron warns that Transformer Engine and Apex are missing.
    warnings.filterwarnings("ignore", module="megatron")
    # Use the CPU even if there is a GPU.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command_line.log("loading torch and megatron-core")
    # Imported here, since torch reads these variables and takes seconds to load.
    from megatron_tape.data.batches import build_batches
    from megatron_tape.parallel.layout import initialize_distributed

    tokenizer = load_run_tokenizer(config)
    eod = None if tokenizer is None else tokenizer.eod
    # Opening the run's data builds its index.
    build_batches(config, initialize_distributed(), eod)
    command_line.log(f"the index is in {config.data.resolved_cache_directory}")


if __name__ == "__main__":
    command_line.run(main)
