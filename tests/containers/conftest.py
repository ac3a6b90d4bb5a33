"""A nats-server in a container, where an engine answers.

``JETSTREAM_EXT_IMAGE`` names the image. ``JETSTREAM_EXT_REQUIRE_CONTAINER=1`` turns the skip into a failure, so that a
job that brings an engine cannot pass by skipping. ``.ci/container-engine`` brings one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

IMAGE = os.environ.get("JETSTREAM_EXT_IMAGE", "nats:2.15.1")


def missing() -> str | None:
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
        client.images.get(IMAGE)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(IMAGE)
        except docker.errors.APIError:
            return f"the engine has no image {IMAGE}, and cannot pull it"
    except docker.errors.APIError as error:
        return f"the engine refuses: {error.explanation}"
    finally:
        client.close()
    return None


@pytest.fixture(scope="session")
def container_url() -> Iterator[str]:
    """The URL of a server in a container; the test is skipped, with the reason, where there can be none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # testcontainers' own
        if reason := missing():
            if os.environ.get("JETSTREAM_EXT_REQUIRE_CONTAINER"):
                pytest.fail(f"a container is required: {reason}", pytrace=False)
            pytest.skip(f"container: {reason}")
        from testcontainers.community.nats import NatsContainer

        with NatsContainer(IMAGE, jetstream=True, ready_timeout_secs=30) as container:
            url = container.nats_uri()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield url
