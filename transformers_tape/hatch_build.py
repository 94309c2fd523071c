"""Adds the models' own files, which an exported model carries as well, to what is built."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ModelFiles(BuildHookInterface):
    """Takes the files from the repository around this folder."""

    def initialize(self, version, build_data):
        """Add the files of TAPE models to the package; those of other encodings need a file that each export has."""
        files = sorted(Path(self.root, "..", "megatron_tape", "huggingface", "modeling").glob("*_tape.py"))
        if not files:  # such as in an unpacked source distribution
            raise FileNotFoundError(
                "transformers-tape is built in a clone of its repository: pip install ./transformers_tape"
            )
        for file in files:
            if file.stem.endswith("_encoded_tape"):
                continue
            build_data["force_include"][str(file.resolve())] = f"transformers_tape/{file.name}"
