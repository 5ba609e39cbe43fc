"""How the ranks of one host meet: who they are, and how a file descriptor gets from one to the others.

No torch here. All that is needed from outside is ``exchange``, which all-gathers a small payload among the
ranks in rank order. What comes from another rank is parsed as JSON or compared as bytes, never unpickled.
Every step ends within ``timeout_s``, and what goes wrong on one rank is raised on all of them alike.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from tide_strategies.errors import TideArenaError

Exchange = Callable[[bytes], list[bytes]]

_TOKEN_BYTES = 16
_MAX_WORDS = 2000
# A process of ours that connects and then says nothing may hold the others up for this long, no longer.
_PER_CONNECTION_S = 5.0
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")  # the arena's token, the rank


def host_identity() -> dict[str, Any]:
    """Where and as whom this process runs, as plain JSON values.

    Two ranks can share an arena only if ``boot_id``, ``pid_namespace``, ``net_namespace`` and ``uid`` agree.
    What cannot be read is ``None``.
    """
    return {
        "boot_id": _read_text("/proc/sys/kernel/random/boot_id"),
        "hostname": socket.gethostname(),
        "pid_namespace": _inode("/proc/self/ns/pid"),
        "net_namespace": _inode("/proc/self/ns/net"),
        "uid": os.geteuid(),
        "pid": os.getpid(),
    }


def agree(
    exchange: Exchange, rank: int, error: str | None, what: str, facts: Any = None, code: str = "TIDE-F020"
) -> list[Any]:
    """Tell all ranks whether this one succeeded, and return what each of them adds (``facts``).

    Raises:
        TideArenaError: some rank has an ``error``; on all ranks alike, with every failing rank's words
            and the fallback ``code``.
    """
    status = {"error": None if error is None else error[:_MAX_WORDS], "facts": facts}
    replies = [_parse(payload) for payload in exchange(json.dumps(status).encode())]
    failed = [f"rank {r}: {reply['error']}" for r, reply in enumerate(replies) if reply["error"] is not None]
    if failed:
        raise TideArenaError(f"TIDE: {what} failed. " + "; ".join(failed), code)
    return [reply["facts"] for reply in replies]


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str] | None:
    """In which fact two ranks' identities differ so that they cannot share memory, and the words for it."""
    same_machine = "boot_id" if one.get("boot_id") is not None else "hostname"
    for key, words in (
        (same_machine, "they run on different hosts"),
        ("pid_namespace", "they are in different containers (pid namespaces)"),
        ("net_namespace", "they are in different network namespaces"),
        ("uid", "they run as different users"),
    ):
        if other.get(key) != one.get(key):
            return key, words
    return None


def check_one_host(identities: list[dict[str, Any]], first: int = 0) -> None:
    """Raise TideArenaError unless all ranks can share memory; every rank sees the same identities.

    Args:
        identities: of consecutive ranks.
        first: the first of these ranks.

    Raises:
        TideArenaError: naming the first rank that differs from rank ``first``, and in what.
    """
    one = identities[0]
    for rank, other in enumerate(identities, first):
        difference = apart(one, other)
        if difference is not None:
            key, words = difference
            raise TideArenaError(
                f"TIDE: ranks {first} and {rank} cannot share memory: {words} ({key} {one.get(key)} on "
                f"{one.get('hostname')}, {other.get(key)} on {other.get('hostname')}). Ranks of one node must "
                "run on one host, in one container, as one user; use the stock collectives otherwise."
            )


