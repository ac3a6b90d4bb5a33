"""Atomic batches for the tests of this folder: how to open and fill one, and its commands in readable form."""

from typing import Any

import orjson

from jetstream_ext.protocol import frames
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import Server, StreamState
from jetstream_ext.protocol.atomic import AtomicBatchMachine
from jetstream_ext.protocol.atomic_wire import Block
from jetstream_ext.types import BatchMessage

Command = tuple[str, str, dict[str, str], bytes]


def batch(
    level: int = 4, *, version: str = "", stream: StreamState | None = None, **options: Any
) -> AtomicBatchMachine:
    """Return an open batch on a server of this API level."""
    machine = AtomicBatchMachine("b1", **options)
    machine.open(machine.prepare(BatchMessage("a.1")), Server(level, version, stream), "_INBOX.r")
    return machine


def message(subject: str = "a.1", payload: bytes = b"x", **options: Any) -> BatchMessage:
    return BatchMessage(subject, payload, **options)


def commands(block: Block) -> list[Command]:
    """Return subject, reply subject, headers and payload of every command in a block."""
    sent = read(block.data)
    assert (len(sent), sum(len(payload) for *_, payload in sent)) == (block.messages, block.size)
    return sent


def read(data: bytes) -> list[Command]:
    return [(c.subject, c.reply, dict(h.parse_lines(c.header)), c.payload) for c in frames.parse_pubs(data)]


def add(machine: AtomicBatchMachine, message: BatchMessage) -> Command | None:
    sent = commands(machine.add(machine.prepare(message)))
    assert len(sent) <= 1
    return sent[0] if sent else None


def commit(machine: AtomicBatchMachine, message: BatchMessage | None = None) -> list[Command]:
    return commands(machine.commit(None if message is None else machine.prepare(message)))


def refusal(err_code: int, code: int = 400) -> tuple[bytes, bytes]:
    """Return header block and payload of a refusal."""
    header = b"NATS/1.0 429 Too Many Requests\r\n\r\n" if err_code == 10167 else b""
    body = {"error": {"code": code, "err_code": err_code, "description": "no"}, "stream": "A", "seq": 0}
    return header, orjson.dumps(body)


def visible(machine: AtomicBatchMachine) -> tuple[Any, ...]:
    """Return everything that a caller can see of a batch."""
    return machine.state, machine.size, machine.sent, machine.staged, machine.ack, machine.error, machine.last_subject
