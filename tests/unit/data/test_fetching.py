"""`fedmpi data fetch`: downloads from a server in this process that fails in several ways, archives, the listings."""

import hashlib
import io
import re
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedmpi import cli
from fedmpi.common.errors import UserError
from fedmpi.common.registry import load
from fedmpi.common.torchvision_compat import torchvision
from fedmpi.data.fetching import getting, http
from fedmpi.data.fetching.catalogue import Download, one
from fedmpi.data.fetching.getting import SETS
from fedmpi.data.sources import registry

CONTENT = bytes(range(256)) * 4096  # 1 MiB
HALF = len(CONTENT) // 2


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def server(monkeypatch):
    """Serves `files`; `asked` holds (path, Range) of every request.

    A path begins with how: /plain; /cut (half of what is asked for, for the first `breaks` times); /anew (no ranges);
    /busy (503, for the first `breaks` times); /off (another range than asked for).
    """
    monkeypatch.setattr(http, "WAITS_S", (0.0, 0.0))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            how, _, name = self.path[1:].partition("/")
            span = self.headers.get("Range")
            self.server.asked.append((self.path, span))
            content = self.server.files.get(name)
            if content is None:
                return self.answer(404, b"gone")
            if how == "busy" and self.server.take():
                return self.answer(503, b"later")
            begin = int(span[6:-1]) if span and how != "anew" else 0
            if begin >= len(content) > 0:
                return self.answer(416, b"", **{"Content-Range": f"bytes */{len(content)}"})
            part = content[begin:]
            first = 1 if how == "off" else begin
            more = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if begin else {}
            send = part[: len(part) // 2] if how == "cut" and self.server.take() else part
            return self.answer(206 if begin else 200, send, len(part), **more)

        def answer(self, code, content, length=None, **headers):
            self.send_response(code)
            self.send_header("Content-Length", len(content) if length is None else length)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = True

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        breaks = 1

        def take(self):
            self.breaks -= 1
            return self.breaks >= 0

        def url(self, path):
            return f"http://127.0.0.1:{self.server_address[1]}/{path}"

    with Server(("127.0.0.1", 0), Handler) as running:
        running.asked, running.files = [], {"a.bin": CONTENT}
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def quiet(text):
    pass


def get(server, to, *paths, checksum=None):
    http.get([server.url(path) for path in paths], to, md5(CONTENT) if checksum is None else checksum, quiet)


@pytest.mark.parametrize(
    ("how", "breaks", "checksum", "asked"),
    [
        ("plain", 0, None, [0]),
        ("cut", 1, "", [0, HALF]),
        ("cut", 12, None, None),  # more often than there are tries without any byte
        ("anew", 0, "", [0]),
        ("busy", 1, "", [0, 0]),
    ],
)
def test_a_file_comes_whole(server, tmp_path, how, breaks, checksum, asked):
    """Over connections that break and errors that pass; "" is a file whose checksum is unknown."""
    server.breaks = breaks
    get(server, tmp_path / "sub/a.bin", f"{how}/a.bin", checksum=checksum)
    assert (tmp_path / "sub/a.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.bin"]
    assert ranges(server) == asked if asked else len(server.asked) == 13


def ranges(server):
    """Where each answer was to begin."""
    return [int(span[len("bytes=") : -1]) if span else 0 for _, span in server.asked]


@pytest.mark.parametrize(
    ("left", "how", "checksum", "asked"),
    [
        (CONTENT[:HALF], "plain", None, [HALF]),
        (CONTENT[:HALF], "plain", "", [0]),  # nobody could tell whether it was of this file
        (b"x" * HALF, "plain", None, [HALF, 0]),  # of another file
        (CONTENT[:HALF], "anew", None, [HALF]),  # a server without ranges
        (CONTENT + b"more", "plain", None, [len(CONTENT) + 4, 0]),  # longer than the file
        (CONTENT, "plain", None, [len(CONTENT)]),  # only the rename was missing
        (CONTENT[:HALF], "off", None, [HALF, 0]),  # the server sends another range than it was asked for
    ],
    ids=["half", "no md5", "another file", "no ranges", "longer", "whole", "another range"],
)
def test_a_part_of_an_earlier_process_is_completed_or_replaced(server, tmp_path, left, how, checksum, asked):
    (tmp_path / "a.bin.part").write_bytes(left)
    get(server, tmp_path / "a.bin", f"{how}/a.bin", checksum=checksum)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert not (tmp_path / "a.bin.part").exists()
    assert ranges(server) == asked


def test_a_file_with_a_wrong_checksum_is_refused_and_deleted(server, tmp_path):
    server.files["b.bin"] = b"<html>log in first</html>"
    with pytest.raises(UserError, match=rf"plain/b.bin: what came has the MD5 {md5(server.files['b.bin'])}, not "):
        get(server, tmp_path / "a.bin", "plain/b.bin")
    assert not list(tmp_path.iterdir())
    get(server, tmp_path / "a.bin", "plain/b.bin", "plain/a.bin")  # the next address has it
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


# ---- archives


def tape(**files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return buffer.getvalue()


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture
def listed(server, monkeypatch):
    """Puts a set `small` of one archive, unpacked to `small`, into the list."""

    def put(content, parts=("small/a", "small/b/c"), **more):
        server.files["small.pack"] = content
        download = Download((server.url("plain/small.pack"),), "small.pack", md5(content), "small")
        given = {"parts": tuple(one(part) for part in parts), "downloads": (download,)} | more
        monkeypatch.setitem(SETS, "small", replace(SETS["stl10"], **given))

    return put


FILES = {"top/a": b"1", "top/b/c": b"2"}


@pytest.mark.parametrize(
    ("pack", "files"), [(tape, FILES), (zipped, {"a": b"1", "b/c": b"2"})], ids=["tar, in a folder", "zip, bare"]
)
def test_an_archive_is_unpacked(listed, tmp_path, pack, files):
    """Without the folder around all of its files, if there is one; what the user has put beside them stays."""
    listed(pack(**files))
    assert getting.check("small", tmp_path) == [
        (str(tmp_path / "small/a"), "is missing"),
        (str(tmp_path / "small/b/c"), "is missing"),
    ]
    assert getting.fetch("small", tmp_path, quiet)
    assert [wrong for _, wrong in getting.check("small", tmp_path)] == ["", ""]
    assert (tmp_path / "small/b/c").read_bytes() == b"2"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert not getting.fetch("small", tmp_path, quiet)
    (tmp_path / "small/a").unlink()
    (tmp_path / "small/mine").write_bytes(b"kept")
    assert getting.fetch("small", tmp_path, quiet)
    assert {path.name for path in (tmp_path / "small").iterdir()} == {"a", "b", "mine"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (tape(**FILES)[:-30], "cannot be unpacked"),
        (tape(**FILES, **{"../out": b"x"}), "leads out of its folder"),
        (tape(**FILES, **{"/etc/x": b"x"}), "leads out of its folder"),
        (tape(**FILES, link=None), "'link', which is neither a file nor a folder"),
        (b"no archive at all", "cannot be unpacked"),
        (tape(**{"top/a": b"1", "top/b/d": b"2"}), r"the download lacks .*small/b/c: it is missing"),
    ],
    ids=["cut", "out", "absolute", "link", "text", "another one"],
)
def test_an_archive_that_is_refused(listed, server, tmp_path, content, says):
    listed(content)
    with pytest.raises(UserError, match=says):
        getting.fetch("small", tmp_path / "data", quiet)
    assert not (tmp_path / "out").exists()
    left = {path.name for path in (tmp_path / "data").iterdir()}
    assert left <= ({"small"} if "lacks" in says else {"small.pack"})


# ---- the commands


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["fedmpi", "data", *map(str, words)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_the_commands(listed, tmp_path, monkeypatch, capsys):
    listed(tape(**FILES))
    root = ("small", "--root", tmp_path)
    code, out, _ = command(monkeypatch, capsys, "check", *root)
    assert (code, "small/a    is missing" in out) == (1, True)
    assert f"fedmpi data fetch small --root {tmp_path}" in out
    assert command(monkeypatch, capsys, "fetch", *root) == (0, f"small: fetched to {tmp_path}\n", "small.pack\n")
    assert command(monkeypatch, capsys, "fetch", *root)[:2] == (0, f"small: all there, in {tmp_path}\n")
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path))
    code, out, _ = command(monkeypatch, capsys, "check", "small")
    assert (code, "is missing" in out, "CIFAR" in out) == (0, False, False)
    code, out, _ = command(monkeypatch, capsys, "list")
    assert code == 0
    assert all(name in out for name in ("mnist", "pathmnist", "pacs", "by hand"))


