"""Python imports this at its start where PYTHONPATH names this folder: training steps that sleep, hang or fail.

TEST_INJECT is JSON: `sleep` seconds before every step; `hang` or `crash`: [rank, step]; `once` (a path): only while
that file does not exist, which is then made.
"""

import json
import os
import sys
import threading
import time


def inject():
    wishes = json.loads(os.environ["TEST_INJECT"])
    while not hasattr(sys.modules.get("megatron_tape.training.engine"), "Engine"):
        time.sleep(0.005)
    engine = sys.modules["megatron_tape.training.engine"].Engine
    original, taken = engine.train_step, [0]

    def train_step(self, *arguments, **named):
        taken[0] += 1
        time.sleep(wishes.get("sleep", 0))
        here = [int(os.environ["RANK"]), taken[0]]
        if here in (wishes.get("hang"), wishes.get("crash")) and first():
            if here == wishes.get("hang"):
                time.sleep(3600)
            raise RuntimeError("a step that was made to fail")
        return original(self, *arguments, **named)

    def first():
        if wishes.get("once") is None:
            return True
        try:
            open(wishes["once"], "x").close()
        except FileExistsError:
            return False
        return True

    engine.train_step = train_step


if "TEST_INJECT" in os.environ:
    threading.Thread(target=inject, daemon=True).start()
