import pytest


@pytest.fixture
def preprocess(run_tool, tokenizer_path, tmp_path):
    """Return a function that runs tools/preprocess_data.py; the output is `prefix`."""

    def run(*inputs_and_options, prefix="out", **others):
        usual = ["--tokenizer", tokenizer_path, "--output-prefix", tmp_path / prefix]
        return run_tool("preprocess_data", *usual, "--input", *inputs_and_options, **others)

    return run
