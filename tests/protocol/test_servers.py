"""Lists of servers, and the credentials in their URLs."""

import pytest
from cells import walk

from jetstream_ext.servers import Servers, parse_servers

HOST = "nats://h:1"


@walk("text, urls", [
    ("h", ["nats://h"]), (" h:1 , tls://i,j:2,", [HOST, "tls://i", "nats://j:2"]),
    ("TLS://H:1, wss://i/path?x=1", ["tls://H:1", "wss://i/path?x=1"]), ("nats://[::1]:4222,::", None),
    ("nats://[::1]:4222", ["nats://[::1]:4222"]), ("h:1,h:1", [HOST]), ("@h:1", [HOST]),
])  # fmt: skip
def test_a_list_is_split_into_urls_with_schemes(text: str, urls: list[str] | None) -> None:
    if urls is None:
        with pytest.raises(ValueError, match="server 2 is invalid"):
            parse_servers(text)
    else:
        assert parse_servers(text) == Servers(tuple(urls))


@walk(
    "text, user, password",
    [
        ("nats://u:p@h:1", "u", "p"),
        ("u:p@h:1", "u", "p"),
        ("nats://token@h:1", "token", None),
        ("nats://u:@h:1", "u", ""),
        ("nats://:p@h:1", "", "p"),
        ("nats://u:a/b?c#d[e]f@h:1", "u", "a/b?c#d[e]f"),
        ("nats://u:a,b@h:1", "u", "a,b"),
        ("u:a,b@h:1", "u", "a,b"),
        ("nats://u:a@b@h:1", "u", "a@b"),
        ("nats://u:a:b@h:1", "u", "a:b"),
        ("nats://u:a://b@h:1", "u", "a://b"),
        ("u:a://b@h:1", "u", "a://b"),
        ("nats://u:a b é@h:1", "u", "a b é"),
        ("nats://u%3A:a%40b%2C%25%C3%A9@h:1", "u:", "a@b,%é"),
        ("nats://u:100%@h:1", "u", "100%"),
        ("nats://u:12/34@h:1", "u", "12/34"),
    ],
)
def test_credentials_may_hold_any_character_that_is_not_ambiguous(text: str, user: str, password: str | None) -> None:
    found = parse_servers(text)
    assert (found.urls, found.user, found.password) == ((HOST,), user, password)
    assert repr(found) == f"Servers(urls=({HOST!r},))"


def test_a_comma_after_the_credentials_starts_another_server() -> None:
    assert parse_servers("u:a,b@h:1,i").urls == (HOST, "nats://i")
    assert parse_servers("nats://i,nats://u:a,b@h:1") == Servers(("nats://i", HOST), "u", "a,b")


@walk("text, problem", [
    ("", "it is empty"), (" , ", "it is empty"), ("nats://", "server 1 is invalid: it needs a host"),
    ("hun:ter2", "server 1 is invalid: it needs a host, and a port"),
    ("nats://hun:ter2", "server 1 is invalid: it needs a host, and a port"),
    ("nats://hun:ter2@", r"server 1 \(''\) is invalid: it needs a host"),
    ("nats://hun:ter2@h:0", r"server 1 \('h:0'\) is invalid"),
    ("nats://hun:ter2@h:1,i:port", r"server 2 \('i:port'\) is invalid"),
    ("http://hun:ter2@h", r"server 1 \('h'\) is invalid: its scheme must be"),
    ("hunter2://x@h", r"server 1 \('h'\) is invalid: its scheme must be"),
    ("hun:ter2@h,hun:ter2@i", "percent-encode"), ("nats://hun:ter2,@@h", "percent-encode"),
    ("nats://hun:ter2@h,nats://hun:ter3@h", "different credentials"), ("nats://hun:ter2%ff@h", "not UTF-8"),
    ("wss://h/hun@ter2", "'/' in front of '@'"),
])  # fmt: skip
def test_an_error_repeats_no_part_of_the_credentials(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_servers(text)
    assert "hun" not in str(caught.value)
    assert "ter" not in str(caught.value)
    assert caught.value.__context__ is None
