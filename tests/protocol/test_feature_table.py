"""What a server has, by its version or API level, and the error for a server that is too old."""

from cells import walk

from jetstream_ext.errors import UnsupportedFeatureError
from jetstream_ext.protocol import feature_table


def test_the_error_of_a_feature_names_the_version_that_it_needs() -> None:
    error = feature_table.FAST_INGEST.unsupported(server_version="2.12.8", api_level=3, detail="nothing was sent")
    assert isinstance(error, UnsupportedFeatureError)
    assert str(error) == (
        "fast ingest needs nats-server 2.14 (JetStream API level 4), but the server is 2.12.8 (level 3); nothing was sent"
    )
    assert (error.feature, error.required_api_level, error.server_version) == ("fast ingest", 4, "2.12.8")
    assert str(feature_table.ATOMIC.unsupported()).endswith("but the server is older")


@walk("version", ["", "v2", "2", "2.15", "2.15.1-x", "\u0662.15.1", "9" * 5000, "-1.0", "2.15.1.1"])
def test_any_version_of_a_server_can_be_compared(version: str) -> None:
    assert feature_table.ATOMIC.on(version) == version.startswith(("2.15",))
    feature_table.FENCED_BATCHES.check(version, "nothing was sent")
