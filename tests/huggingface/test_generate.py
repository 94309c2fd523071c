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


def test_the_likeliest_tokens_follow_the_prompt(exports, generate):
    from transformers import AutoTokenizer

    made = exports["tape"]
    tokenizer = AutoTokenizer.from_pretrained(made.directory, trust_remote_code=True)
    ids = tokenizer("import heapq", return_tensors="pt")["input_ids"]
    expected = made.loaded.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    arguments = ["--model", made.directory, "--prompt", "import heapq", "--max-new-tokens", "9"]
    code, out, _ = generate(*arguments)
    assert (
        code == 0 and out == f"import heapq{tokenizer.decode(expected, skip_special_tokens=True)}\n"
    )
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


def test_prompts_that_fill_the_context_are_refused(exports, generate):
    from transformers import AutoTokenizer

    made = exports["rope"]  # has a context of 128 tokens
    tokenizer = AutoTokenizer.from_pretrained(made.directory)

    def prompt(count):
        text = tokenizer.decode(tokenizer("import heapq; " * count)["input_ids"][:count])
        return text, len(tokenizer(text)["input_ids"])

    text, length = prompt(128)
    code, out, line = generate("--model", made.directory, "--prompt", text)
    assert code == 2 and not out and line.startswith(f"error: prompt 1 has {length} tokens")
    text, length = prompt(120)
    assert 108 < length < 128
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = made.loaded.generate(ids, max_new_tokens=128 - length, do_sample=False)[0, length:]
    code, out, _ = generate("--model", made.directory, "--prompt", text, "--max-new-tokens", "20")
    assert code == 0 and out == f"{text}{tokenizer.decode(expected, skip_special_tokens=True)}\n"


def test_each_of_several_prompts_is_continued_as_if_it_were_alone(exports, generate, tmp_path):
    options = [
        "--model",
        exports["tape"].directory,
        "--max-new-tokens",
        "9",
        "--temperature",
        "1",
        "--top-p",
        "0.9",
    ]
    texts = ["import heapq", "def main(", "import heapq", " for x"]
    alone = [generate(*options, "--prompt", text)[1] for text in texts]
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfimport heapq\r\n for x\n")
    prompts = [
        "--prompt",
        texts[0],
        "--prompts-file",
        tmp_path / "prompts.txt",
        "--prompt",
        texts[1],
    ]
    code, out, line = generate(*options, *prompts)
    assert code == 0, line
    headers = [f"==> prompt {number} of 4 <==\n" for number in (1, 2, 3, 4)]
    assert out == "".join(header + text for header, text in zip(headers, alone, strict=True))
    assert all(out.startswith(text) for text, out in zip(texts, alone, strict=True))


def test_top_p_samples_only_from_the_likeliest_tokens(exports, generate):
    from transformers import AutoTokenizer

    made = exports["rope"]
    tokenizer = AutoTokenizer.from_pretrained(made.directory)
    ids = tokenizer("import heapq", return_tensors="pt")["input_ids"]
    made.loaded.eval()
    arguments = [
        "--model",
        made.directory,
        "--prompt",
        "import heapq",
        "--max-new-tokens",
        "9",
        "--temperature",
        "1",
    ]
    likeliest = made.loaded.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    code, out, _ = generate(*arguments, "--top-p", "1e-6")
    assert (
        code == 0
        and out == f"import heapq{tokenizer.decode(likeliest, skip_special_tokens=True)}\n"
    )
    sampled = generate(*arguments)[1]
    assert sampled == generate(*arguments, "--top-p", "1")[1] != out
    assert generate(*arguments, "--top-p", "0.3")[1] not in (sampled, out)


def test_errors_are_one_sentence(exports, generate, tmp_path):
    tape = exports["tape"].directory
    foreign = tmp_path / "foreign"
    shutil.copytree(tape, foreign)
    with open(foreign / "modeling_tape.py", "a", encoding="utf-8") as file:
        file.write("# another line\n")
    gap = tmp_path / "gap.txt"
    gap.write_text("import\n\nheapq\n")
    gap.with_name("long.txt").write_text(f"import\n{'import heapq; ' * 200}\n")
    for arguments, refusal in (
        ([foreign, "--prompt", "a"], "--trust-remote-code"),
        ([tmp_path, "--prompt", "a"], f"--model {tmp_path} cannot be used: "),
        ([tmp_path / "nowhere", "--prompt", "a"], "nowhere does not exist"),
        ([exports["tape"].checkpoint, "--prompt", "a"], "does not contain a tokenizer"),
        ([tape, "--prompt", ""], "prompt 1 is empty"),
        ([tape, "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        ([tape], "--prompt is missing"),
        ([tape, "--prompt", "a", "--prompt", ""], "prompt 2 is empty"),
        ([tape, "--prompts-file", gap], "prompt 2 is empty"),
        ([tape, "--prompts-file", gap.with_name("long.txt")], "prompt 2 has "),
        (
            [tape, "--prompts-file", tmp_path / "none.txt"],
            f"{tmp_path / 'none.txt'} cannot be read: ",
        ),
        (
            [tape, "--prompts-file", tape / "model.safetensors"],
            "model.safetensors cannot be read: ",
        ),
        ([tape, "--prompt", "a", "--top-p", "0.9"], "--top-p is 0.9, but --temperature 0"),
        ([tape, "--prompt", "a", "--temperature", "1", "--top-p", "0"], "--top-p is 0.0"),
        ([tape, "--prompt", "a", "--temperature", "1", "--top-p", "nan"], "--top-p is nan"),
    ):
        code, out, line = generate("--model", *arguments)
        assert code == 2 and not out and line.startswith("error: ") and refusal in line
    shutil.copytree(exports["rope"].directory, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "model.safetensors", 5000)
    code, _, line = generate("--model", tmp_path / "broken", "--prompt", "a")
    assert code == 2 and line.startswith(f"error: {tmp_path / 'broken'} cannot be loaded: ")


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
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(file))
    code, out, line = generate(
        "--model", tmp_path / "model", "--prompt", "w5 w6", "--max-new-tokens", "2"
    )
    assert code == 0, line
    assert re.fullmatch(r"w5 w6 w\d+ w\d+\n", out), out
