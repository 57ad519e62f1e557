"""Report errors in hooks, models, tasks and other plug-ins with the file and line of the user's code."""

from __future__ import annotations

import inspect
import re
import site
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError

PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(path for path in (site.getusersitepackages(),) if isinstance(path, str)),
)


OUT_OF_MEMORY = (
    "out of memory",
    "lower train.batch_size or evaluate.batch_size, use a smaller model, or start fewer ranks per host",
)
# Words in a message of torch -> the meaning of the error, and its remedy.
KNOWN_ERRORS = {
    ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "ALLOCATION_FAILED"): OUT_OF_MEMORY,
    ("CUDNN_STATUS_NOT_INITIALIZED", "CUBLAS_STATUS_NOT_INITIALIZED"): OUT_OF_MEMORY,  # the usual cause
    ("no kernel image is available", "driver version is insufficient", "driver on your system is too old"): (
        "this PyTorch does not support this GPU or its driver",
        "install a build of PyTorch that does (https://pytorch.org/get-started/locally), or use compute.device=cpu",
    ),
    ("device-side assert triggered",): (
        "a value on the GPU is out of range, usually a label or token for which the model has no output",
        "run with compute.device=cpu, where the error names the operation",
    ),
    ("does not have a deterministic implementation",): (
        "compute.deterministic: true is set, but an operation has no deterministic implementation",
        "use another layer or loss, or set compute.deterministic: false",
    ),
    ("because it uses CuBLAS",): (
        "compute.deterministic: true has no effect on cuBLAS, which was used earlier in this process",
        "set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before Python starts",
    ),
    ("Expected more than 1 value per channel",): (
        "batch normalisation cannot be applied to a batch of one sample",
        "set train.drop_last: true, another train.batch_size, or a smaller train.accumulate",
    ),
}


@contextmanager
def add_error_context(where: str, *passing: type[Exception]) -> Iterator[None]:
    """Add the place in the run and the line of the user's code to the messages of errors raised within the block.

    Errors from a user's file and errors with a known fix become a UserError. All others are defects in fedmpi and
    become a RuntimeError.

    Args:
        where: the place in the run ("round 3, client 4"), with which the new message starts.
        passing: types of errors that are raised unchanged.
    """
    try:
        yield
    except passing:
        raise
    except UserError as error:
        if error.has_context:
            raise
        text, place = str(error), None if error.has_source_line else find_user_line(error)
        kind = where.partition(" ")[0]  # do not repeat "round 0" in front of "round 0: method Mine, ..."
        section = kind.rstrip(":").partition(".")[0]  # nor put "data.partition" in front of "data.client_test: ..."
        starts = (f"{kind} ", f"{kind}.", f"{kind}:", f"{section}.", "round ")
        text = text if text.startswith(starts) else f"{where}: {text}"
        raise UserError(f"{text} ({place})" if place else text, has_context=True) from error
    except (Exception, SystemExit) as error:  # sys.exit() in a user's file would end the run with code 0
        place, known = find_user_line(error), explain_known_error(error)
        text = known or (f"{type(error).__name__}: {error}" if place else "")
        if not text:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        raise UserError(": ".join(each for each in (where, place, text) if each), has_context=True) from error


def explain_known_error(error: BaseException) -> str | None:
    """Explain a known error of torch or Python, such as a lack of memory, and its remedy; None for all others."""
    text = (str(error).strip().splitlines() or [""])[0]
    known = OUT_OF_MEMORY if isinstance(error, MemoryError) else None
    if isinstance(error, RuntimeError) or text.startswith("Expected more than 1 value"):
        known = next((fix for words, fix in KNOWN_ERRORS.items() if any(word in text for word in words)), None)
    if size := re.search(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes", text):
        text = f"tried to allocate {int(size[1]):,} bytes"
    return None if known is None else f"{known[0]} ({text or type(error).__name__}); {known[1]}"


def format_error_line(error: BaseException, where: str) -> str:
    """Format an error on one line, with its place in the run and in the code.

    Args:
        error: the error. If it is not a UserError but has one among its causes, the message of that one is used.
        where: the place in the run.

    Returns:
        A line such as `round 3, client 4: ... (at file.py:12)`.
    """
    while error.__cause__ is not None and not isinstance(error, UserError):
        error = error.__cause__
    text = (str(error).strip().splitlines() or [""])[0] if isinstance(error, UserError) else explain_known_error(error)
    text = text or f"{type(error).__name__}: {error}".strip().splitlines()[0]
    while error.__cause__ is not None:
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f"{last[0].filename}:{last[0].lineno}" if last else ""
    text = text if text.startswith(where) else f"{where}: {text}"
    return text if not place or place in text else f"{text} (at {place})"


def make_located_error(text: str, *candidates: Any) -> UserError:
    """Create a UserError that names the file and line of the user's code.

    Args:
        text: the message.
        candidates: functions, classes or objects; the first one that is defined in a user's file is named.
    """
    place = next((location for each in candidates if (location := describe_source_location(each))), "")
    return UserError(f"{text} ({place})" if place else text, has_source_line=True)


def describe_source_location(what: Any) -> str:
    """Return where an object is defined in a user's file (`Bounded.loss at mine.py:12`).

    The result is "" if the object is not defined in a user's file.
    """
    what = inspect.unwrap(getattr(what, "func", what))  # a partial has its function in `func`
    what = getattr(what, "__func__", what)
    what = what if inspect.isfunction(what) or inspect.isclass(what) else type(what)
    try:
        file, line = inspect.getsourcefile(what), inspect.getsourcelines(what)[1]
    except (OSError, TypeError):  # defined interactively, or built into Python
        return ""
    return f"{what.__qualname__} at {file}:{line}" if file and is_users_file(file) else ""


def find_user_line(error: BaseException) -> str | None:
    """Return the innermost traceback line that lies in a user's file (`Bounded.loss at mine.py:12`), or None."""
    frames = [each for each in traceback.walk_tb(error.__traceback__) if is_users_file(each[0].f_code.co_filename)]
    if not frames:
        return None
    frame, line = frames[-1]
    # The innermost method, if there is one, says more than a function that it calls.
    method = next((each for each, _ in reversed(frames) if "self" in each.f_locals), None)
    name = f"{type(method.f_locals['self']).__name__}.{method.f_code.co_name}" if method else frame.f_code.co_name
    return f"{name} at {frame.f_code.co_filename}:{line}"


def is_users_file(file: str) -> bool:
    """Return whether a file is the user's: not part of fedmpi, Python or an installed package."""
    return not file.startswith(("<", f"{PACKAGE}/", *(f"{path}/" for path in _INSTALLED if path)))
