"""Makes training steps sleep or hang; Python imports this when it starts if this folder is in
PYTHONPATH.

TEST_INJECT is JSON: `sleep` seconds before every step, or before every text that an evaluation
measures; `hang`: [rank, step], only if the file `once` does not exist, which is then created;
`no_kernels`: the node on which no kernel of attention works.
"""

import json
import os
import sys
import threading
import time


def inject():
    settings = json.loads(os.environ["TEST_INJECT"])
    while not hasattr(sys.modules.get("megatron_tape.training.engine"), "Engine"):
        if hasattr(
            model := sys.modules.get("megatron_tape.evaluation.transformers_model"), "HFModel"
        ):
            change(model.HFModel, settings)
            return
        time.sleep(0.005)
    if os.environ.get("SLURMD_NODENAME") == settings.get("no_kernels", ""):
        sys.modules["megatron_tape.model.backend"]._why_slow = lambda *_: (
            "is triton, whose kernel does not compile"
        )
    engine = sys.modules["megatron_tape.training.engine"].Engine
    original = engine.train_step
    taken = [0]

    def train_step(self, *arguments, **named):
        taken[0] += 1
        time.sleep(settings.get("sleep", 0))
        if [int(os.environ["RANK"]), taken[0]] == settings.get("hang") and first():
            time.sleep(3600)
        return original(self, *arguments, **named)

    def first():
        try:
            open(settings["once"], "x").close()
        except FileExistsError:
            return False
        return True

    engine.train_step = train_step


def change(model, settings):
    original = model.losses

    def losses(self, *arguments, **named):
        time.sleep(settings.get("sleep", 0))
        return original(self, *arguments, **named)

    model.losses = losses


if "TEST_INJECT" in os.environ:
    threading.Thread(target=inject, daemon=True).start()
