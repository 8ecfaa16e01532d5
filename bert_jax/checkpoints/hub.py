# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub: hf://ORG/NAME, or one of its revisions. The only home of huggingface_hub."""

import re
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError, one_line, package_needed

_FIXES = {  # by the status with which the hub refuses
    401: "log in again: hf auth login",
    403: "use a token with write access, or another ORG",
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def parse_url(url: str, revision: str = "") -> tuple[str, str]:
    """Returns repository and revision of hf://ORG/NAME or hf://ORG/NAME@REVISION; "" is the main branch.

    Raises: InputError if it names no repository, or if two revisions are given.
    """
    name, _, inside = url.removeprefix("hf://").partition("@")
    if not _NAME.fullmatch(name) or len(name) > 96 or "--" in name or ".." in name:
        raise InputError(
            f"{url} names no repository of the hub; write hf://ORG/NAME, of letters, digits, - _ and ."
        )
    if inside and revision and inside != revision:
        raise InputError(f"{url} and --revision={revision} name two revisions; give one of them")
    return name, inside or revision


def import_hub(url: str) -> Any:
    """Returns huggingface_hub. Raises: InputError if it is not installed."""
    with package_needed("huggingface_hub", url, "'bert_jax[hub]'"):
        import huggingface_hub.errors
    return huggingface_hub


def check_upload(url: str, revision: str) -> None:
    """Runs the checks that are possible before a model is converted.

    Raises: InputError if the URL names no repository, huggingface_hub is not installed, or there is no token.
    """
    parse_url(url, revision)
    huggingface_hub = import_hub(url)
    if not huggingface_hub.get_token():
        page = f"{huggingface_hub.HfApi().endpoint}/settings/tokens"
        raise InputError(
            f"{url} needs a token that may write; make one at {page}, and log in by `hf auth login`"
        )


def upload_model(directory: Path, url: str, revision: str, message: str, private: bool) -> str:
    """Uploads the files of a directory in one commit, and returns its address.

    The repository is created if it is missing, private or not, and so is the branch `revision`, from the main branch.

    Raises: InputError if huggingface_hub is not installed, the hub cannot be reached, or it refuses.
    """
    check_upload(url, revision)
    name, revision = parse_url(url, revision)
    huggingface_hub = import_hub(url)
    api = huggingface_hub.HfApi(library_name="bert_jax")
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if revision:
            api.create_branch(name, branch=revision, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=name,
                folder_path=directory,
                revision=revision or None,
                commit_message=message,
            ).commit_url
        )
    except Exception as error:  # noqa: BLE001 - errors of the network have no type in common over its versions
        reason = one_line(Exception(getattr(error, "server_message", None) or error))[:200]
        status = getattr(getattr(error, "response", None), "status_code", 0)
        fix = _FIXES.get(status, f"check the network and {api.endpoint}")
        raise InputError(f"cannot upload to {url} ({status}): {reason}; {fix}") from None
