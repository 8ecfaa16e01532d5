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
    # or a process that ends meanwhile would wait for it
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# HTTP statuses, words of an error or its type, and what is said: the first that fits.
_REASONS = (
    (
        ("401",),
        "NoCredentials|DefaultCredentials|RefreshError|Anonymous caller",
        "there are no valid credentials for {bucket} ({text}); {login}",
    ),
    (
        # before the rights: a store may answer 403 to a quota that is used up as well
        ("429", "507"),
        r"quota|\b(429|507)\b|insufficient storage|rate ?limit|slow ?down|resource_exhausted",
        "a quota of {bucket} is used up ({text}); raise it, delete what is not needed, or try again later",
    ),
    (
        ("403",),
        "PermissionError|forbidden|permission_denied",
        "the credentials do not permit it ({text}); give this account the right to {verb} objects of {bucket}, such as "
        "roles/storage.object{role} on Google Cloud",
    ),
)
_LOGIN = {"s3": "aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"}
_LOGIN_GOOGLE = "gcloud auth application-default login, or on a VM give its service account access to the bucket"


def explain(url: str, verb: str, error: BaseException) -> str:
    """Returns the message for an error of a file system or of TensorStore: the URL, the reason and the fix."""
    whole = one_line(error)
    # TensorStore goes on with its whole specification.
    text = re.split(r" \[(http_response|tensorstore_spec)", whole)[0][:300]
    protocol, _, rest = url.partition("://")
    bucket = f"{protocol}://{rest.partition('/')[0]}"
    in_text = re.search(r"(?:http_response_code='|, |\()(\d{3})\b", whole)
    code = str(
        getattr(error, "code", "")
        or getattr(error, "status", "")
        or (in_text[1] if in_text else "")
    )
    kind = "PermissionError" if isinstance(error, PermissionError) else type(error).__name__
    # without addresses, whose names may have any word or number
    words = f"{kind} " + re.sub(r"\w+://\S+", "", text)
    for codes, pattern, reason in _REASONS:
        if code in codes or re.search(pattern, words, re.IGNORECASE):
            login = _LOGIN.get(protocol.lower(), _LOGIN_GOOGLE)
            role = "User" if verb == "write" else "Viewer"
            told = reason.format(bucket=bucket, text=text, verb=verb, login=login, role=role)
            return f"cannot {verb} {url}: {told}"
    is_missing = isinstance(error, FileNotFoundError)
    if is_missing and error.__cause__ is not None and not is_absent(error):
        return explain(url, verb, error.__cause__)
    if verb == "write" and (is_missing or code == "404"):
        return f"cannot write {url}: there is no bucket {bucket}; check its name, or make it first"
    if is_missing:
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
