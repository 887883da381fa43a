"""Publish a saved model on the Hugging Face Hub, whole or not at all.

    hf auth login                                                                   # once, a token that may write
    python -m training_recipes.publish trained_models/ColbertLoss-pylate user/name
    python -m training_recipes.publish trained_models/ColbertLoss-pylate user/name --private

All files go up in one commit, so that what breaks half-way leaves nothing half published; run the same command again
and only what is missing is sent. The folder is never changed. The published card names the model `user/name` in its
code. State to resume a training from stays at home: checkpoints, the optimizer, the queue and the momentum encoder of
a MoCo loss (`_st_colbert_losses*.pt`).
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import NoReturn

from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

LEFT_OUT = [
    "_*",
    "*_st_colbert_losses*.pt",
    "checkpoint-*",
    *("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "trainer_state.json", "training_args.bin"),
    *(".git/*", ".cache/*", "*/.cache/*", "*__pycache__*"),
]
LOADERS = r"((?:models\.ColBERT|MultiVectorEncoder)\(\s*(?:model_name_or_path=)?)"  # of both libraries
LOGIN = (
    "make a token that may write at https://huggingface.co/settings/tokens, then run `hf auth login` or set HF_TOKEN"
)


class CannotPublish(Exception):  # noqa: N818
    """Says in one line what is wrong and what helps."""


def main(argv: list[str]) -> None:
    """Publish a folder."""
    parser = ArgumentParser(prog="python -m training_recipes.publish", description="Publish a saved model on the Hub.")
    parser.add_argument("folder", type=Path, help="where a model was saved")
    parser.add_argument("name", help="of the repository, user/name")
    parser.add_argument("--private", action="store_true", help="only you can see a repository that is made now")
    parser.add_argument("--exist_ok", action="store_true", help="commit on top of a repository that has files already")
    parser.error = fail  # type: ignore[method-assign]
    arguments = parser.parse_args(argv)
    try:
        files_of(arguments.folder)
        name = reserve(arguments.name, private=arguments.private, exist_ok=arguments.exist_ok)
        print(f"Published: {upload(arguments.folder, name)}")
    except CannotPublish as error:
        fail(str(error))


def reserve(name: str, *, private: bool = False, exist_ok: bool = False, token: str | None = None) -> str:
    """Find out that a model can be published under a name, before any training, and make the repository.

    Returns:
        The name with its user.

    Raises:
        CannotPublish: The token, the name or the connection will not do, or the repository has files already.
    """
    if constants.HF_HUB_OFFLINE:
        raise CannotPublish("HF_HUB_OFFLINE is set, so nothing can be published; unset it")
    try:
        validate_repo_id(name)
        api = HfApi(token=token)
        role = api.whoami().get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise CannotPublish(f"the token may only read; {LOGIN}")
        name = api.create_repo(name, private=private or None, exist_ok=True).repo_id
        repository = api.model_info(name)
    except CannotPublish:
        raise
    except Exception as error:  # the Hub's client raises of many kinds
        raise CannotPublish(reason(error, name)) from error
    if private and not repository.private:
        raise CannotPublish(
            f"{name} is there already and public; make it private in its settings, or take another name"
        )
    present = [file.rfilename for file in repository.siblings or [] if file.rfilename != ".gitattributes"]
    if present and not exist_ok:
        raise CannotPublish(
            f"{name} has files already, {present[0]} among them; --exist_ok makes a new commit on top of them"
        )
    return name


def upload(folder: Path, name: str, *, token: str | None = None) -> str:
    """Commit a folder's model to a repository that is there, and return the commit's address.

    Raises:
        CannotPublish: The folder holds no model, the Hub refused, or the connection broke. The folder is as it was.
    """
    operations = [
        CommitOperationAdd(path, named(file, name) if path == "README.md" else file)
        for path, file in files_of(folder).items()
    ]
    try:
        return HfApi(token=token).create_commit(name, operations, commit_message="Publish the model").commit_url
    except Exception as error:  # the Hub's client raises of many kinds
        raise CannotPublish(f"{reason(error, name)}. The model is whole in {folder}") from error


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files that are published, by their path in the repository.

    Raises:
        CannotPublish: The folder holds no model.
    """
    if not (folder / "modules.json").is_file():
        raise CannotPublish(f"{folder} holds no saved model (no modules.json); give the folder of save_pretrained")
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {path: files[path] for path in filter_repo_objects(files, ignore_patterns=LEFT_OUT)}


def named(card: Path, name: str) -> bytes:
    """Return a card that loads the model by this name, and its example images from the Hub."""
    images = f"{constants.ENDPOINT}/{name}/resolve/main/assets/"  # the Hub shows no relative ones
    text = with_model_name(card.read_text(encoding="utf-8"), name)
    return re.sub(r"""(["'])assets/""", lambda quote: quote[1] + images, text).encode()


def with_model_name(card: str, name: str) -> str:
    """Put a model's name, or folder, into the calls of a card that load it."""
    return re.sub(LOADERS + r'"[^"]*"', lambda call: f'{call[1]}"{name}"', card)


def reason(error: Exception, name: str) -> str:
    """Say what the Hub's client raised, and what helps."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError):
        return f"no token found; {LOGIN}"
    if isinstance(error, HFValidationError):
        return f"{name!r} is no name for a repository; give user/name, of letters, digits, '-', '_' and '.'"
    if status == 401:
        return f"the Hub does not know the token; {LOGIN}"
    if status == 403:
        return f"the token may not write to {name}; check the user's or organisation's name, or {LOGIN}"
    if isinstance(error, ValueError) and "README.md" in str(error):
        return f"the Hub refuses the card: {error}; correct README.md and publish again"
    what = getattr(error, "server_message", None) or str(error) or type(error).__name__
    if status is not None:
        return f"the Hub answered {status}: {what}; publish again later"
    return f"the connection to {constants.ENDPOINT} failed: {what}; publish again to send what is missing"


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong, and stop."""
    sys.exit(f"publish: {' '.join(message.split())}")


if __name__ == "__main__":
    main(sys.argv[1:])
