"""The replies to a publisher: acknowledgements, refusals, and the frames of a fast batch."""

from typing import Any

from . import gojson
from .errors import ApiError
from .versions import Profile

__all__ = ["flow_ack", "flow_error", "flow_gap", "pub_ack", "pub_error"]


def pub_ack(
    profile: Profile, stream: str, seq: int, *, duplicate: bool = False, batch: tuple[str, int] | None = None
) -> bytes:
    """Return an acknowledgement; the server puts it together by hand, so its blanks are its own."""
    text = f'{{"stream":{gojson.quote(stream)},{" " if profile.spaced_ack else ""}"seq":{seq}'
    if duplicate:
        text += ',"duplicate": true'
    if batch is not None:
        text += f',"batch":{gojson.quote(batch[0])},"count":{batch[1]}'
    return (text + "}").encode("utf-8", "surrogateescape")


def pub_error(stream: str, error: ApiError, *, batch: tuple[str, int] | None = None) -> bytes:
    """Return a refusal; only the draft has the batch beside it."""
    value: dict[str, Any] = {"error": error.as_json(), "stream": stream, "seq": 0}
    if batch is not None:
        value |= {"batch": batch[0], "count": batch[1]}
    return gojson.dumps(value)


def flow_ack(profile: Profile, seq: int, messages: int) -> bytes:
    """Return the frame that says how far a fast batch is stored, and how often such frames will come."""
    if profile.draft:
        return gojson.dumps({**({"seq": seq} if seq else {}), "ack_msgs": messages})
    return gojson.dumps({"type": "ack", "seq": seq, "msgs": messages})


def flow_gap(profile: Profile, expected: int, seq: int) -> bytes:
    """Return the frame that says that `expected` up to and excluding `seq` did not come."""
    if profile.draft:
        return gojson.dumps({**({"last_seq": expected - 1} if expected > 1 else {}), "seq": seq})
    return gojson.dumps({"type": "gap", "last_seq": expected, "seq": seq})


def flow_error(profile: Profile, seq: int, error: ApiError) -> bytes:
    """Return the frame that says that one message was refused."""
    if profile.draft:
        return gojson.dumps({"seq": seq, "error": error.as_json()})
    return gojson.dumps({"type": "err", "seq": seq, "error": error.as_json()})
