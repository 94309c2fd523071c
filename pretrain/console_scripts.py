"""Entry points of the installed commands: `tape-train` runs `python -m pretrain.train`, and so
on.
"""

import runpy
from collections.abc import Callable

from megatron_tape.command_line import Parser
from pretrain import exit_on_ctrl_c


def _script(command: str, module: str) -> Callable[[], None]:
    """Return a function that runs a module as `python -m` does, with the command's name in its
    --help.
    """

    def run() -> None:
        exit_on_ctrl_c()  # first, since the imports of the module take seconds
        Parser.command = command
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return run


train = _script("tape-train", "pretrain.train")
extend = _script("tape-extend", "pretrain.extend_context")
evaluate = _script("tape-evaluate", "pretrain.evaluate")
compare = _script("tape-compare", "pretrain.compare")
report = _script("tape-report", "pretrain.report")
estimate = _script("tape-estimate", "pretrain.estimate")
rehearse = _script("tape-rehearse", "pretrain.rehearse")
preflight = _script("tape-preflight", "pretrain.preflight")
status = _script("tape-status", "pretrain.status")

make_corpus = _script("tape-make-corpus", "pretrain.tools.make_corpus")
train_tokenizer = _script("tape-train-tokenizer", "pretrain.tools.train_tokenizer")
preprocess = _script("tape-preprocess", "pretrain.tools.preprocess_data")
merge_datasets = _script("tape-merge-datasets", "pretrain.tools.merge_datasets")
build_index = _script("tape-build-index", "pretrain.tools.build_index")
inspect = _script("tape-inspect", "pretrain.tools.inspect_dataset")
convert = _script("tape-convert", "pretrain.tools.convert_checkpoint")
generate = _script("tape-generate", "pretrain.tools.generate")
verify = _script("tape-verify", "pretrain.tools.verify")
