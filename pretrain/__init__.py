"""The programs of this project, such as `python -m pretrain.train`."""

import os
import sys


def exit_on_ctrl_c() -> None:
    """Make an uncaught KeyboardInterrupt, even during imports, exit with status 130 and a sentence,
    no traceback.
    """
    default = sys.excepthook

    def report(error_type, error, trace):
        if not issubclass(error_type, KeyboardInterrupt):
            return default(error_type, error, trace)
        # A launcher sends Ctrl-C to all ranks; one sentence is enough.
        if os.environ.get("RANK", "0") == "0":
            print("error: ended by Ctrl-C", file=sys.stderr, flush=True)
        sys.exit(130)

    sys.excepthook = report


if sys.argv[:1] == ["-m"]:  # Python imports this package before it runs a program of it with -m
    exit_on_ctrl_c()
