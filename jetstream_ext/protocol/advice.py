"""What to do about an option that a stream or a bucket lacks: the Python call and the command, in every error's words."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from contextvars import ContextVar
from typing import Any, Final

from jetstream_ext.errors import BatchError, ErrorCode, NoStreamError, ServerError, batch_refusal, reached_no_stream
from jetstream_ext.protocol.options import OPTIONS

_PLACEHOLDER: Final = "NAME"  # in a command, for a name that is not known or not printable

_DISABLED: Final[dict[int | None, tuple[str, str, str]]] = {
    ErrorCode.ATOMIC_DISABLED: ("atomic batches are disabled", "atomic", "them"),
    ErrorCode.FAST_DISABLED: ("fast ingest is disabled", "batched", "it"),
}
"""For the refusals of a stream that lacks an option: what the error says, the option, and the pronoun for it."""

CONNECTION_OPTIONS: Final[ContextVar[str]] = ContextVar("CONNECTION_OPTIONS", default="")
"""Further options of every command, which name the server; the command line sets them for its own connection."""


def enable_command(stream: str, *options: str) -> str:
    """Return the command that turns on `options` (keys of `OPTIONS`) of a stream."""
    return _command("enable", stream, options)


def enable_bucket_command(bucket: str, *options: str) -> str:
    """As `enable_command`, for a bucket and arguments of `kv.enable`."""
    return _command("enable-bucket", bucket, options)


def enable_stream(stream: str, *options: str, what: str = "it", subject: str = "") -> str:
    """Return how to turn on `options` (keys of `OPTIONS`) of a stream.

    A stream that is not known ("") is described as the one that stores `subject`.
    """
    fields = " and ".join(f"{OPTIONS[option].field}=True" for option in options)
    command = enable_command(stream or _PLACEHOLDER, *options)
    which = "" if stream else f", where {_PLACEHOLDER} is the stream that stores subject {subject!r}"
    return f"enable {what} with {fields} (jetstream_ext.ensure_stream) or '{command}'{which}"


def after_refusal(code: int | None, stream: str, subject: str, expected: Collection[str] = ()) -> str:
    """Return what to append to the error of a message that was refused with this ``err_code``, or "".

    The arguments are those of `refused`.
    """
    if code == ErrorCode.MESSAGE_TTL_DISABLED:
        what = f"TTLs on stream {stream!r}" if stream else "TTLs"
        return f"; {enable_stream(stream, 'ttl', what=what, subject=subject)}"
    if code == ErrorCode.STREAM_MISMATCH:
        names = " or ".join(sorted(repr(name) for name in set(expected) - {stream}))
        stored = f"stream {stream!r} stores its subject" if stream else ""
        found = ", and ".join(filter(None, [names and f"a message expects stream {names}", stored]))
        return f"; {found}" if found else ""
    if code == ErrorCode.FAST_UNKNOWN_BATCH:
        return "; it is for another stream, or the server no longer has the batch"
    return ""


def refused(
    error: ServerError,
    what: str,
    stored: str,
    subject: str,
    stream: str,
    expected: Collection[str],
    *,
    more: str = "",
    unreachable: str | None = None,
    **facts: Any,
) -> BatchError:
    """Return the error of a batch of which the server refused `what`, when `stored` of it is stored.

    Args:
        error: The refusal.
        what: The message or the commit, in words.
        stored: What of the batch is stored, in words.
        subject: The subject of what was refused.
        stream: The stream that stores it, or "" if it is not known.
        expected: The streams that messages of the batch expect.
        more: What else to say; "": `after_refusal`.
        unreachable: Why perhaps no JetStream answers, or ""; None: the refusal cannot say that no stream has the subject.
        facts: The keywords of `BatchError`.
    """
    batch = f"batch {facts['batch_id']}"
    if unreachable is not None and reached_no_stream(error):
        text = f"no stream stores subject {subject!r}, or the stream has no leader{unreachable}; {stored}"
        return NoStreamError(f"{batch}: {text}", **facts)
    stream = error.stream or stream
    if error.err_code in _DISABLED:
        disabled, option, them = _DISABLED[error.err_code]
        where = f"stream {stream!r}, which stores" if stream else "the stream of"
        text = f"{disabled} on {where} subject {subject!r}; {stored}; "
        text += enable_stream(stream, option, what=them, subject=subject)
    else:
        text = f"{what} was refused: {error.description}; {stored}"
        text += more or after_refusal(error.err_code, stream, subject, expected)
    return batch_refusal(error, f"{batch}: {text}", **facts)


def enable_bucket(bucket: str, *options: str, what: str = "it") -> str:
    """Return how to turn on `options` of a bucket (arguments of `kv.enable`)."""
    arguments = ", ".join(("kv", *(f"{option}=True" for option in options)))
    command = enable_bucket_command(bucket, *options)
    return f"enable {what} with `await jetstream_ext.kv.enable({arguments})` or '{command}'"


def _command(name: str, target: str, options: tuple[str, ...]) -> str:
    """Return a command that can be copied into a shell; other programs choose the names of streams."""
    target = shlex.quote(target) if target.isprintable() else _PLACEHOLDER
    flags = [*(f"--{option}" for option in options), *filter(None, [CONNECTION_OPTIONS.get()])]
    return " ".join(["jetstream-ext", name, *([*flags, "--", target] if target.startswith("-") else [target, *flags])])
