"""The standard streams of a process."""

import io
import sys

from fedmpi.comm.loss import leaving


def test_characters_that_a_stream_does_not_have_are_printed_as_escapes(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", out)
    leaving.prepare()
    print("Ω", "é", flush=True)
    assert out.buffer.getvalue() == b"\\u03a9 \xe9\n"
