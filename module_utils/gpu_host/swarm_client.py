"""Passes a model on between hosts piece by piece (BitTorrent, by libtorrent). A program of its own.

It runs on a Python that has libtorrent, as ``python swarm_client.py REQUEST``, and imports nothing of this package.
Nobody outside of the request's peers is met: no tracker, no DHT, no local discovery, and connections from other
addresses are refused. Every piece is checked against its SHA-256 in the torrent before it is kept or passed on.

The request is a JSON file: `do` (make, seed or fetch), `folder` (of the model), `torrent` (a path), `answer` (the file
that says how far it is), and for seed and fetch `peers` (pairs of address and port; for fetch the origin first),
`port`, `stop` (a file: end when it is there) and `idle` (end after so many seconds without a byte). The hosts that
fetch are numbered: `rank` of `of`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

# The torrent's own name for the model's folder: on each host that folder has another path.
ROOT = "model"
# Bytes of a piece: from 256 KiB on so many that the torrent stays below a megabyte or so.
LEAST_PIECE, MOST_PIECE, MOST_PIECES = 256 << 10, 16 << 20, 16384
_SPEAK_SECONDS = 0.25
_LONELY_SECONDS = 5.0
_CONNECT_SECONDS = 3.0


def piece_bytes(total: int) -> int:
    """Size of a piece for a model of `total` bytes: a power of two."""
    size = LEAST_PIECE
    while size < MOST_PIECE and total / size > MOST_PIECES:
        size *= 2
    return size


def say(path: str, value: dict[str, Any]) -> None:
    """Replace the answer file as a whole."""
    passing = f"{path}.{os.getpid()}.new"
    with open(passing, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(passing, path)


def place_of(folder: str) -> str:
    """A folder in which ROOT is the model's folder, also after that has been renamed: a link to our own open file."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    above = f"{folder}.swarm-{os.getpid()}"
    os.mkdir(above, 0o700)
    os.symlink(f"/proc/{os.getpid()}/fd/{number}", os.path.join(above, ROOT))
    return above


def remove_place(above: str) -> None:
    os.unlink(os.path.join(above, ROOT))
    os.rmdir(above)


def make(request: dict[str, Any], lt: Any) -> None:
    """Write the torrent of the files in `files`; the answer tells how many bytes are hashed."""
    storage = lt.file_storage()
    sizes = {name: os.stat(os.path.join(request["folder"], name)).st_size for name in request["files"]}
    for name in sorted(sizes):
        storage.add_file(f"{ROOT}/{name}", sizes[name])
    size = piece_bytes(sum(sizes.values()))
    torrent = lt.create_torrent(storage, size, flags=lt.create_torrent.v2_only)
    torrent.set_priv(True)
    above, spoken = place_of(request["folder"]), [0.0]

    def hashed(piece: int) -> None:
        if time.monotonic() - spoken[0] > _SPEAK_SECONDS:
            spoken[0] = time.monotonic()
            say(request["answer"], {"state": "hashing", "bytes": piece * size})

    try:
        lt.set_piece_hashes(torrent, above, hashed)
    finally:
        remove_place(above)
    passing = request["torrent"] + ".new"
    with open(passing, "wb") as file:
        file.write(lt.bencode(torrent.generate()))
    os.replace(passing, request["torrent"])
    say(request["answer"], {"state": "made", "bytes": sum(sizes.values()), "sizes": sizes})


def session_of(request: dict[str, Any], addresses: list[str], lt: Any) -> Any:
    """A session that talks TCP with these addresses and with nobody else."""
    wanted = {
        "listen_interfaces": f"0.0.0.0:{request['port']},[::]:{request['port']}",
        "enable_dht": False, "enable_lsd": False, "enable_upnp": False, "enable_natpmp": False,
        "enable_incoming_utp": False, "enable_outgoing_utp": False,
        "allow_multiple_connections_per_ip": False, "anonymous_mode": False,
        "connections_limit": 2000, "connection_speed": 200, "min_reconnect_time": 2, "max_failcount": 1000,
        "peer_connect_timeout": 10, "peer_timeout": 60, "inactivity_timeout": 60,
        "unchoke_slots_limit": 1000, "unchoke_interval": 2, "rate_limit_ip_overhead": False,
        "send_buffer_watermark": 16 << 20, "send_buffer_watermark_factor": 150, "send_socket_buffer_size": 0,
        "recv_socket_buffer_size": 0, "max_out_request_queue": 100, "max_allowed_in_request_queue": 4000,
        "request_queue_time": 1, "whole_pieces_threshold": 5, "aio_threads": 8, "hashing_threads": 4,
        "alert_mask": lt.alert.category_t.error_notification | lt.alert.category_t.status_notification,
        "close_redundant_connections": False,
    }  # fmt: skip
    known = lt.default_settings()
    session = lt.session({name: value for name, value in wanted.items() if name in known})
    allowed = lt.ip_filter()
    allowed.add_rule("0.0.0.0", "255.255.255.255", 1)
    allowed.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1)
    for address in addresses:
        allowed.add_rule(address, address, 0)
    session.set_ip_filter(allowed)
    return session


