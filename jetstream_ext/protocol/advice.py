"""What to do about an option that a stream or a bucket lacks: the Python call and the command, in every error's words."""

from __future__ import annotations

import shlex
from contextvars import ContextVar
from typing import Final

from jetstream_ext.errors import ErrorCode

STREAM_OPTIONS: Final = {
    "direct": "allow_direct",
    "atomic": "allow_atomic",
    "batched": "allow_batched",
    "ttl": "allow_msg_ttl",
}
"""What ``jetstream-ext enable`` can turn on: the field of the stream's configuration for each of its options."""

CONNECTION_OPTIONS: Final[ContextVar[str]] = ContextVar("CONNECTION_OPTIONS", default="")
"""Further options of every command, which name the server; the command line sets them for its own connection."""


def enable_command(stream: str, *options: str) -> str:
    """Return the command that turns on `options` (keys of `STREAM_OPTIONS`) of a stream."""
    return _command("enable", stream, options)


def enable_bucket_command(bucket: str, *options: str) -> str:
    """As `enable_command`, for a bucket and arguments of `kv.enable`."""
    return _command("enable-bucket", bucket, options)


def enable_stream(stream: str, *options: str, what: str = "it") -> str:
    """Return how to turn on `options` (keys of `STREAM_OPTIONS`) of a stream; "STREAM" stands for an unknown one."""
    fields = " and ".join(f"{STREAM_OPTIONS[option]}=True" for option in options)
    return f"enable {what} with {fields} (jetstream_ext.ensure_stream) or '{enable_command(stream, *options)}'"


def after_refusal(code: int | None, stream: str = "STREAM") -> str:
    """Return what to do after the refusal of a message with this ``err_code``, to append to its error; or ""."""
    return f"; {enable_stream(stream, 'ttl', what='TTLs')}" if code == ErrorCode.MESSAGE_TTL_DISABLED else ""


def enable_bucket(bucket: str, *options: str, what: str = "it") -> str:
    """Return how to turn on `options` of a bucket (arguments of `kv.enable`)."""
    arguments = ", ".join(("kv", *(f"{option}=True" for option in options)))
    command = enable_bucket_command(bucket, *options)
    return f"enable {what} with `await jetstream_ext.kv.enable({arguments})` or '{command}'"


def _command(name: str, target: str, options: tuple[str, ...]) -> str:
    """Return a command that can be copied into a shell; other programs choose the names of streams."""
    target = shlex.quote(target) if target.isprintable() else "NAME"
    flags = [*(f"--{option}" for option in options), *filter(None, [CONNECTION_OPTIONS.get()])]
    return " ".join(["jetstream-ext", name, *([*flags, "--", target] if target.startswith("-") else [target, *flags])])
