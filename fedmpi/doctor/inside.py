"""The child process of the doctor: runs probes in order, and says each line as soon as it is found, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

from fedmpi.doctor import libraries, wanted
from fedmpi.doctor.lines import BAD, ODD, Line, said

TOPICS: dict[str, tuple[Callable[..., Iterator[Line]], ...]] = {
    "torch": (libraries.torch, libraries.bytecode, libraries.gpus, libraries.torchvision),
    "mpi": (libraries.mpi, libraries.mpi_init),
    "config": (wanted.config,),
}


def main() -> None:
    topic, *arguments = sys.argv[1:]
    for probe in TOPICS[topic]:
        _say("at", probe.__name__)
        try:
            for line in probe(*arguments):
                _say("line", *line)
        except Exception as error:
            trouble = f"could not be found out: {said(error)}"
            if topic == "config":
                _say("line", "config", f"{trouble} (`fedmpi validate` says where)", BAD)
            else:
                _say("line", probe.__name__, trouble, ODD)


def _say(*words: str) -> None:
    print(f"\n{json.dumps(words)}", flush=True)  # on a line of its own, whatever a library has printed
