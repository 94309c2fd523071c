import resource

import pytest
from datasets_for_tests import write_documents


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, tokenizer_path, run_tool):
    prefix = tmp_path_factory.mktemp("whole") / "data"
    run_tool("preprocess_data", "--input", corpus, "--tokenizer", tokenizer_path, "--output-prefix", prefix)
    return prefix


def test_counts_lengths_and_first_documents_are_shown(whole, tokenizer_path, run_tool, texts):
    shown = ["--tokenizer", tokenizer_path, "--documents", 100, "--tokens", 10**6]
    output = run_tool("inspect_dataset", whole, *shown).stdout
    assert f"documents  {len(texts)}\n" in output
    assert "dtype      uint16\n" in output
    assert "length     min 1, median" in output
    for text in texts:
        assert f" tokens:\n{text}\n" in output.replace("\r\n", "\n") or "\r\n" in text


def test_ids_are_shown_without_a_tokenizer(tmp_path, run_tool):
    write_documents(tmp_path / "data", [[5, 6, 7]])
    assert run_tool("inspect_dataset", tmp_path / "data", "--tokens", 2).stdout.endswith("3 tokens:\n5 6 ...\n")


def write(prefix, lengths):
    write_documents(prefix, [[0] * length for length in lengths])
    return prefix


def test_documents_and_tokens_are_counted_by_length(tmp_path, run_tool):
    write(tmp_path / "data", [1, 4, 4, 7, 8, 0, 100])
    output = run_tool("inspect_dataset", tmp_path / "data", "--documents", 0).stdout
    assert output.split("tokens in a document")[1].splitlines()[1:] == [
        "                       0           1  14.3 %                0   0.0 %",
        "                  1 to 1           1  14.3 %                1   0.8 %",
        "                  2 to 3           0   0.0 %                0   0.0 %",
        "                  4 to 7           3  42.9 %               15  12.1 %  ######",
        "                 8 to 15           1  14.3 %                8   6.5 %  ###",
        "                16 to 31           0   0.0 %                0   0.0 %",
        "                32 to 63           0   0.0 %                0   0.0 %",
        "               64 to 127           1  14.3 %              100  80.6 %  " + 40 * "#",
    ]


def test_the_reach_of_a_mix_is_shown(tmp_path, run_tool):
    """Its figures are compared with real batches in tests/data/test_long_documents.py."""
    long, short = write(tmp_path / "long", [161] * 10), write(tmp_path / "short", [16] * 100)
    options = ["--documents", 0, "--seq-length", 32]
    output = run_tool("inspect_dataset", long, short, *options, "--long-documents", 100, 0.5).stdout
    rows = [line.split() for line in output.splitlines()[-4:]]
    # Half of the short documents' tokens are 8 or more from their start, of which a quarter follow a cut. The 161
    # tokens of the long ones are five sequences and a label.
    assert rows[0] == ["4", "8", "16", "24"]
    shares = [row[-6:-3:2] for row in rows]  # at the second and third distance
    alike = [(1610 * 153 / 161 + 1600 * 8 / 16) / 3210 * 0.75, 1610 * 145 / 161 / 3210 * 0.5]
    assert shares[1] == [f"{100 * alike[0]:.1f}", f"{100 * alike[1]:.1f}"]
    assert shares[2:] == [[f"{50 * 0.75 + 50 * 0.5 * 0.75:.1f}", "25.0"], ["75.0", "50.0"]]
    weighted = ["--long-documents", 100, 0.5, "--weights", 1, 3, "--plot", tmp_path / "reach.png"]
    output = run_tool("inspect_dataset", long, short, *options, *weighted).stdout
    assert f"{0.75 * 100 * (0.25 * 153 / 161 + 0.75 * 8 / 16):.1f} %" in output.splitlines()[-3]
    assert (tmp_path / "reach.png").read_bytes().startswith(b"\x89PNG")


