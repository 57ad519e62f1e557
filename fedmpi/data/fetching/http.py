"""One file over HTTP, whole or not at all: what has come lies beside it as NAME.part until its checksum is right, and
is gone on with after a break, in this process or in the next."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from fedmpi.common.errors import UserError

TIMEOUT_S = 30.0  # without a byte
WAITS_S = (0.0, 1.0, 2.0, 4.0)  # before trying again; begun anew whenever something has come
CHUNK = 1 << 20  # bytes
FINAL = range(400, 500)  # answers that another try will not change,
FOR_NOW = (408, 425, 429)  # but for these

Tell = Callable[[str], None]


class NotGivenError(Exception):
    """This address does not give the file; another one may."""


def get(urls: Sequence[str], to: Path, md5: str, tell: Tell) -> None:
    """Fetch `to` from the first of `urls` that gives it.

    md5: what the file must have; "": nothing is known, and what a former process left is not gone on with, for it may
    be of another file. tell: takes a line of progress, again and again.
    Raises UserError with what each address said. Then `to` does not exist; NAME.part is kept, to be gone on with.
    """
    part = to.with_name(f"{to.name}.part")
    to.parent.mkdir(parents=True, exist_ok=True)
    if not md5:
        part.unlink(missing_ok=True)
    said = []
    for url in urls:
        try:
            begun = _size(part) > 0
            found = _fetched(url, part, md5, tell)
            if found != md5 and begun:  # what an earlier try has left may have been of another file
                found = _fetched(url, part, md5, tell)
            if found == md5:
                os.replace(part, to)
                return
            said.append(f"{url}: what came has the MD5 {found}, not {md5}; it was deleted")
        except NotGivenError as error:
            said.append(f"{url}: {error}")
    raise UserError("\n".join(said))


def digest(path: Path) -> str:
    """The MD5 of a file."""
    total = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            total.update(chunk)
    return total.hexdigest()


def _fetched(url: str, part: Path, md5: str, tell: Tell) -> str:
    """The MD5 of what came, which is deleted where that is another one; "" if nobody asks."""
    _whole(url, part, tell)
    found = digest(part) if md5 else ""
    if found != md5:
        part.unlink()
    return found


def _whole(url: str, part: Path, tell: Tell) -> None:
    """Pour until all has come; tries again where a connection breaks."""
    waits = list(WAITS_S)
    while True:
        before = _size(part)
        try:
            _pour(url, part, tell)
            return
        except urllib.error.HTTPError as error:
            if error.code in FINAL and error.code not in FOR_NOW:
                raise NotGivenError(f"HTTP {error.code} {error.reason}") from error
            problem = f"HTTP {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, socket.gaierror):  # no network: waiting does not mend it
                raise NotGivenError(str(reason)) from error
            problem = str(reason) or type(error).__name__
        if _size(part) > before:
            waits = list(WAITS_S)
        if not waits:
            raise NotGivenError(problem)
        time.sleep(waits.pop(0))


def _pour(url: str, part: Path, tell: Tell) -> None:
    """Append to `part` what it still lacks. Raises OSError if the connection ends before the file does."""
    have = _size(part)
    headers = {"User-Agent": "fedmpi", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # there is nothing behind what we have
            if _total(error.headers.get("Content-Range", "")) == have:
                return
            part.unlink()
            raise OSError("its length has changed; begun anew") from error
        raise
    with answer:
        span = answer.headers.get("Content-Range", "")
        goes_on = answer.status == 206 and span.startswith(f"bytes {have}-")
        if answer.status == 206 and not goes_on:
            part.unlink(missing_ok=True)
            raise OSError(f"another range than asked for: {span!r}")
        length = answer.headers.get("Content-Length", "")
        total = _total(span) if goes_on else int(length) if length.isdigit() else None
        came = have if goes_on else 0
        with part.open("ab" if goes_on else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                came += len(chunk)
                tell(f"{part.name.removesuffix('.part')}: {_progress(came, total)}")
    if total is not None and came != total:
        raise OSError(f"the connection ended after {came:,} of {total:,} bytes")


def _progress(came: int, total: int | None) -> str:
    mega = f"{came / 1e6:.1f}"
    return f"{mega} MB" if not total else f"{mega} of {total / 1e6:.1f} MB, {100 * came / total:.0f} %"


def _total(span: str) -> int | None:
    """The length of the whole file in `bytes 5-9/10` or `bytes */10`."""
    found = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", span)
    return int(found[1]) if found else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
