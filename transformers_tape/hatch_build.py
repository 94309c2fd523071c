"""Build hook that adds the modeling code of exported models to the package."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ModelFiles(BuildHookInterface):
    """Includes modeling code from the surrounding repository."""

    def initialize(self, version, build_data):
        """Add the files of TAPE models to `build_data`, for the wheel of any `version`. Raises
        FileNotFoundError outside a clone of the repository.
        """
        files = sorted(
            Path(self.root, "..", "megatron_tape", "huggingface", "modeling").glob("*_tape.py")
        )
        if not files:  # such as in an unpacked source distribution
            raise FileNotFoundError(
                "transformers-tape must be built in a clone of its repository: pip install"
                " ./transformers_tape"
            )
        for file in files:
            # Models with other encodings need code that only their exports contain.
            if file.stem.endswith("_encoded_tape"):
                continue
            build_data["force_include"][str(file.resolve())] = f"transformers_tape/{file.name}"