def test_without_a_network_the_command_says_what_to_do(listed, server, tmp_path, monkeypatch, capsys):
    listed(tape(**FILES))
    nowhere = "http://127.0.0.1:9/small.pack"
    SETS["small"] = replace(SETS["small"], downloads=(replace(SETS["small"].downloads[0], urls=(nowhere,)),))
    code, _, err = command(monkeypatch, capsys, "fetch", "small", "--root", tmp_path)
    assert code == 2
    for word in (f"{nowhere}: ", "refused", "reach the internet?", f"{nowhere} -> {tmp_path}/small.pack"):
        assert word in err
    assert "Traceback" not in err
    (tmp_path / "small.pack").write_bytes(server.files["small.pack"])  # brought by hand
    assert command(monkeypatch, capsys, "fetch", "small", "--root", tmp_path)[0] == 0
    assert (tmp_path / "small/b/c").read_bytes() == b"2"
    assert (tmp_path / "small.pack").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("fetch", "cifar"), r"unknown data set 'cifar'; did you mean 'cifar10'"),
        (("check", "medmnist"), r"medmnist is a source of several sets; name one of them: pathmnist, chestmnist"),
        (
            ("check", "heart_disease"),
            r"heart_disease is a source whose files .*docs/data\.md .*; those that are: blood",
        ),
        (("fetch", "mnist", "--root", __file__), "--root: .* is not a folder"),
    ],
)
def test_a_wrong_command_is_refused(monkeypatch, capsys, words, says):
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 2
    assert re.search(says, err), err
    assert "Traceback" not in err


