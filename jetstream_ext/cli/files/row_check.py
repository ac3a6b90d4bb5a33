"""Whether the server would take the messages of rows, for ``ingest --dry-run``, which sends none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jetstream_ext.cli.output import count, one_line, say, text_or_base64
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.frames import check_size
from jetstream_ext.protocol.headers import encode
from jetstream_ext.protocol.options import message_headers
from jetstream_ext.protocol.subjects import check_subject, covers
from jetstream_ext.types import BatchMessage

_EXAMPLES: Final = 3
_PROBLEMS: Final = 10  # that are shown
_WIDTH: Final = 100  # of a payload in text


class RowCheck:
    """Checks messages as the client and the server would; the first ones are examples.

    Attributes:
        rows: How many rows were checked.
        problems: How many of them cannot be sent.
    """

    def __init__(self, stream: str, state: StreamState | None, create: Sequence[str], max_payload: int) -> None:
        self.rows: int = 0
        self.problems: int = 0
        self._stream = stream
        self._subjects = create if state is None else state.subjects
        self._max_msg_size = None if state is None else state.max_msg_size
        self._max_payload = max_payload
        self._shown: list[str] = []
        self._examples: list[BatchMessage] = []

    def add(self, place: str, message: BatchMessage) -> None:
        """Check the message of a row; `place` names the row."""
        try:
            check_subject(message.subject)
            size = len(encode(message_headers(message))) + len(message.payload)
            check_size(size, self._max_payload, message.subject)
        except (ValueError, TypeError) as error:
            self.refuse(f"{place}: {one_line(error)}")
            return
        if not any(covers(pattern, message.subject) for pattern in self._subjects):
            self.refuse(f"{place}: stream {self._stream!r} does not store its subject {message.subject!r}")
        elif self._max_msg_size is not None and size > self._max_msg_size:
            text = f"the message has {size} bytes with its headers, more than the stream's max_msg_size of"
            self.refuse(f"{place}: {text} {self._max_msg_size}")
        else:
            self.rows += 1
            if len(self._examples) < _EXAMPLES:
                self._examples.append(message)

    def refuse(self, problem: str) -> None:
        """Note a row that cannot be sent."""
        self.rows += 1
        self.problems += 1
        if len(self._shown) < _PROBLEMS:
            self._shown.append(problem)

    @property
    def summary(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        examples = [{"subject": each.subject, **text_or_base64("data", each.payload)} for each in self._examples]
        return {"to_send": self.rows, "cannot_be_sent": self.problems, "problems": self._shown, "examples": examples}

    def show(self) -> None:
        """Print the examples and the problems."""
        for message in self._examples:
            text = message.payload.decode("utf-8", "backslashreplace")
            say(f"  {message.subject}  {text if len(text) <= _WIDTH else f'{text[: _WIDTH - 1]}…'}")
        for problem in self._shown:
            say(problem)
        if self.problems > len(self._shown):
            say(f"… and {count(self.problems - len(self._shown), 'row')} more")
