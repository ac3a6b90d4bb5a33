"""Credentials appear in nothing that Spark writes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nkeys
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from jetstream_ext.testing import NatsServer

JOB = Path(__file__).with_name("secrets_job.py")
LOGGING = """
logger.spark.name = org.apache.spark
logger.spark.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c: %m%n%ex
"""
PASSWORD, TOKEN = "hunter2-correct-horse", "tiger3-battery-staple"


class Key:
    """A key pair of a NATS entity."""

    def __init__(self, prefix: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public = self._pair.public_key.decode()

    def sign(self, subject: Key, kind: str, **claims: Any) -> str:
        """Return a JWT of this key about another one."""

        def part(data: bytes) -> bytes:
            return base64.urlsafe_b64encode(data).rstrip(b"=")

        body = {"jti": "x", "iat": int(time.time()), "iss": self.public, "sub": subject.public, "name": kind}
        body["nats"] = {"type": kind, "version": 2} | claims
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        text = part(json.dumps(head).encode()) + b"." + part(json.dumps(body).encode())
        return (text + b"." + part(self._pair.sign(text))).decode()


def operated(folder: Path) -> tuple[str, str, list[str]]:
    """Return the configuration of a server that trusts an operator, the path of a user's credentials, and their secrets."""
    operator, account, system, user = (
        Key(prefix)
        for prefix in (
            nkeys.PREFIX_BYTE_OPERATOR,
            nkeys.PREFIX_BYTE_ACCOUNT,
            nkeys.PREFIX_BYTE_ACCOUNT,
            nkeys.PREFIX_BYTE_USER,
        )
    )
    free = ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "mem_storage", "disk_storage", "streams")
    limits = dict.fromkeys(free, -1) | {"consumer": -1, "wildcards": True}
    preload = {
        account.public: operator.sign(account, "account", limits=limits),
        system.public: operator.sign(system, "account"),
    }
    config = f"""
    operator: {operator.sign(operator, "operator")}
    system_account: {system.public}
    resolver: MEMORY
    resolver_preload: {{ {", ".join(f"{name}: {text}" for name, text in preload.items())} }}
    """
    jwt, seed = account.sign(user, "user", subs=-1, data=-1, payload=-1), user.seed.decode()
    path = folder / "user.creds"
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    return config, str(path), [jwt, seed]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Options to connect, by the kind of secret; `secrets` among them has the secrets themselves."""
    user = Key(nkeys.PREFIX_BYTE_USER)
    seed = tmp_path / "user.nk"
    seed.write_bytes(user.seed)
    operator, creds, more = operated(tmp_path)
    users = f'authorization {{ users: [ {{user: me, password: "{PASSWORD}"}}, {{nkey: {user.public}}} ] }}'
    with ExitStack() as stack:
        both = stack.enter_context(NatsServer(config=users)).url
        yield {
            "password": {"servers": both, "user": "me", "passwordEnv": "JETSTREAM_EXT_JOB_PASSWORD"},
            "nkey": {"servers": both, "nkeyFile": str(seed)},
            "token": {
                "servers": stack.enter_context(NatsServer(config=f'authorization {{token: "{TOKEN}"}}')).url,
                "tokenEnv": "JETSTREAM_EXT_JOB_TOKEN",
            },
            "creds": {"servers": stack.enter_context(NatsServer(config=operator)).url, "credsFile": creds},
            "secrets": {
                "password": PASSWORD,
                "token": TOKEN,
                "nkey": user.seed.decode(),
                "jwt": more[0],
                "seed": more[1],
            },
        }


def test_no_secret_is_written_down(servers: dict[str, dict[str, str]], with_js: Any, tmp_path: Path) -> None:
    secrets, password, nkey = servers["secrets"], servers["password"], servers["nkey"]

    async def fill(js: JetStreamContext) -> None:
        for name in ("IN", "OUT"):
            await js.add_stream(StreamConfig(name=name, subjects=[name], allow_direct=True, allow_batched=True))
        await js.publish("IN", b"one")

    connect = {
        "password": {"user": "me", "password": PASSWORD},
        "token": {"token": TOKEN},
        "creds": {"user_credentials": servers["creds"].get("credsFile")},
    }
    for kind, arguments in connect.items():
        with_js(fill, servers[kind]["servers"], **arguments)
    events, checkpoint, logging = tmp_path / "events", tmp_path / "checkpoint", tmp_path / "log4j2.properties"
    logging.write_text(LOGGING)
    events.mkdir()
    anywhere = {"servers": password["servers"], "path": "IN", "requestTimeout": "5"}
    wrong = [
        # The secret in place of its reference, and other mistakes.
        anywhere | {"user": "me", "password": PASSWORD},
        anywhere | {"user": "me", "passwordEnv": PASSWORD},
        anywhere | {"tokenEnv": TOKEN},
        anywhere | {"nkeyFile": secrets["nkey"]},
        anywhere | {"credsFile": secrets["seed"]},
        anywhere | {"credsFile": Path(servers["creds"]["credsFile"]).read_text()},
        anywhere | {"servers": f"nats://me:{PASSWORD}@127.0.0.1"},
        anywhere | {"servers": f"nats://me:x,{PASSWORD}@127.0.0.1"},
        anywhere | {"servers": f"nats://me:{PASSWORD}"},
        anywhere | {"nats.password": PASSWORD},
        # Credentials that the server refuses.
        anywhere | {"tokenEnv": "JETSTREAM_EXT_JOB_TOKEN"},
        anywhere | {"user": "you", "passwordEnv": "JETSTREAM_EXT_JOB_PASSWORD"},
        anywhere | {"credsFile": servers["creds"]["credsFile"]},
        # Valid credentials, for a stream that does not exist.
        nkey | {"path": "NONE"},
    ]
    given = {
        "conf": {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": events.as_uri(),
            "spark.eventLog.compress": "false",
            "spark.logConf": "true",
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging.as_uri()}",
            "spark.ui.showConsoleProgress": "false",
            # As documented for executors: Spark redacts the values of such names, except where it logs a slow event.
            # With this threshold every event is slow.
            "spark.scheduler.listenerbus.logSlowEvent": "false",
            "spark.scheduler.listenerbus.logSlowEvent.threshold": "0ms",
            "spark.executorEnv.JETSTREAM_EXT_JOB_PASSWORD": PASSWORD,
            "spark.executorEnv.JETSTREAM_EXT_JOB_TOKEN": TOKEN,
        },
        "read": [servers[kind] | {"path": "IN"} for kind in ("nkey", "token", "creds", "password")],
        "write": password | {"stream": "OUT", "subject": "OUT"},
        "fail": wrong,
        "checkpoint": str(checkpoint),
    }
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "JETSTREAM_EXT_JOB_PASSWORD": PASSWORD,
        "JETSTREAM_EXT_JOB_TOKEN": TOKEN,
    }
    done = subprocess.run(
        [sys.executable, str(JOB), json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=tmp_path,
        timeout=540,
        check=False,
    )
    log = done.stdout
    assert done.returncode == 0, log.decode(errors="replace")[-5000:]
    assert log.count(b"rows: 1") == len(given["read"])
    assert log.count(b"\nfailed\n") == len(wrong)
    stored = with_js(lambda js: js.stream_info("OUT"), password["servers"], user="me", password=PASSWORD)
    assert stored.state.messages == 4  # by the batch write and by the query
    written = {
        path: path.read_bytes() for folder in (events, checkpoint) for path in folder.rglob("*") if path.is_file()
    }
    everything = b"".join(written.values())
    # The output is complete: the driver's log, plans, the query's progress, Spark's settings with redacted values.
    assert b" INFO " in log
    assert b"== Physical Plan ==" in log
    assert b"spark.executorEnv.JETSTREAM_EXT_JOB_PASSWORD=*********(redacted)" in log
    for what in (b"SparkListenerJobStart", b"SparkListenerEnvironmentUpdate", b"jetstream", b"QueryProgressEvent"):
        assert what in everything, what
    for kind, secret in secrets.items():
        lines = log.decode(errors="replace").splitlines()
        around = [lines[max(0, n - 3) : n + 4] for n, line in enumerate(lines) if secret in line]
        assert around == [], kind
        assert [path for path, data in written.items() if secret.encode() in data] == [], kind