def addresses_of(peers: list[list[Any]]) -> list[tuple[str, int]]:
    """The peers by number. OSError: a name that can't be resolved."""
    found = []
    for host, port in peers:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found.append((str(entries[0][4][0]), int(port)))
    return found


class Share:
    """Which pieces one of several hosts asks for, so that the origin sends each about once.

    Each host has a share of the pieces: those it asks the origin for. Any other piece it takes from the hosts that have
    got it meanwhile, so only such pieces are asked for. When its share is there, the origin is left alone. Should
    nothing come for some seconds (another host has died), everybody is asked for everything.

    (Libtorrent's own super seeding is idle for the first ten seconds and then a third slower, as measured.)
    """

    def __init__(self, pieces: int, rank: int, of: int) -> None:
        self.pieces = pieces
        self.mine = frozenset(range(rank, pieces, of))
        self.state = "shared" if of > 1 else "open"
        self._asked: list[int] = []

    def step(self, have: list[bool], idle_seconds: float, session: Any, handle: Any, origin: str) -> None:
        """Look at who has what, and ask accordingly. `have`: our own pieces, [] while they are not known."""
        if self.state == "open":
            return
        if self.state == "shared" and have and all(have[piece] for piece in self.mine):
            self.state = "without origin"
            allow(session, origin, False)
        if idle_seconds > _LONELY_SECONDS:
            if self.state == "without origin":
                allow(session, origin, True)
            self.state = "open"
        asked = self.priorities(handle.piece_availability())
        if asked != self._asked:
            self._asked = asked
            handle.prioritize_pieces(asked)

    def priorities(self, availability: list[int]) -> list[int]:
        """7 for our share, 1 for what another host than the origin has, 0 (not now) for the rest."""
        if self.state == "open":
            return [4] * self.pieces
        enough = 2 if self.state == "shared" else 1
        others = [int(count >= enough) for count in availability] or [0] * self.pieces
        return [7 if piece in self.mine else others[piece] for piece in range(self.pieces)]


def allow(session: Any, address: str, allowed: bool) -> None:
    """Connect with this address, or (also at once) no more."""
    known = session.get_ip_filter()
    known.add_rule(address, address, 0 if allowed else 1)
    session.set_ip_filter(known)


def take_part(request: dict[str, Any], lt: Any) -> None:
    """Fetch what is missing, then pass on, until told to stop or nothing has moved for `idle` seconds."""
    info = lt.torrent_info(request["torrent"])
    peers = addresses_of(request["peers"])
    session = session_of(request, [address for address, _ in peers], lt)
    above = place_of(request["folder"])
    wanted = lt.add_torrent_params()
    wanted.ti = info
    wanted.save_path = above
    flags = lt.torrent_flags.default_flags & ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    if request["do"] == "seed":
        # In seed mode a piece is hashed when it is first asked for, not all of them at the start.
        flags |= lt.torrent_flags.seed_mode
    wanted.flags = flags
    share = None
    if request["do"] == "fetch":
        share = Share(info.num_pieces(), request["rank"], request["of"])
        wanted.piece_priorities = share.priorities([])
    handle = session.add_torrent(wanted)
    moved, moved_at, connected_at, failed = -1, time.monotonic(), 0.0, 0
    try:
        while True:
            status = handle.status()
            now = time.monotonic()
            if share is not None and not status.is_seeding:
                share.step(status.pieces, now - moved_at, session, handle, peers[0][0])
            if now - connected_at > _CONNECT_SECONDS:
                connected_at = now
                for peer in peers:
                    handle.connect_peer(peer)
            trouble = ""
            for alert in session.pop_alerts():
                if isinstance(alert, lt.file_error_alert):
                    trouble = alert.message()
                failed += isinstance(alert, lt.hash_failed_alert)
                if isinstance(alert, lt.listen_failed_alert) and not session.is_listening():
                    trouble = alert.message()
            if trouble:
                say(request["answer"], {"error": trouble, "permanent": False})
                sys.exit(1)
            total = status.total_payload_download + status.total_payload_upload + int(status.progress * 1e6)
            if total != moved:
                moved, moved_at = total, now
            say(
                request["answer"],
                {
                    "state": "complete" if status.is_seeding else str(status.state).rpartition(".")[2],
                    "bytes": status.total_wanted_done, "beat": moved, "sent": status.total_payload_upload,
                    "received": status.total_payload_download, "peers": status.num_peers, "pieces_refused": failed,
                    "complete": bool(status.is_seeding),
                    "wasted": status.total_failed_bytes,
                },
            )  # fmt: skip
            if os.path.exists(request["stop"]) or now - moved_at > request["idle"]:
                return
            time.sleep(_SPEAK_SECONDS)
    finally:
        session.pause()
        remove_place(above)


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    import libtorrent as lt

    try:
        make(request, lt) if request["do"] == "make" else take_part(request, lt)
    except (OSError, RuntimeError) as error:
        say(request["answer"], {"error": f"{type(error).__name__}: {error}", "permanent": False})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
