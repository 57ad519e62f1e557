"""Only the job's ranks can use its store, and other processes cannot disturb it."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from attacker import GARBAGE, Attacker
from torch.distributed import DistError, DistNetworkError, TCPStore

from fedmpi.comm.rendezvous import auth, store_server
from fedmpi.comm.rendezvous.store import RankStore
from fedmpi.comm.rendezvous.store_server import LENGTH_PREFIX, StoreServer, encode_message

KEY = bytes(range(32))


@pytest.fixture
def server():
    server = StoreServer(auth.open_listener("127.0.0.1", 0), KEY)
    threading.Thread(target=server.run, daemon=True).start()
    yield server
    server.close()


def join(server, key=KEY):
    address = server.listener.getsockname()
    return RankStore(address, key, auth.connect_authenticated(address, key, 5))


def connected(server):
    guest = socket.create_connection(server.listener.getsockname(), timeout=5)
    guest.settimeout(5)
    return guest


def is_closed_by_peer(guest):
    """Return whether the other side has closed the connection."""
    try:
        while guest.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def wait_until_true(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


# ---- what the store is for ----
def test_the_store_behaves_like_torchs_store(server):
    """Makes the same calls on both stores, one after another."""
    torchs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def told(store):
        store.set("a", "1")
        store.set("b", b"\x00\xff")
        yield store.get("a"), store.multi_get(["a", "b"])
        yield store.compare_set("cause", "", "first"), store.compare_set("cause", "", "second")
        yield store.compare_set("cause", "first", "third"), store.get("cause")
        yield store.compare_set("absent", "x", "y"), store.check(["absent"])
        yield store.check(["a", "b"]), store.check(["a", "nothing"])
        yield store.delete_key("a"), store.delete_key("a"), store.check(["a"])
        yield store.add("n", 2), store.add("n", -5), store.get("n")
        try:
            store.wait(["nothing"], timedelta(seconds=0.1))
        except DistError as error:
            yield type(error)

    assert list(told(join(server))) == list(told(torchs))


def test_a_wait_ends_when_the_last_value_is_set(server):
    store, another = join(server), join(server)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(another.multi_get, ["x", "y"])
        assert wait_until_true(lambda: server.arrivals)
        store.set("x", "1")
        assert another.open_connection().get("x") == b"1"
        assert not waits.done()
        store.set("y", "2")
        assert waits.result(60) == [b"1", b"2"]
    assert not server.arrivals


def test_the_first_connection_that_ends_sets_the_value(server):
    first, second, other = join(server), join(server), join(server)
    first.set_on_disconnect("ended", "1")
    second.set_on_disconnect("ended", "2")
    assert not other.check(["ended"])
    for guest in (first, second):
        guest.clones[0].connection.close()
        assert wait_until_true(lambda: other.check(["ended"]))
    assert other.get("ended") == b"1"


def test_a_server_that_has_ended_is_an_error(server):
    store = join(server)
    server.close()
    assert is_closed_by_peer(store.connection)
    with pytest.raises(DistNetworkError, match=r"rank 0's store at 127\.0\.0\.1"):
        store.set("a", "1")


def gather(server, rank, seconds, call=1):
    return join(server).gather("g", call, rank, [0, 2, 3], b"%d" % rank, seconds)


def test_an_allgather_gives_all_ranks_the_same_verdict(server):
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(gather, [server] * 3, [0, 2, 3], [60] * 3)) == [("all", [b"0", b"2", b"3"])] * 3
        late = pool.submit(gather, server, 2, 60, 2)  # would wait longer than rank 0
        assert wait_until_true(lambda: "g/2/2" in server.values)
        assert gather(server, 0, 0.05, 2) == late.result() == ("3", [b"0", b"2", b""])
        assert gather(server, 3, 60, 2)[0] == "3"  # comes too late, and goes with the others
        cancelled = pool.submit(gather, server, 0, 60, 3)
        assert wait_until_true(lambda: "g/3/0" in server.values)
        join(server).compare_set("g/3/silent", "", "cancelled")
        assert cancelled.result()[0] == gather(server, 2, 60, 3)[0] == "cancelled"
        assert [verdict for verdict, _ in pool.map(gather, [server] * 3, [0, 2, 3], [60] * 3, [4] * 3)] == ["all"] * 3
    assert not [key for key in server.values if key.startswith("g/3/")]


def test_an_allgather_that_skips_dead_ranks_accepts_one_that_wakes(server):
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(join(server).gather, "g", 1, rank, [0, 2, 3], b"x", 60, skip_dead=True) for rank in (0, 2)]
        join(server).set("dead/3", "1")
        assert [call.result() for call in calls] == [("3", [b"x", b"x", b""])] * 2
        late = pool.submit(join(server).gather, "g", 2, 3, [0, 3], b"y", 60, skip_dead=True)
        assert wait_until_true(lambda: "g/2/3" in server.values)
        assert (
            join(server).gather("g", 2, 0, [0, 3], b"x", 60, skip_dead=True) == late.result() == ("all", [b"x", b"y"])
        )
    assert "dead/3" not in server.values


# ---- who is let in ----
def test_another_key_is_rejected_by_both_sides(server):
    with pytest.raises(auth.AuthenticationError):
        join(server, bytes(32))
    # One that trusts whoever answers, and answers without the key.
    guest = connected(server)
    guest.sendall(auth.MAGIC + bytes(auth.NONCE_BYTES))
    auth.receive_exactly(guest, auth.REPLY_BYTES)
    guest.sendall(bytes(auth.DIGEST_BYTES) + encode_message("set", "a", "1"))
    assert is_closed_by_peer(guest)
    assert not server.values


def test_a_replayed_connection_is_rejected(server):
    """All bytes that a rank has sent are sent again, but the server expects another proof."""
    guest, ours = connected(server), bytes(auth.NONCE_BYTES)
    guest.sendall(auth.MAGIC + ours)
    theirs = auth.receive_exactly(guest, auth.REPLY_BYTES)[len(auth.MAGIC) : -auth.DIGEST_BYTES]
    proof = auth.compute_proof(KEY, b"guest", ours, theirs)
    guest.sendall(proof + encode_message("set", "a", "1"))
    assert guest.recv(100)
    assert server.values == {"a": "1"}
    del server.values["a"]
    again = connected(server)
    again.sendall(auth.MAGIC + ours)
    auth.receive_exactly(again, auth.REPLY_BYTES)
    again.sendall(proof + encode_message("set", "a", "1"))
    assert is_closed_by_peer(again)
    assert not server.values


@pytest.mark.parametrize("garbage", GARBAGE[1:], ids=range(1, len(GARBAGE)))
def test_garbage_ends_the_connection(server, monkeypatch, garbage):
    monkeypatch.setattr(store_server, "AUTHENTICATION_TIMEOUT_S", 0.2)
    guest = connected(server)
    with contextlib.suppress(OSError):
        guest.sendall(garbage)
    assert is_closed_by_peer(guest)


def test_an_impossible_length_ends_only_its_own_connection(server):
    good, bad = join(server), join(server)
    lengths = [LENGTH_PREFIX.pack(2**31), LENGTH_PREFIX.pack(2**32 - 1)]
    unknown = [
        encode_message("no such request"),
        encode_message("set", "a"),
        encode_message([], []),
        encode_message("set", [], "1"),
        encode_message(),
    ]
    for frame in (*lengths, *unknown, LENGTH_PREFIX.pack(5) + b"[null"):
        bad.connection.sendall(frame)
        assert is_closed_by_peer(bad.connection)
        bad = join(server)
        good.set("still", "here")


def test_unauthenticated_connections_are_limited_in_number_and_time(server, monkeypatch):
    """There are more than may be unauthenticated; meanwhile ranks connect and are answered at once."""
    monkeypatch.setattr(store_server, "MAX_UNAUTHENTICATED", 20)
    monkeypatch.setattr(store_server, "AUTHENTICATION_TIMEOUT_S", 2.0)
    first = join(server)
    held = [connected(server) for _ in range(60)]
    second = join(server)
    first.set("a", "1")
    assert second.get("a") == b"1"
    assert all(is_closed_by_peer(guest) for guest in held)
    assert first.get("a") == b"1"
    for guest in held:
        guest.close()


def test_ranks_communicate_under_attack(server):
    stores, step = [join(server) for _ in range(3)], 0
    attack = Attacker([server.listener.getsockname()])
    while step < 300 or attack.tries < 30:
        step += 1
        stores[step % 3].set(f"{step}", "x")
        assert stores[(step + 1) % 3].get(f"{step}") == b"x"
        if step % 10 == 0:
            stores[step % 3] = join(server)
    attack.stop()
