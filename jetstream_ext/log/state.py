"""What a log needs of the stream that it reads, as its leader says it."""

from __future__ import annotations

from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.protocol.stream_state import StreamState


def check_readable(state: StreamState, server_version: str, *, others_delete: bool) -> None:
    """Refuse a stream that a log cannot be read from.

    Args:
        state: The stream.
        server_version: The connected server's version, for the error.
        others_delete: Whether the reader accepts that consumers delete messages before it has read them.

    Raises:
        DirectGetDisabledError: It lacks ``allow_direct``.
        StreamConfigMismatchError: Its consumers delete messages.
        UnsupportedFeatureError: Its server is older than 2.11.
    """
    state.check_direct_reads(server_version)
    if state.retention != "limits" and not others_delete:
        raise StreamConfigMismatchError(
            f"stream {state.name!r} has {state.retention} retention: acknowledgements of its consumers delete messages "
            "that this reader has not read. Read a copy of it with limits retention, or read what is left with "
            "on_lost='skip'",
            diff={"retention": ("limits", state.retention)},
        )
