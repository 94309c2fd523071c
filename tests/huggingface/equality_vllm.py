"""Check that vLLM gives the greedy tokens of transformers' `generate` and the model's logprobs, in
fp32 on a CPU.

    .venv-vllm/bin/python tests/huggingface/equality_vllm.py exported/my-model ... [--json FILE]

prints a table with a row for each request: for each model, how many answers have the tokens of
`generate`, and by how much the logprobs of the sampled and the five best tokens differ at most from
those that transformers computes for the same text. The exit status is 1 if a token differs, or a
logprob by more than 1e-4. TAPE models are served by the plug-in of transformers_tape, which must be
installed; code that an export carries is not run. All rows are tried with the first model, those of
one plain engine with the others. Tensor parallelism takes two processes (three, if the number of
heads is odd). With VLLM_CPU_CI_ENV=1, the row of compiled models traces them, but does not compile,
which takes minutes.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Engines in this process start in seconds. Their cache has one GiB, whatever the machine has, and
# their threads are not bound to cores, since two processes may have fewer than two cores.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}

import torch
import transformers
import vllm
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

sys.path.insert(0, str(Path(__file__).parent))
from ecosystem import NEW, Subject
from ecosystem_serving import TIMEOUT, chat, copy_with_template, server

# Where transformers_tape is found by PYTHONPATH, Python does not read transformers_tape.pth.
import transformers_tape  # noqa: F401

LONGEST = 1024
BLOCK = 32
CHUNK = 64
"""Tokens of the longest request, of a cache block, and of a step (longer prompts take several
steps).
"""
TOLERANCE = 1e-4
SMALL_CACHE = {"num_gpu_blocks_override": 12, "max_model_len": 256}
EAGER = {"enforce_eager": True}


class Engine:
    """vLLM with one model, and the expected responses."""

    def __init__(self, subject: Subject, **options):
        self.subject, longest = subject, subject.model.config.max_position_embeddings
        self.length = options.pop("max_model_len", min(LONGEST, longest))
        self.llm = LLM(
            str(subject.directory),
            dtype="float32",
            max_model_len=self.length,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=16,
            block_size=BLOCK,
            disable_log_stats=False,
            **options,
        )
        # vLLM decorates classes of transformers that it uses, also for models that it did not make.
        type(subject.model.model).do_not_compile = True
        # Only once per process; a second call fails because of modules imported since.
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

    def close(self) -> None:
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def prompts(self, *lengths: int) -> list[list[int]]:
        return [
            self.subject.ids(length, start=7 * i)[0].tolist() for i, length in enumerate(lengths)
        ]

    def ask(self, prompts: list[list[int]], **options):
        """Generate for all prompts together, greedily, and compare; see `compare`."""
        options = {
            "temperature": 0,
            "max_tokens": NEW,
            "ignore_eos": True,
            "logprobs": 5,
            **options,
        }
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self.llm.generate(requests, SamplingParams(**options), use_tqdm=False)
        return compare(self.subject, prompts, answers)

    def count(self, metric: str) -> float:
        """Return one of vLLM's counters, which all engines of a process share."""
        return sum(
            found.value for found in self.llm.get_metrics() if found.name == f"vllm:{metric}"
        )


@torch.no_grad()
def compare(subject: Subject, prompts: list[list[int]], answers) -> dict:
    """Return the number of responses, of those with `generate`'s tokens, and the largest difference
    of a logprob.
    """
    found = {"answers": 0, "equal": 0, "logprobs": 0.0}
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = subject.generate(ids)[0].tolist()
        for output in answer.outputs:
            tokens = list(output.token_ids)
            found["answers"] += 1
            found["equal"] += expected == tokens
            true = subject.logits(ids=torch.tensor([prompt + tokens]))[0].log_softmax(-1)
            given = list(enumerate(output.logprobs, len(prompt)))
            given += list(enumerate(answer.prompt_logprobs or []))[1:]
            for position, of_tokens in given:
                for token, logprob in of_tokens.items():
                    difference = abs(logprob.logprob - true[position - 1, token].item())
                    found["logprobs"] = max(found["logprobs"], difference)
    return found


def alone(engine: Engine) -> dict:
    (module,) = engine.llm.apply_model(lambda model: type(model).__module__)
    return engine.ask(engine.prompts(24), prompt_logprobs=5) | {"module": module}


def mixed_lengths(engine: Engine) -> dict:
    return engine.ask(
        engine.prompts(
            1,
            2,
            31,
            32,
            33,
            5,
            90,
            17,
            64,
            65,
            11,
            200,
        )
    )


def chunks(engine: Engine) -> dict:
    lengths = 100, engine.length - NEW, 70
    assert max(lengths) > 3 * CHUNK
    return engine.ask(engine.prompts(*lengths))


def shared_prefix(engine: Engine) -> dict:
    (prompt,) = engine.prompts(100)
    engine.ask([prompt])
    before = engine.count("prefix_cache_hits")
    found = engine.ask([prompt, prompt[:80] + prompt[:9], prompt[:65]])
    hits = engine.count("prefix_cache_hits") - before
    # By default, vLLM keeps fewer prefixes of models with a window.
    windowed = getattr(engine.subject.model.config, "sliding_window", None) is not None
    assert hits >= (1 if windowed else 3) * 2 * BLOCK, "nothing was read from the cache"
    return found


def preemption(engine: Engine) -> dict:
    before = engine.count("num_preemptions")
    found = engine.ask(engine.prompts(*[60 + i % 3 for i in range(8)]))
    assert engine.count("num_preemptions") > before, "the cache was large enough for all"
    return found