# ---- the list


def test_addresses_and_checksums_are_those_of_torchvision():
    sets = torchvision.datasets
    for name, theirs in (("mnist", sets.MNIST), ("fashion_mnist", sets.FashionMNIST)):
        ours = [(download.path.rpartition("/")[2], download.md5) for download in SETS[name].downloads]
        assert ours == [tuple(each) for each in theirs.resources]
        assert SETS[name].downloads[0].urls == tuple(f"{mirror}{ours[0][0]}" for mirror in theirs.mirrors)
    for name in ("EMNIST", "CIFAR10", "CIFAR100", "STL10"):
        theirs = getattr(sets, name)
        (download,) = SETS[name.lower()].downloads
        assert (download.urls, download.md5) == ((theirs.url,), getattr(theirs, "tgz_md5", None) or theirs.md5)
        files = dict(map(tuple, getattr(theirs, "train_list", []) + getattr(theirs, "test_list", [])))
        ours = {part.paths[0].rpartition("/")[2]: part.md5 for part in SETS[name.lower()].parts if part.md5}
        assert files.items() - {("unlabeled_X.bin", files.get("unlabeled_X.bin"))} <= ours.items()
    ours = [download for name in ("svhn", "svhn_extra") for download in SETS[name].downloads]
    theirs = [sets.SVHN.split_list[part] for part in ("train", "test", "extra")]
    assert [([*each.urls], each.path, each.md5) for each in ours] == [([u], f"SVHN/{n}", m) for u, n, m in theirs]


def test_listings_are_complete():
    """Every set says what it is, how it is brought, what its files are; no checksum is copied from line to line."""
    for name, listing in SETS.items():
        assert bool(listing.downloads) != bool(listing.by_hand), name
        assert all((listing.samples, listing.what, listing.home, listing.licence, listing.reference, listing.parts))
        for checksum in [each.md5 for each in (*listing.parts, *listing.downloads)]:
            assert checksum == "" or (len(checksum) == 32 and int(checksum, 16)), name
        if listing.downloads:
            assert all(each.md5 for each in listing.downloads), name
            given = [each.gives for each in listing.downloads]
            paths = [part.paths for part in listing.parts]
            assert all(any(p == g or p.startswith(f"{g}/") for p in part for g in given) for part in paths), name
        source = listing.config.partition("source: ")[2].split(",")[0]
        assert load(source, registry, "data source").__doc__
    found = [part.md5 for listing in SETS.values() for part in listing.parts if part.md5]
    assert len(found) == len(set(found))
