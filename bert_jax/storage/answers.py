# SPDX-License-Identifier: Apache-2.0
"""Readable messages for the errors and delays of object stores and web servers."""

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator

from bert_jax.errors import one_line, without_secrets

_WAIT_SECONDS = 30.0  # before a line about the wait is printed
_told: dict[str, float] = {}  # when that line was last printed, by bucket


@contextlib.contextmanager
def told_if_slow(url: str) -> Iterator[None]:
    """Prints a line about a store if the block takes long; a line a minute at most for each bucket.

    fsspec and TensorStore silently retry for minutes when a store answers that it is busy (429, 503).
    """
    if "://" not in url:
        yield
        return
    bucket = "/".join(url.split("/")[:3])

    def tell() -> None:
        now = time.monotonic()
        if now - _told.get(bucket, -60.0) >= 60.0:
            _told[bucket] = now
            line = f"still waiting for {url} after {_WAIT_SECONDS:.0f} s: the store is slow, or too busy (429, 503)"
            print(without_secrets(f"{line} and is asked again"), file=sys.stderr, flush=True)

    timer = threading.Timer(_WAIT_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def explain(url: str, verb: str, error: Exception) -> str:
    """Returns the message for an error of a file system or of TensorStore: the URL, the reason and the fix."""
    whole = one_line(error)
    text = whole.partition(" [http_response")[0].partition(" [tensorstore_spec")[0][:300]
    bucket = "://".join((url.partition("://")[0], url.partition("://")[2].partition("/")[0]))
    match = re.search(r"(?:http_response_code='|, |\()(\d{3})\b", whole)
    code = str(
        getattr(error, "code", "") or getattr(error, "status", "") or (match[1] if match else "")
    )
    kind = type(error).__name__
    no_key = ("NoCredentials", "DefaultCredentials", "RefreshError")
    if (
        code == "401"
        or any(name in kind or name in text for name in no_key)
        or "Anonymous caller" in text
    ):
        remedy = (
            "aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            if url.partition("://")[0].lower() == "s3"
            else "gcloud auth application-default login, or on a VM give its service account access to the bucket"
        )
        return (
            f"cannot {verb} {url}: there are no valid credentials for {bucket} ({text}); {remedy}"
        )
    # without addresses, whose names may have any word or number
    message = re.sub(r"\w+://\S+", "", text)
    if code in ("429", "507") or re.search(
        r"quota|\b(429|507)\b|insufficient storage|rate ?limit|slow ?down|resource_exhausted",
        message,
        re.I,
    ):
        return (
            f"cannot {verb} {url}: a quota of {bucket} is used up ({text}); raise it, delete what is not needed, or "
            "try again later"
        )
    if (
        code == "403"
        or isinstance(error, PermissionError)
        or re.search("forbidden|permission_denied", message, re.I)
    ):
        role = "User" if verb == "write" else "Viewer"
        return (
            f"cannot {verb} {url}: the credentials do not permit it ({text}); give this account the right to {verb} "
            f"objects of {bucket}, such as roles/storage.object{role} on Google Cloud"
        )
    if (
        isinstance(error, FileNotFoundError)
        and not is_absent(error)
        and error.__cause__ is not None
    ):
        return explain(url, verb, error.__cause__)  # type: ignore[arg-type]
    if verb == "write" and (isinstance(error, FileNotFoundError) or code == "404"):
        return f"cannot write {url}: there is no bucket {bucket}; check its name, or make it first"
    if isinstance(error, FileNotFoundError):
        return f"{url} does not exist; check the address"
    return f"cannot {verb} {url}: {text}; check the address, your rights and the network"


def is_absent(error: FileNotFoundError) -> bool:
    """Returns whether a file is missing: fsspec raises the same if a web server refuses or cannot be reached."""
    cause = error.__cause__
    of_network = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return (
        not of_network
        or isinstance(cause, FileNotFoundError)
        or getattr(cause, "status", None) in (404, 410)
    )