def drafts(engine: Engine) -> dict:
    before = engine.count("spec_decode_num_accepted_tokens")
    (prompt,) = engine.prompts(30)
    found = engine.ask([prompt * 2, *engine.prompts(50, 9)])
    assert engine.count("spec_decode_num_accepted_tokens") > before, "no draft was accepted"
    return found


def together(engine: Engine) -> dict:
    return engine.ask(engine.prompts(24, 3, 100))


@torch.no_grad()
def served(subject: Subject) -> dict:
    """Query vLLM's server with the openai client: chat as in ecosystem_serving, and completions,
    streamed and not.
    """
    import openai

    model = str(copy_with_template(subject))
    found = {"answers": 0, "equal": 0, "logprobs": 0.0}
    # In several processes, as users start it. The command `vllm serve` of vllm-cpu 0.32.0 looks for
    # a package "vllm".
    script = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = ["env", "-u", "VLLM_ENABLE_V1_MULTIPROCESSING", *script]
    command += ["--model", model, "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"]
    with server(command, subject.work) as url:
        chat(subject, url)
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT)
        for length in (24, 3):
            ids = subject.ids(length)
            tokens = subject.generate(ids)
            everything = torch.cat([ids, tokens], dim=1)[0]
            text = subject.tokenizer.decode(everything)[len(subject.tokenizer.decode(ids[0])) :]
            true = (
                subject.logits(ids=everything[None])[0, length - 1 : -1]
                .log_softmax(-1)
                .gather(1, tokens.T)[:, 0]
            )
            asked = dict(
                model=model, prompt=ids[0].tolist(), max_tokens=NEW, temperature=0, logprobs=1
            )
            asked["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
            (answer,) = client.completions.create(**asked).choices
            streamed = [
                chunk.choices[0]
                for chunk in client.completions.create(**asked, stream=True)
                if chunk.choices
            ]
            assert len(streamed) > NEW // 2, "the answer came at once"
            logprobs = [
                logprob
                for piece in streamed
                if piece.logprobs
                for logprob in piece.logprobs.token_logprobs
            ]
            for given_text, given in (
                (answer.text, answer.logprobs.token_logprobs),
                ("".join(piece.text for piece in streamed), logprobs),
            ):
                found["answers"] += 1
                found["equal"] += given_text == text
                assert len(given) == NEW
                found["logprobs"] = max(
                    found["logprobs"], (torch.tensor(given) - true).abs().max().item()
                )
    return found


Ask = Callable[[Engine], dict]
ITSELF = {"method": "draft_model", "num_speculative_tokens": 2}
ENGINES: list[tuple[dict, dict[str, Ask]]] = [
    (
        EAGER,
        {
            "one request, with the prompt's logprobs": alone,
            "12 requests of 1 to 200 tokens together": mixed_lengths,
            f"prompts read in chunks of {CHUNK} tokens, one as long as the model's context": chunks,
            "prefixes from the cache": shared_prefix,
        },
    ),
    (EAGER | SMALL_CACHE, {"preemption: a cache that is too small for all": preemption}),
    (EAGER | {"speculative_config": ITSELF}, {"speculation by a draft model, itself": drafts}),
    (EAGER | {"tensor_parallel_size": 2}, {"tensor parallelism": together}),
    ({}, {"compiled": together}),
]
SERVED = "the OpenAI server: chat, completions, streamed and not"


def cell(found: dict | None) -> str:
    if found is None:
        return ""
    return f"{found['equal']} of {found['answers']}; {found['logprobs']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="directories of exported models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    rows: dict[str, dict[str, dict]] = {}
    with tempfile.TemporaryDirectory() as work:
        subjects = []
        for number, directory in enumerate(options.models):
            subject = Subject(directory, Path(work, str(number)))
            # The package has TAPE's code; code in the export is not run.
            subject.trust = {}
            # Load the model now: classes that vLLM has decorated make no models outside of vLLM.
            subject.model.eval()
            subjects.append(subject)
        for number, subject in enumerate(subjects):
            directory = options.models[number]
            if number == 0:
                print(f"{directory.name}: {SERVED}", file=sys.stderr, flush=True)
                rows[SERVED] = {directory.name: served(subject)}
            for settings, asked in ENGINES[: 1 if number else None]:
                if "tensor_parallel_size" in settings:
                    heads = subject.model.config.num_attention_heads
                    settings = settings | {"tensor_parallel_size": 2 if heads % 2 == 0 else 3}
                if settings.get("speculative_config") == ITSELF:
                    settings = settings | {
                        "speculative_config": ITSELF | {"model": str(subject.directory)}
                    }
                engine = Engine(subject, **settings)
                for what, ask in asked.items():
                    print(f"{directory.name}: {what}", file=sys.stderr, flush=True)
                    rows.setdefault(what, {})[directory.name] = found = ask(engine)
                    print(cell(found), file=sys.stderr, flush=True)
                engine.close()
    names = [directory.name for directory in options.models]
    print(
        f"\nvLLM {vllm.__version__}, transformers {transformers.__version__}, torch"
        f" {torch.__version__}, fp32\n"
    )
    for line in [
        ["equal answers; largest difference of a logprob", *names],
        ["---"] * (len(names) + 1),
    ]:
        print(f"| {' | '.join(line)} |")
    for what, of_models in rows.items():
        print(
            f"| {' | '.join([what, *(cell(of_models.get(name)) for name in names)])} |", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    every = [found for of_models in rows.values() for found in of_models.values()]
    sys.exit(
        any(found["equal"] < found["answers"] or found["logprobs"] > TOLERANCE for found in every)
    )


if __name__ == "__main__":
    main()