def share_fd(
    exchange: Exchange, rank: int, size: int, timeout_s: float, create: Callable[[], int], host_ranks: int = 0
) -> tuple[int, list[dict[str, Any]]]:
    """Pass a file descriptor from the first rank of each host to its other ranks.

    ``create`` runs on that first rank alone (rank 0 if all are on one host) and returns a descriptor, which stays
    that rank's. The others get one of their own, to close when done. It travels over a socket in the abstract
    namespace (no file, gone with the process) whose name is 128 random bits; both sides check the other's user and a
    random token. ``host_ranks`` consecutive ranks are on each host; 0 means all.

    Returns:
        The descriptor, and every rank's :func:`host_identity`.

    Raises:
        TideArenaError: on all ranks alike, whichever rank failed.
    """
    host_ranks = host_ranks or size
    root = rank - rank % host_ranks
    here = range(root, root + host_ranks)
    token = secrets.token_bytes(_TOKEN_BYTES)
    name = secrets.token_bytes(16) if rank == root else b""
    listener, fd, error = None, -1, None
    if rank == root:
        try:
            fd = create()
            listener = _listen(name, host_ranks) if host_ranks > 1 else None
        except Exception as e:
            error = _words(e)
    received = -1
    try:
        facts = {"identity": host_identity(), "token": token.hex(), "name": name.hex()}
        replies = agree(exchange, rank, error, "creating the shared arena", facts)
        identities = [reply["identity"] for reply in replies]
        for first in range(0, size, host_ranks):
            check_one_host(identities[first : first + host_ranks], first)
        tokens = {r: bytes.fromhex(replies[r]["token"]) for r in here}
        deadline = time.monotonic() + timeout_s  # from here, where all ranks are known to have come
        try:
            if listener is not None:
                _serve(listener, fd, root, tokens, deadline)
            elif rank != root:
                received = _receive(bytes.fromhex(replies[root]["name"]), rank, root, tokens, deadline)
        except Exception as e:
            error = _words(e)
        agree(exchange, rank, error, "passing the shared arena on")
    except BaseException:
        if received >= 0:
            os.close(received)
        raise
    finally:
        if listener is not None:
            listener.close()
    return (fd if rank == root else received), identities


def _listen(name: bytes, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0tide-" + name.hex().encode())
        listener.listen(max(backlog, 128))
    except BaseException:
        listener.close()
        raise
    return listener


def _serve(listener: socket.socket, fd: int, root: int, tokens: dict[int, bytes], deadline: float) -> None:
    """Send ``fd`` to every other rank; whoever cannot prove to be one is dropped and does not count."""
    waiting = tokens.keys() - {root}
    while waiting:
        listener.settimeout(_left(deadline, f"rank(s) {sorted(waiting)} did not fetch the descriptor"))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue  # the check above ends the loop
        with connection:
            if _peer_uid(connection) != os.geteuid():
                continue
            try:
                connection.settimeout(min(_PER_CONNECTION_S, _left(deadline, "no time left")))
                sent, peer = _HELLO.unpack(_read_exactly(connection, _HELLO.size))
                if peer not in waiting or not hmac.compare_digest(sent, tokens[root]):
                    continue
                socket.send_fds(connection, [tokens[peer]], [fd])
            except (OSError, EOFError):
                continue  # a stranger, or a rank that will say itself what went wrong
            waiting.discard(peer)


def _receive(name: bytes, rank: int, root: int, tokens: dict[int, bytes], deadline: float) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        while True:
            connection.settimeout(_left(deadline, f"rank {root} did not accept the connection"))
            try:
                connection.connect(b"\0tide-" + name.hex().encode())
                break
            except BlockingIOError:
                time.sleep(0.01)  # the queue of connections is full
        if _peer_uid(connection) != os.geteuid():
            raise PermissionError(f"the socket of rank {root} belongs to another user")
        connection.sendall(_HELLO.pack(tokens[root], rank))
        connection.settimeout(_left(deadline, "no time left to fetch the descriptor"))
        proof, fds, _, _ = socket.recv_fds(connection, _TOKEN_BYTES, 1)
    if len(fds) == 1 and hmac.compare_digest(proof, tokens[rank]):
        os.set_inheritable(fds[0], False)
        return fds[0]
    for fd in fds:
        os.close(fd)
    raise PermissionError(f"rank {root} did not hand over a descriptor with this rank's token")


def _peer_uid(connection: socket.socket) -> int:
    credentials = struct.Struct("3i")  # struct ucred: pid, uid, gid
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(data)[1])


def _read_exactly(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:
            raise EOFError("the connection ended early")
        data += part
    return data


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"timed out: {what}")
    return left


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(payload)
    except ValueError:
        reply = None
    if not isinstance(reply, dict) or not {"error", "facts"} <= reply.keys():
        return {"error": "sent something that is not a bootstrap message (another version of TIDE?)", "facts": None}
    return reply


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _read_text(path: str) -> str | None:
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return None


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
