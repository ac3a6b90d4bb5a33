"""Foreign text is printable in errors and in log records."""

import ast
import logging
import pickle
from pathlib import Path

import nats.errors
import pytest

import jetstream_ext
from jetstream_ext.errors import BatchServerError, ConversionError, FencedError, JetStreamExtError, server_error
from jetstream_ext.text import counted, did_you_mean, get_logger, numbered, plural, printable, safe_text

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J\x7f\u202e\u200b\u2028\ud800\r\n"
ESCAPED = r"\x1b]0;owned\x07\x1b[31mred\x9b2J\x7f\u202e\u200b\u2028\ud800\r\n"
PACKAGE = Path(jetstream_ext.__file__).parent


def test_what_is_not_printable_is_escaped_and_the_rest_stays() -> None:
    assert printable(EVIL) == ESCAPED
    assert printable("Zoë \\x1b 東京 [bold] 😀") == "Zoë \\x1b 東京 [bold] 😀"
    assert printable(EVIL, keep_lines=True) == ESCAPED.removesuffix(r"\n") + "\n"
    assert printable(ESCAPED) == ESCAPED


def test_the_text_of_an_error_is_printable_and_the_description_is_the_servers_own() -> None:
    error = server_error(code=400, err_code=10_060, description=EVIL)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == f"{ESCAPED} (error 10060)"
        assert each.description == EVIL
        assert repr(each).isprintable()
    assert str(JetStreamExtError(EVIL)) == str(BatchServerError(EVIL)) == ESCAPED


def test_every_error_class_shows_a_printable_text() -> None:
    classes, found = [JetStreamExtError], 0
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        assert ESCAPED in str(kind(EVIL)), kind
        found += 1
    assert found > 40


def test_a_log_record_is_printable(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jetstream_ext")
    for argument in (EVIL, ValueError(EVIL), [EVIL], EVIL.encode(errors="surrogatepass")):
        get_logger("client").warning("%s", argument)
        get_logger("fast").warning("%s and %r", EVIL, argument)
    assert len(caplog.messages) == 8
    assert all(message.isprintable() for message in caplog.messages)


def test_a_log_record_that_is_printable_keeps_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("fast").warning("batch %s", "b")
    assert (caplog.records[0].msg, caplog.records[0].args) == ("batch %s", ("b",))


def test_numbers_agree_with_their_nouns() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 12_345)] == ["0 rows", "1 row", "2 rows", "12,345 rows"]
    assert (numbered(7, 7), numbered(7, 9, "sequence")) == ("message 7", "sequences 7 to 9")
    assert [plural(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]


def test_the_nearest_name_is_suggested_and_a_distant_one_is_not() -> None:
    assert did_you_mean("MaxAge", ["max_msgs", "max_age"]) == "; did you mean 'max_age'?"
    assert did_you_mean("zzz", ["max_msgs", "max_age"]) == did_you_mean("x", []) == ""


def calls(module: Path) -> list[str]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_every_logger_of_the_package_is_made_by_get_logger() -> None:
    found = {path.name for path in PACKAGE.rglob("*.py") if "logging.getLogger" in calls(path)}
    assert found == {"text.py", "__main__.py"}  # the command line sets the level of asyncio's


def test_only_one_module_of_the_command_line_writes_to_the_terminal() -> None:
    writers = {"click.echo", "click.secho", "print", "Text", "Text.assemble", "Text.from_markup", "Console", "Table"}
    for path in (PACKAGE / "cli").glob("*.py"):
        if path.name not in ("output.py", "flights.py"):
            assert writers.isdisjoint(calls(path)), path


def test_only_texts_that_quote_no_data_are_safe() -> None:
    class OwnError(JetStreamExtError):
        pass

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert safe_text(FencedError("a", name="r")) == "a"
    assert safe_text(nats.errors.ConnectionClosedError()) == "nats: connection closed"
    for error in (ConversionError("a"), ValueError("a"), OwnError("a"), TimeoutError("a"), MuteError()):
        assert safe_text(error) == ""
