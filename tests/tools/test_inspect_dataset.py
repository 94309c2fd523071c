import pytest
from datasets_for_tests import write_documents


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, tokenizer_path, run_tool):
    prefix = tmp_path_factory.mktemp("whole") / "data"
    options = ["--tokenizer", tokenizer_path, "--output-prefix", prefix]
    run_tool("preprocess_data", "--input", corpus, *options)
    return prefix


def test_sizes_lengths_and_first_documents_are_shown(whole, tokenizer_path, run_tool, texts):
    shown = ["--tokenizer", tokenizer_path, "--documents", 100, "--tokens", 10**6]
    output = run_tool("inspect_dataset", whole, *shown).stdout
    assert f"documents  {len(texts)}\n" in output
    assert "dtype      uint16\n" in output
    assert "length     min 2, median" in output
    for text in texts:
        assert f" tokens:\n{text}\n" in output.replace("\r\n", "\n") or "\r\n" in text


def test_ids_are_shown_without_a_tokenizer(tmp_path, run_tool):
    write_documents(tmp_path / "data", [[5, 6, 7]])
    shown = run_tool("inspect_dataset", tmp_path / "data", "--tokens", 2)
    assert shown.stdout.endswith("3 tokens:\n5 6 ...\n")


def test_negative_ids_are_damage_even_without_a_tokenizer(tmp_path, run_tool):
    write_documents(
        tmp_path / "data",
        [[5, 6, 7], [8, -1]],
        "<i4",
    )
    error = run_tool("inspect_dataset", tmp_path / "data", code=2).stderr
    assert "token 4 of the dataset has the id -1, but ids cannot be negative" in error


def test_documents_and_tokens_are_counted_by_length(tmp_path, run_tool):
    lengths = [1, 4, 4, 7, 8, 0, 100]
    write_documents(tmp_path / "data", [[0] * length for length in lengths])
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


def replaced(offset, data):
    return lambda content: content[:offset] + data + content[offset + len(data) :]


@pytest.mark.parametrize(
    "ending, damage, message",
    [
        ("idx", replaced(0, b"X"), "has a damaged header"),
        ("idx", replaced(17, b"\77"), "dtype code 63"),
        ("idx", replaced(18, b"\3"), "truncated or damaged"),
        ("bin", lambda content: content[:-2], "bytes, but its index describes"),
        ("bin", replaced(6, b"\xff\xff"), "has the id 65535, but the tokenizer has 800 ids"),
        ("bin", None, "data.bin does not exist"),
    ],
)
def test_damaged_and_missing_files_are_named(
    whole, tokenizer_path, tmp_path, run_tool, ending, damage, message
):
    contents = {name: whole.with_suffix(f".{name}").read_bytes() for name in ("bin", "idx")}
    contents[ending] = damage and damage(contents[ending])
    for name, content in contents.items():
        if content is not None:
            (tmp_path / f"data.{name}").write_bytes(content)
    options = ["--tokenizer", tokenizer_path]
    assert message in run_tool("inspect_dataset", tmp_path / "data", *options, code=2).stderr
