"""Whose code failed: errors in a user's hooks, models, tasks and other plug-ins are reported with their place."""

from __future__ import annotations

import site
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedmpi.common.errors import UserError

PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(path for path in (site.getusersitepackages(),) if isinstance(path, str)),
)


@contextmanager
def blaming(where: str) -> Iterator[None]:
    """Put `where` ("round 3, client 4") in front of errors; one from a user's file becomes a UserError that names it.

    An error without a user's file in its traceback is a defect of fedmpi; it becomes a RuntimeError.
    """
    try:
        yield
    except UserError as error:
        if getattr(error, "placed", False):
            raise
        said = str(error)
        raise _placed(said if said.startswith(f"{where}:") else f"{where}: {said}") from error
    except (Exception, SystemExit) as error:  # sys.exit() in a user's file would end the run with code 0
        found, known = in_user_code(error), remedy(error)
        if known is not None:
            raise _placed(": ".join(each for each in (where, found, known) if each)) from error
        if found is None:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        raise _placed(f"{where}: {found}: {type(error).__name__}: {error}") from error


def remedy(error: BaseException) -> str | None:
    """What a user can do about an error that torch or Python words for nobody in particular; None if unknown."""
    said = (str(error).strip().splitlines() or [""])[0]
    no_memory = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in said for word in no_memory)):
        return (
            f"out of memory ({said or type(error).__name__}); lower train.batch_size or evaluate.batch_size, take a "
            "smaller model, or start fewer ranks on a host"
        )
    if isinstance(error, ValueError) and said.startswith("Expected more than 1 value per channel when training"):
        return (
            "a batch of one sample gives batch normalisation nothing to normalise over; set train.drop_last=true, or a "
            "train.batch_size that leaves no single sample over"
        )
    return None


def _placed(text: str) -> UserError:
    error = UserError(text)
    error.placed = True  # type: ignore[attr-defined]  # an outer `blaming` has nothing to add
    return error


def in_user_code(error: BaseException) -> str | None:
    """`Bounded.loss at mine.py:12`, the innermost line outside of fedmpi, Python and installed packages; else None."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    if not frames:
        return None
    frame, line = frames[-1]
    named = next((_name(frame) for frame, _ in reversed(frames) if "self" in frame.f_locals), _name(frame))
    return f"{named} at {frame.f_code.co_filename}:{line}"


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(("<", f"{PACKAGE}/", *(f"{path}/" for path in _INSTALLED if path)))


def _name(frame: FrameType) -> str:
    name = frame.f_code.co_name
    return f"{type(frame.f_locals['self']).__name__}.{name}" if "self" in frame.f_locals else name
