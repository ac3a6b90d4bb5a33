"""The flights example."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from jetstream_ext.spark.streaming import HAS_LIMITS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flights_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple looks up its module
    spec.loader.exec_module(module)
    return module


def test_the_bucket_and_the_data_set_agree_on_a_few_flights(
    spark: SparkSession, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The example stops its session, which the tests share.
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    monkeypatch.setattr(sys, "argv", ["flights.py", "--flights", "3000"])
    assert example.main() == 0
    out, err = capfd.readouterr()
    assert "agree on 15 carriers and 3,000 flights" in out
    assert ("(3 micro-batches)" if HAS_LIMITS else "(1 micro-batch)") in out
    assert "United Air Lines" in out
    assert err == ""


def test_json_reports_every_stage(
    spark: SparkSession, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    monkeypatch.setattr(sys, "argv", ["flights.py", "--flights", "200", "--json"])
    assert example.main() == 0
    out, err = capfd.readouterr()
    said = json.loads(out)
    assert said["agree"] is True
    assert sum(carrier["flights"] for carrier in said["carriers"].values()) == 200
    assert {stage["name"]: stage["messages"] for stage in said["stages"]}["publish"] == 200
    assert "agree on" in err


def test_an_unusable_java_is_reported_before_anything_starts(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["flights.py"])
    assert example.main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Java 17 or newer" in err


def test_an_invalid_number_of_flights_is_refused(
    cell: Any, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in ["0", "-5", "many"]:
        with cell(count):
            monkeypatch.setattr(sys, "argv", ["flights.py", "--flights", count])
            with pytest.raises(SystemExit, match="2"):
                example.main()
            assert "--flights" in capsys.readouterr().err


def test_messages_are_in_the_order_of_departure_and_missing_values_are_null(example: ModuleType) -> None:
    flights = example.load_flights(None)
    assert len(flights) == 336_776
    first = flights.iloc[0]
    assert (first.month, first.day, first.dep_time) == (1, 1, 517)
    cancelled = flights[flights["dep_time"].isna()].head(1)
    [(subject, payload)] = example.messages(cancelled)
    assert subject == f"flights.{cancelled.iloc[0].origin}.{cancelled.iloc[0].carrier}"
    assert b'"dep_time":null' in payload
    assert b"NaN" not in payload
