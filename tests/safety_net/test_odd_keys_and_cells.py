"""Keys that are not UTF-8, and names that a type checker looks for."""

import ast
from collections.abc import Callable
from pathlib import Path

from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.testing import NatsServer


async def test_snapshot_keeps_keys_that_are_not_utf8_apart(
    server: NatsServer,
    js: JetStreamContext,
    stream_name: Callable[[], str],
    publish_raw: Callable[..., None],
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    values = ((b"\xff", b"1"), (b"\xfe", b"2"), (b"ok", b"3"))
    publish_raw(server, ((b"$KV.%b.%b" % (name.encode(), key), value) for key, value in values))
    try:
        snapshot = await kvx.snapshot(kv)
    except JetStreamExtError:
        return  # an error is also correct
    assert {entry.value for entry in snapshot.values()} == {b"1", b"2", b"3"} or not snapshot.complete


def test_package_imports_its_errors_by_name() -> None:
    # pyright knows a submodule only where the package itself binds the name.
    tree = ast.parse(Path(jsx.__file__).read_text(encoding="utf-8"))
    for_checkers = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imports = [node for node in (*tree.body, *for_checkers) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "errors" in {alias.asname or alias.name for node in imports for alias in node.names}