def test_passes_over_either_part_are_shown_and_many_warned_about(tmp_path, run_tool):
    long, short = write(tmp_path / "long", [161] * 10), write(tmp_path / "short", [16] * 1000)
    mix = ["--documents", 0, "--seq-length", 32, "--long-documents", 100, 0.5, "--sequences", 1000]
    output = run_tool("inspect_dataset", long, short, *mix, "--plot", tmp_path / "reach.svg").stdout
    said = output.splitlines()[-3:]
    assert said[0].startswith(
        f"the run passes {16000 / 1610:.2f} times over the 10 documents of at least 100 tokens in"
    )
    assert said[1].startswith(f"warning: data.long_documents repeats the 10 documents of at least 100 tokens in {long}")
    assert said[2].startswith("the run passes 1.00 times over the 1,000 documents of less than 100 tokens in")
    assert (tmp_path / "reach.svg").read_bytes().startswith(b"<?xml")


def test_options_that_show_nothing_are_refused(tmp_path, run_tool):
    long = write(tmp_path / "long", [161] * 10)
    for options, message in (
        (["--long-documents", 100, 0.5], "--long-documents needs --seq-length"),
        (["--seq-length", 32, "--sequences", 100], "--sequences needs --long-documents"),
        (["--seq-length", 32, "--plot", "reach.gif"], "does not end in one of .png, .pdf, .svg"),
        (["--weights", 1, 2], "--weights gives 2 for 1 datasets"),
        (["--seq-length", 32, "--long-documents", 200, 0.5], "documents of at least 200 tokens, but no dataset has"),
        (["--seq-length", 32, "--long-documents", 100, 0.5], "documents of less than 100 tokens, but no dataset has"),
    ):
        error = run_tool("inspect_dataset", long, *options, code=2).stderr
        assert message in error and error.rstrip().count("\n") == error.count("checking")
    for option in (["--documents", "-1"], ["--tokens", "-1"], ["--documents", 2**70], ["--tokens", "\u0663"]):
        assert "is not a whole number" in run_tool("inspect_dataset", long, *option, code=2).stderr
    error = run_tool("inspect_dataset", long, "--weights", "\u0663", code=2).stderr
    assert "'\u0663' is not a number above 0" in error
    for minimum, share in ((0, 0.5), (1.5, 0.5), (1e300, 0.5), (8, 0), (8, 1.1), (8, "nan")):
        error = run_tool("inspect_dataset", long, "--seq-length", 32, "--long-documents", minimum, share, code=2).stderr
        assert "--long-documents" in error


def test_more_datasets_than_can_be_open_are_refused(tmp_path, run_tool, monkeypatch):
    small = write(tmp_path / "small", [5])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    for tool, arguments, fix in (
        ("inspect_dataset", [small] * 60, "name fewer at once"),
        (
            "merge_datasets",
            ["--output-prefix", tmp_path / "merged", "--input", *[small] * 60],
            "merge some of them first",
        ),
    ):
        error = run_tool(tool, *arguments, code=2).stderr
        assert "60 datasets, for which a process needs" in error and "64 are allowed; raise the hard limit" in error
        assert error.endswith(f"or {fix}\n")


def replaced(offset, data):
    return lambda content: content[:offset] + data + content[offset + len(data) :]


@pytest.mark.parametrize(
    "ending, damage, message",
    [
        ("idx", replaced(0, b"X"), "header is damaged"),
        ("idx", replaced(9, b"\2"), "has version 2"),
        ("idx", replaced(17, b"\77"), "unknown dtype code 63"),
        ("idx", replaced(18, b"\3"), "cut off or damaged"),
        ("idx", lambda content: content[:20], "header is damaged"),
        ("bin", lambda content: content[:-2], "bytes where the index counts"),
        ("bin", replaced(6, b"\xff\xff"), "token 3 is 65535, outside the vocabulary of 800"),
        ("bin", None, "data.bin does not exist"),
    ],
)
def test_damaged_and_missing_files_are_named(whole, tokenizer_path, tmp_path, run_tool, ending, damage, message):
    contents = {name: whole.with_suffix(f".{name}").read_bytes() for name in ("bin", "idx")}
    contents[ending] = damage and damage(contents[ending])
    for name, content in contents.items():
        if content is not None:
            (tmp_path / f"data.{name}").write_bytes(content)
    assert message in run_tool("inspect_dataset", tmp_path / "data", "--tokenizer", tokenizer_path, code=2).stderr
