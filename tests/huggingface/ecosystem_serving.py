"""Rows of `transformers serve` and the openai client; see ecosystem.py. test_vllm.py does the same
with vLLM.
"""

import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import torch
from ecosystem import Subject, row

NEEDS = ("transformers_tape", "openai", "fastapi", "uvicorn")
TIMEOUT = 300
"""Timeout in seconds for a server's response."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SERVE = "from transformers.cli.transformers import main; main()"
LONG = ([{"role": "user", "content": "import heapq"}], 40)
SHORT = ([{"role": "system", "content": "code"}, {"role": "user", "content": "def push(heap):"}], 8)


@row(
    "transformers serve, openai client: chat, streaming, two clients at once give generate's text",
    NEEDS,
    heavy=True,
)
def serve(subject: Subject):
    # A child process may not read transformers_tape.pth.
    script = ("import transformers_tape; " if subject.is_tape else "") + SERVE
    command = [sys.executable, "-c", script, "serve", copy_with_template(subject)]
    with server([*command, "--device", "cpu", "--dtype", "float32"], subject.work) as url:
        chat(subject, url)


def chat(subject: Subject, url: str):
    """Compare a server's chat with `generate`: responses, streaming, and three concurrent
    clients.
    """
    import openai

    expected = [_answer(subject, *request) for request in (LONG, SHORT)]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT)

    def ask(messages, count, **more):
        return client.chat.completions.create(
            model=str(copy_with_template(subject)),
            messages=messages,
            max_tokens=count,
            temperature=0,
            **more,
        )

    answers = [ask(*request).choices[0].message.content for request in (LONG, SHORT)]
    assert answers == expected, (answers, expected)
    assert ask(*LONG).usage.completion_tokens == len(_tokens(subject, *LONG))
    # The short request starts during the long response; a third client waits for both in a thread.
    stream = (
        chunk.choices[0].delta.content or "" for chunk in ask(*LONG, stream=True) if chunk.choices
    )
    pieces = [next(piece for piece in stream if piece)]
    others = []
    thread = threading.Thread(target=lambda: others.append(ask(*SHORT).choices[0].message.content))
    thread.start()
    assert ask(*SHORT).choices[0].message.content == expected[1]
    pieces += filter(None, stream)
    thread.join()
    assert others == [expected[1]]
    # Bytes of an incomplete character at the end are not streamed.
    assert len(pieces) > 3 and "".join(pieces) == expected[0].rstrip("\ufffd"), (
        pieces,
        expected[0],
    )


def _tokens(subject: Subject, messages: list[dict], count: int) -> list[int]:
    template = subject.tokenizer.chat_template or TEMPLATE
    ids = subject.tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    found = subject.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        use_cache=False,
    )
    return found[0, ids.shape[1] :].tolist()


def _answer(subject: Subject, messages: list[dict], count: int) -> str:
    return subject.tokenizer.decode(_tokens(subject, messages, count), skip_special_tokens=True)


def copy_with_template(subject: Subject) -> Path:
    """Return a directory with the model's files and a chat template (the model's, if it has
    one).
    """
    copied = subject.work / "served"
    if not copied.exists():
        copied.mkdir()
        for file in subject.directory.iterdir():
            (copied / file.name).symlink_to(file)
        (copied / "chat_template.jinja").unlink(missing_ok=True)
        template = subject.tokenizer.chat_template or TEMPLATE
        (copied / "chat_template.jinja").write_text(template, encoding="utf-8")
    return copied


@contextmanager
def server(command: list, work: Path):
    """Run a server of OpenAI's protocol by `command` plus host and port; yield its URL."""
    # Below the range that Linux uses for outgoing connections.
    port = random.SystemRandom().randrange(15000, 32000)
    with open(work / "served.log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: subprocess.Popen, log) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise RuntimeError(
                    f"the server did not start: {log.read().strip()[-250:]}"
                ) from None
            time.sleep(0.2)
