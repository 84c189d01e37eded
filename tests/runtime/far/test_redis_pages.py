# SPDX-License-Identifier: Apache-2.0
"""Pages between slots and a connection: in any pieces, among any answers, with TLS and without."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from kvcore_runtime.far.redis_pages import ServerError, read_answers, read_pages, send_pages

from kvcore.far.tier import FarStatus
from tests.helpers.pieces import Pieces

SIZES = (130, 130, 1000, 131, 130)
Got = int | FarStatus


def value(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def wire(content: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(content), content)


def slots(sizes: Sequence[int] = SIZES) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


OTHERS: dict[str, tuple[bytes, Got]] = {
    "missing": (wire(b""), 0),
    "short": (wire(value(7, 99)), 99),
    "long": (wire(value(7, 1001)), 1001),
    "like an answer": (wire(b"\r\n$130\r\n" * 3), 24),
    "error": (b"-WRONGTYPE not a string\r\n", FarStatus.FAILED),
}
"""Answers that are not pages of a slot's size, and what `read_pages` says of them."""


def read(pieces: Sequence[bytes], views: Sequence[memoryview]) -> list[Got]:
    return read_pages(cast(socket.socket, Pieces(pieces)), views)


@pytest.mark.parametrize("seed", range(100))
def test_answers_come_in_any_pieces_and_only_pages_are_taken(seed: int) -> None:
    draw = random.Random(seed)
    others = [draw.choice([None] * 9 + list(OTHERS.values())) for _ in SIZES]
    answers = [
        wire(value(at, size)) if other is None else other[0]
        for at, (size, other) in enumerate(zip(SIZES, others, strict=True))
    ]
    stream, views = b"".join(answers), slots()
    cuts = sorted(draw.sample(range(1, len(stream)), draw.choice([0, 2, 20, len(stream) - 1])))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    got = read(pieces, views)
    for at, (size, other) in enumerate(zip(SIZES, others, strict=True)):
        assert got[at] == (size if other is None else other[1])
        if other is None:
            assert views[at] == value(at, size)


@pytest.mark.parametrize("place", range(len(SIZES)))
@pytest.mark.parametrize("kind", OTHERS)
def test_one_answer_that_is_no_page_changes_no_other(place: int, kind: str) -> None:
    answers = [wire(value(at, size)) for at, size in enumerate(SIZES)]
    answers[place], expected = OTHERS[kind]
    views = slots()
    assert read([b"".join(answers)], views) == [
        expected if at == place else size for at, size in enumerate(SIZES)
    ]
    for at, view in enumerate(views):
        assert at == place or view == value(at, SIZES[at])


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (wire(bytes(130))[:-1], "the server closed the connection"),
        (b"$130\r", "the server closed the connection"),
        (wire(bytes(130))[:-2] + b"ab", "no end of a value"),
        (wire(bytes(9)) * 2, "the server sends more than was asked for"),
        (wire(bytes(9)) + b"$", "the server sends more than was asked for"),
        (wire(bytes(10_000)), "the server sends more than was asked for"),
        (b"$99999999999\r\n", "the server sends more than was asked for"),
        (b"-" + b"x" * 10_000, "the server sends no answer"),
        (b"-" + b"x" * 10_000 + b"\r\n", "the server sends no answer"),
        (b"\r\n", "the server sends no answer"),
        (b"$ 9\r\n" + bytes(9) + b"\r\n", "the server sends no answer"),
        (b"*2147483647\r\n", "the server sends no answer"),
        (wire(bytes(9))[:-2] + b"ab", "no end of a value"),
    ],
)
def test_what_is_no_answer_ends_the_connection(stream: bytes, error: str) -> None:
    with pytest.raises(ConnectionError, match=error):
        read([stream], slots([130]))


@contextlib.contextmanager
def ends(*, is_secured: bool) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Provide both ends of a connection, with TLS but without certificates if it is secured."""
    pair = socket.socketpair()
    if not is_secured:
        with pair[0], pair[1]:
            yield pair
        return
    wrapped: dict[int, ssl.SSLSocket] = {}

    def wrap(side: int, purpose: int) -> None:
        context = ssl.SSLContext(purpose)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # the last one that needs none
        context.set_ciphers("aNULL:@SECLEVEL=0")
        wrapped[side] = context.wrap_socket(pair[side], server_side=side == 1)

    thread = threading.Thread(target=wrap, args=(1, ssl.PROTOCOL_TLS_SERVER))
    thread.start()
    wrap(0, ssl.PROTOCOL_TLS_CLIENT)
    thread.join()
    with wrapped[0], wrapped[1]:
        yield wrapped[0], wrapped[1]


@pytest.mark.parametrize("is_secured", [False, True])
def test_many_large_pages_go_and_come_as_they_are(is_secured: bool) -> None:
    hiredis = pytest.importorskip("hiredis", reason="the package hiredis is not installed")
    sizes = [200_000] * 20
    commands: list[list[bytes]] = []
    pages = [memoryview(value(at, size)) for at, size in enumerate(sizes)]
    names = [f"name {at}" for at in range(len(sizes))]
    views = slots(sizes)

    def serve(sock: socket.socket) -> None:
        reader = hiredis.Reader()
        while len(commands) < len(names):
            while (command := reader.gets()) is False:
                reader.feed(sock.recv(1 << 16))
            commands.append(command)
        for command in commands:
            sock.sendall(wire(command[2]))

    with ends(is_secured=is_secured) as (near, far):
        thread = threading.Thread(target=serve, args=(far,))
        thread.start()
        connection = SimpleNamespace(
            _sock=near, send_packed_command=lambda parts: near.sendall(b"".join(parts))
        )
        send_pages(connection, names, pages)
        assert read_pages(near, views) == sizes
        thread.join()
    expected = zip(names, pages, strict=True)
    assert commands == [[b"SET", name.encode(), bytes(page), b"NX"] for name, page in expected]
    assert views == pages


def test_an_error_of_the_server_is_an_answer() -> None:
    pieces = Pieces([b"+OK\r\n-OOM no", b" memory\r\n$-1\r\n"])
    answers = read_answers(cast(socket.socket, pieces), 3)
    assert answers == [None, ServerError(b"OOM no memory"), None]
