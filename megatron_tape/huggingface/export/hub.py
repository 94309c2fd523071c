"""Upload an exported model to the Hugging Face Hub, with the user's own login."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from megatron_tape import command_line
from megatron_tape.data.tokenizer import CHAT_TEMPLATES, TOKENIZER_FILES
from megatron_tape.errors import UserError
from megatron_tape.huggingface.export.position_picture import PICTURE

REPLACED = ("model*.safetensors", "model.safetensors.index.json", "*_tape.py", PICTURE)
"""What an upload deletes of earlier ones, beside tokenizers: it could be read in place of what is new."""


def repository_of(name: str) -> str:
    """Return OWNER/NAME for the `name` of a model, NAME or OWNER/NAME, that the user may upload.

    Asks the Hub who the user is. Raises UserError if the name is not one, nobody is
    logged in, the Hub cannot be reached, or the owner is neither the user nor one of the user's organizations.
    """
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise UserError("--push-to-hub", f"is {name!r}, which cannot be a model's name: {error}") from None
    with _errors_of_hub("--push-to-hub needs a login to the Hugging Face Hub"):
        user = HfApi().whoami()
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs", ()))]
    owner, _, rest = name.rpartition("/")
    if owner and owner not in owners:
        problem = (
            f"is {name}, but the login is that of {user['name']}, who can upload to "
            f"{', '.join(f'{one}/{rest}' for one in owners)}"
        )
        raise UserError("--push-to-hub", problem)
    return f"{owner or user['name']}/{rest}"


def upload(directory: str | Path, repository: str, private: bool) -> None:
    """Upload all files of `directory` in one commit to the model OWNER/NAME, which is created if it does not exist.

    Weights, code, pictures and tokenizers of an earlier upload are replaced; the repository's other files are kept. A
    new model is `private`, or what is usual for the owner; an existing one stays what it is. Raises UserError if that
    fails; the directory stays as it is.
    """
    again = f"{directory} is complete, but was not uploaded; try again with: hf upload {repository} {directory}"
    with _errors_of_hub(again), command_line.step(f"uploading {directory} to {repository}"):
        api = HfApi()
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            commit_message=f"Upload {Path(directory).name}",
            delete_patterns=[*REPLACED, *TOKENIZER_FILES, f"{CHAT_TEMPLATES}/*"],
        )
    command_line.say(f"uploaded {directory} to {url}")


@contextmanager
def _errors_of_hub(failed: str) -> Iterator[None]:
    """Turn what goes wrong between here and the Hub into a UserError that says what `failed`."""
    try:
        yield
    except LocalTokenNotFoundError:
        raise UserError(failed, "and nobody is logged in", "run: hf auth login") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = "the Hub does not accept the token (run: hf auth login)" if status == 401 else error.server_message
        raise UserError(failed, f"(HTTP status {status}: {reason or error.response.reason_phrase})") from None
    except (OSError, ValueError) as error:
        raise UserError(failed, f"({' '.join(str(error).split())})") from None
    except Exception as error:
        # Failed connections are errors of the HTTP library, which differs between versions of huggingface_hub.
        if not type(error).__module__.startswith("httpx"):
            raise
        raise UserError(failed, f"(the Hub cannot be reached: {error})") from None
