"""Fixtures shared by all tests: one real server per session, one connection per test; a server in a container.

A container needs an engine that answers; ``.ci/container-engine`` brings one. Where there is none, tests that want one
are skipped, with the reason; ``JETSTREAM_EXT_REQUIRE_CONTAINER=1`` turns that into a failure, so that a job that brings an
engine cannot pass by skipping.
"""

import os
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator

import nats
import pytest
from hypothesis import HealthCheck, settings
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetstream_ext.testing import NatsServer

# How long an example takes says something of the machine, and nothing of what is tested.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

DEFAULT_IMAGE = os.environ.get("JETSTREAM_EXT_IMAGE", "nats:2.15.1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nats-image",
        nargs="?",
        const=DEFAULT_IMAGE,
        metavar="IMAGE",
        help="run the conformance tests against a server in a container of this image (alone: JETSTREAM_EXT_IMAGE, "
        "or else nats:2.15.1)",
    )


@pytest.fixture(scope="session")
def server() -> Iterator[NatsServer]:
    """A server that all tests share: use names of your own, and do not kill, pause or restart it."""
    with NatsServer() as server:
        yield server


@pytest.fixture
async def nc(server: NatsServer) -> AsyncIterator[Client]:
    """A connection of this test's own."""
    nc = await nats.connect(server.url, connect_timeout=10)
    try:
        yield nc
    finally:
        await nc.close()


@pytest.fixture
def js(nc: Client) -> JetStreamContext:
    """A JetStream context on this test's connection."""
    return nc.jetstream()


@pytest.fixture
def stream_name() -> Callable[[], str]:
    """A factory of names that no other stream or bucket of the session has; good as subject tokens too."""
    return lambda: f"T{uuid.uuid4().hex[:12]}"


def no_container(image: str) -> str | None:
    """Return why there can be no container here."""
    try:
        import docker
        import docker.errors
        import testcontainers.community.nats  # noqa: F401
    except ImportError as error:
        return f"testcontainers is not installed ({error})"
    try:
        client = docker.from_env(timeout=5)
    except docker.errors.DockerException:
        return "no container engine answers"
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(image)
        except docker.errors.APIError:
            return f"the engine has no image {image}, and cannot pull it"
    except docker.errors.APIError as error:
        return f"the engine refuses: {error.explanation}"
    finally:
        client.close()
    return None


@pytest.fixture(scope="session")
def container_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server in a container; the test is skipped, with the reason, where there can be none."""
    image = request.config.getoption("--nats-image") or DEFAULT_IMAGE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # testcontainers' own
        if reason := no_container(image):
            if os.environ.get("JETSTREAM_EXT_REQUIRE_CONTAINER"):
                pytest.fail(f"a container is required: {reason}", pytrace=False)
            pytest.skip(f"container: {reason}")
        from testcontainers.community.nats import NatsContainer

        with NatsContainer(image, jetstream=True, ready_timeout_secs=30) as container:
            url = container.nats_uri()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield url
