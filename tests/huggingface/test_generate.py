"""tools/generate.py prints the model's continuation, and reports errors in one sentence."""

import json
import os
import re
import runpy
import shutil
import sys

import pytest
from tool_runs import ROOT


@pytest.fixture
def generate(monkeypatch, capsys):
    """Run the tool in this process; returns its exit code, stdout and the last line of stderr."""
    monkeypatch.setattr("signal.signal", lambda *arguments: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
        capsys.readouterr()  # discard output that the test's own calls caused
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / "tools" / "generate.py"), run_name="__main__")
        printed = capsys.readouterr()
        return stop.value.code, printed.out, (printed.err.strip().splitlines() or [""])[-1]

    return run


NINE = ["--max-new-tokens", "9"]


@pytest.fixture
def expected(exports):
    """Return the text of a prompt and its greedy continuation by an export."""
    from transformers import AutoTokenizer

    def text(name, prompt, count):
        made = exports[name]
        tokenizer = AutoTokenizer.from_pretrained(made.directory, trust_remote_code=True)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = made.loaded.generate(ids, max_new_tokens=count, do_sample=False)[0]
        new = tokenizer.decode(output[ids.shape[1] :], skip_special_tokens=True)
        return f"{prompt}{new}\n"

    return text


def test_the_likeliest_tokens_follow_the_prompt(exports, generate, expected):
    arguments = ["--model", exports["tape"].directory, "--prompt", "import heapq", *NINE]
    code, out, _ = generate(*arguments)
    assert code == 0
    assert out == expected("tape", "import heapq", 9)
    sampled = [generate(*arguments, "--temperature", "1", "--seed", s)[1] for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_the_models_generation_config_is_ignored(exports, generate, tmp_path):
    shutil.copytree(exports["rope"].directory, tmp_path / "model")
    arguments = [
        "--model",
        tmp_path / "model",
        "--prompt",
        "import heapq",
        "--max-new-tokens",
        "20",
    ]
    temperatures = ("0", "1000")
    plain = [generate(*arguments, "--temperature", temperature)[1] for temperature in temperatures]
    file = tmp_path / "model" / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(
        json.dumps(
            settings | {"repetition_penalty": 9.0, "top_k": 1, "do_sample": True, "top_p": 0.1}
        )
    )
    assert [
        generate(*arguments, "--temperature", temperature)[1] for temperature in temperatures
    ] == plain


def test_prompts_that_fill_the_context_are_refused(exports, generate, expected):
    from transformers import AutoTokenizer

    directory = exports["rope"].directory  # has a context of 128 tokens
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def prompt(count):
        text = tokenizer.decode(tokenizer("import heapq; " * count)["input_ids"][:count])
        return text, len(tokenizer(text)["input_ids"])

    text, length = prompt(128)
    code, out, line = generate("--model", directory, "--prompt", text)
    assert code == 2
    assert not out
    assert line.startswith(f"error: prompt 1 has {length} tokens")
    text, length = prompt(120)
    assert 108 < length < 128
    code, out, _ = generate("--model", directory, "--prompt", text, "--max-new-tokens", "20")
    assert code == 0
    assert out == expected("rope", text, 128 - length)


def test_the_context_may_be_longer_than_in_training(exports, generate, expected):
    # All of these were trained on texts of 128 tokens.
    text = "def heappush(heap, item): " * 30
    options = ["--prompt", text, *NINE, "--context-length", "1000"]
    code, out, _ = generate("--model", exports["rope"].directory, *options)
    assert code == 0
    assert out == expected("rope", text, 9)

    code, out, line = generate("--model", exports["randpe"].directory, *options)
    assert code == 2
    assert not out
    assert line.startswith("error: prompt 1 cannot be continued: randpe cannot use a cache")


def test_each_of_several_prompts_is_continued_as_if_it_were_alone(exports, generate, tmp_path):
    options = ["--model", exports["tape"].directory, *NINE, "--temperature", "1", "--top-p", "0.9"]
    texts = ["import heapq", "def main(", "import heapq", " for x"]
    alone = [generate(*options, "--prompt", text)[1] for text in texts]
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfimport heapq\r\n for x\n")
    prompts = ["--prompt", texts[0], "--prompts-file", file, "--prompt", texts[1]]
    code, out, line = generate(*options, *prompts)
    assert code == 0, line
    assert out == "".join(
        f"==> prompt {number} of 4 <==\n{text}" for number, text in enumerate(alone, 1)
    )
    assert all(out.startswith(text) for text, out in zip(texts, alone, strict=True))


def test_top_p_samples_only_from_the_likeliest_tokens(exports, generate, expected):
    arguments = ["--model", exports["rope"].directory, "--prompt", "import heapq", *NINE]
    arguments += ["--temperature", "1"]
    code, out, _ = generate(*arguments, "--top-p", "1e-6")
    assert code == 0
    assert out == expected("rope", "import heapq", 9)
    sampled = generate(*arguments)[1]
    assert sampled == generate(*arguments, "--top-p", "1")[1] != out
    assert generate(*arguments, "--top-p", "0.3")[1] not in (sampled, out)


def test_errors_are_one_sentence(exports, generate, tmp_path):
    tape = exports["tape"].directory
    foreign = tmp_path / "foreign"
    shutil.copytree(tape, foreign)
    with open(foreign / "modeling_tape.py", "a", encoding="utf-8") as file:
        file.write("# another line\n")
    (tmp_path / "gap.txt").write_text("import\n\nheapq\n")
    broken = tmp_path / "broken"
    shutil.copytree(exports["rope"].directory, broken)
    os.truncate(broken / "model.safetensors", 5000)
    prompt = ["--prompt", "a"]
    for arguments, part in (
        ([foreign, *prompt], "--trust-remote-code"),
        ([tmp_path, *prompt], f"--model {tmp_path} cannot be used: "),
        ([tmp_path / "nowhere", *prompt], "nowhere does not exist"),
        ([exports["tape"].checkpoint, *prompt], "does not contain a tokenizer"),
        ([tape, *prompt, "--max-new-tokens", "0"], "--max-new-tokens"),
        ([tape], "--prompt is missing"),
        ([tape, "--prompts-file", tmp_path / "gap.txt"], "prompt 2 is empty"),
        ([tape, "--prompts-file", tape / "model.safetensors"], "cannot be read: "),
        ([tape, *prompt, "--top-p", "0.9"], "--top-p is 0.9, but --temperature 0"),
        ([tape, *prompt, "--temperature", "1", "--top-p", "nan"], "--top-p is nan"),
        ([tape, *prompt, "--seed", "-1"], "--seed is -1"),
        ([broken, *prompt], f"{broken} cannot be loaded: "),
    ):
        code, out, line = generate("--model", *arguments)
        assert code == 2
        assert not out
        assert part in line


def test_the_space_after_the_prompt_stays_with_tokenizers_that_strip_the_first_one(
    exports, generate, tmp_path
):
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    shutil.copytree(exports["rope"].directory, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    rows = Tokenizer.from_file(str(file)).get_vocab_size()
    words = {f"\u2581w{index}": index for index in range(rows)}
    settings = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "\u2581w0"},
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(file))
    code, out, line = generate(
        "--model", tmp_path / "model", "--prompt", "w5 w6", "--max-new-tokens", "2"
    )
    assert code == 0, line
    assert re.fullmatch(r"w5 w6 w\d+ w\d+\n", out), out
