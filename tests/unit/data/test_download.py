"""`fedmpi data fetch`: downloads from a server in this process that fails in several ways, archives, the listings."""

import hashlib
import io
import re
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedmpi import cli
from fedmpi.common.errors import UserError
from fedmpi.common.registry import load_object
from fedmpi.data.download import fetch
from fedmpi.data.download.catalogue import CATALOGUE, DatasetPart, Download
from fedmpi.data.sources import registry

CONTENT = bytes(range(256)) * 4096  # 1 MiB


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def server(monkeypatch):
    """Serves `files`; `asked` holds the path of every request.

    A path begins with how: /plain; /cut (half of the file, for the first `breaks` times); /busy (503, likewise).
    """
    monkeypatch.setattr(fetch, "RETRY_DELAY_S", 0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            how, _, name = self.path[1:].partition("/")
            self.server.asked.append(self.path)
            content = self.server.files.get(name)
            self.server.breaks -= how != "plain"
            fails = how != "plain" and self.server.breaks >= 0
            code = 404 if content is None else 503 if how == "busy" and fails else 200
            body = content if code == 200 else b"no"
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if how == "cut" and fails else body)
            self.close_connection = True

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        breaks = 1

        def url(self, path):
            return f"http://127.0.0.1:{self.server_address[1]}/{path}"

    with Server(("127.0.0.1", 0), Handler) as running:
        running.asked, running.files = [], {"a.bin": CONTENT}
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(("how", "requests"), [("plain", 1), ("cut", 2), ("busy", 2)])
def test_an_incomplete_download_leaves_no_file(server, tmp_path, how, requests):
    """Over connections that break and errors that pass; an earlier process may have left a part."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.bin.part").write_bytes(b"x" * 2 * len(CONTENT))
    fetch.download_file([server.url(f"{how}/a.bin")], tmp_path / "sub/a.bin", md5(CONTENT))
    assert (tmp_path / "sub/a.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.bin"]
    assert len(server.asked) == requests


def test_the_error_names_the_problem_of_each_url(server, tmp_path):
    server.files["b.bin"], server.breaks = b"<html>log in first</html>", 99
    urls = [server.url(path) for path in ("plain/b.bin", "plain/none", "busy/a.bin")]
    with pytest.raises(UserError) as caught:
        fetch.download_file(urls, tmp_path / "a.bin", md5(CONTENT))
    lines = [f"the file has the MD5 checksum {md5(server.files['b.bin'])} instead of {md5(CONTENT)}, and was deleted"]
    lines += ["Not Found", "Service Unavailable"]
    assert str(caught.value).splitlines() == [f"{url}: {line}" for url, line in zip(urls, lines, strict=True)]
    assert not list(tmp_path.iterdir())
    fetch.download_file([*urls, server.url("plain/a.bin")], tmp_path / "a.bin", md5(CONTENT))  # the last address has it
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


# ---- archives


def tape(**files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
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

    def put(content, url=""):
        server.files["small.pack"] = content
        download = Download((url or server.url("plain/small.pack"),), "small.pack", md5(content), "small")
        parts = (DatasetPart(("small/a",)), DatasetPart(("small/b",), 1))
        monkeypatch.setitem(CATALOGUE, "small", CATALOGUE["stl10"]._replace(parts=parts, downloads=(download,)))

    return put


FILES = {"top/a": b"1", "top/b/c": b"2"}


@pytest.mark.parametrize(
    ("pack", "files"), [(tape, FILES), (zipped, {"a": b"1", "b/c": b"2"})], ids=["tar, in a folder", "zip, bare"]
)
def test_an_archive_is_unpacked(listed, tmp_path, pack, files):
    """Without the folder around all of its files, if there is one; what the user has put beside them stays."""
    listed(pack(**files))
    assert fetch.check_files("small", tmp_path) == [
        (str(tmp_path / "small/a"), "is missing"),
        (str(tmp_path / "small/b"), "is missing"),
    ]
    assert fetch.fetch_dataset("small", tmp_path)
    assert [wrong for _, wrong in fetch.check_files("small", tmp_path)] == ["", ""]
    assert (tmp_path / "small/b/c").read_bytes() == b"2"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert not fetch.fetch_dataset("small", tmp_path)
    (tmp_path / "small/b/c").rename(tmp_path / "small/mine")
    assert fetch.check_files("small", tmp_path)[1] == (str(tmp_path / "small/b"), "contains only 0 of 1 files")
    assert fetch.fetch_dataset("small", tmp_path)
    assert {path.name for path in (tmp_path / "small").iterdir()} == {"a", "b", "mine"}


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (tape(**FILES)[:-30], "cannot be unpacked"),
        (tape(**FILES, **{"../out": b"x"}), "cannot be unpacked"),
        (b"no archive at all", "cannot be unpacked"),
        (tape(**{"top/a": b"1", "top/d": b"2"}), r"after the download, .*small/b is missing"),
    ],
    ids=["cut", "out", "text", "another one"],
)
def test_an_invalid_archive_is_refused(listed, tmp_path, content, pattern):
    listed(content)
    with pytest.raises(UserError, match=pattern):
        fetch.fetch_dataset("small", tmp_path / "data")
    assert not (tmp_path / "out").exists()
    remaining = {path.name for path in (tmp_path / "data").iterdir()}
    assert remaining <= ({"small"} if "is missing" in pattern else {"small.pack"})


# ---- the commands


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["fedmpi", "data", *map(str, words)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return ended.value.code, output.out, output.err


def test_data_commands_list_check_and_fetch(listed, tmp_path, monkeypatch, capsys):
    listed(tape(**FILES))
    root = ("small", "--root", tmp_path)
    code, out, _ = command(monkeypatch, capsys, "check", *root)
    assert (code, bool(re.search("small/a +is missing", out))) == (1, True)
    assert f"fedmpi data fetch small --root {tmp_path}" in out
    assert command(monkeypatch, capsys, "fetch", *root)[:2] == (0, f"small: downloaded to {tmp_path}\n")
    assert command(monkeypatch, capsys, "fetch", *root)[:2] == (0, f"small: complete in {tmp_path}\n")
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path))
    code, out, _ = command(monkeypatch, capsys, "check", "small")
    assert (code, "is missing" in out, "CIFAR" in out) == (0, False, False)
    code, out, _ = command(monkeypatch, capsys, "list")
    assert code == 0
    assert all(name in out for name in ("mnist", "pathmnist", "pacs", "manual download"))


def test_without_a_network_the_error_has_instructions(listed, server, tmp_path, monkeypatch, capsys):
    nowhere = "http://127.0.0.1:9/small.pack"
    listed(tape(**FILES), nowhere)
    code, _, err = command(monkeypatch, capsys, "fetch", "small", "--root", tmp_path)
    assert code == 2
    for word in (f"{nowhere}: ", "refused", "no internet access", f"{nowhere} -> {tmp_path}/small.pack"):
        assert word in err
    (tmp_path / "small.pack").write_bytes(server.files["small.pack"])  # brought by hand
    assert command(monkeypatch, capsys, "fetch", "small", "--root", tmp_path)[0] == 0
    assert (tmp_path / "small/b/c").read_bytes() == b"2"
    assert (tmp_path / "small.pack").exists()


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("fetch", "cifar"), r"unknown data set 'cifar'; did you mean 'cifar10'"),
        (("check", "heart_disease"), r"unknown data set 'heart_disease'; .*allowed: bloodmnist, breastmnist"),
        (("fetch", "pacs"), r"pacs cannot be downloaded automatically: Google Drive .*\n.*home: https://dali.*"),
        (("fetch", "mnist", "--root", __file__), "--root: .* is a file; choose a folder"),
    ],
)
def test_a_wrong_command_is_refused(monkeypatch, capsys, tmp_path, words, pattern):
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path))
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 2
    assert re.search(pattern, err), err


# ---- the list


def test_catalogue_entries_are_complete():
    """Every set says what it is, how it is brought, what its files are; no checksum is copied from line to line."""
    for name, listing in CATALOGUE.items():
        assert bool(listing.downloads) != bool(listing.manual_steps), name
        assert all((listing.description, listing.home, listing.licence, listing.parts)), name
        assert all(len(each.md5) == 32 and int(each.md5, 16) for each in listing.downloads), name
        given = [each.into or each.path for each in listing.downloads]
        if given:
            paths = [part.paths for part in listing.parts]
            assert all(any(p == g or p.startswith(f"{g}/") for p in part for g in given) for part in paths), name
        source = listing.config.partition("source: ")[2].split(",")[0]
        assert load_object(source, registry, "data source").__doc__
    checksums = [each.md5 for listing in CATALOGUE.values() for each in listing.downloads]
    assert len(checksums) == len(set(checksums))
