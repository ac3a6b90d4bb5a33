"""Where the model of a release differs: one row for each feature, with the releases that have it.

Otherwise every model behaves as the newest release. Rows that are no features are those that a client has to know. Every
row was observed on real servers; the rest of the reference server asks for a row and never compares versions.
"""

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from .wire.protocol import get_header

DIALECTS = {
    "2.10": "2.10.26",
    "2.11": "2.11.11",
    "2.12": "2.12.8",
    "2.14": "2.14.6",
    "2.15": "2.15.1",
    "draft": "2.15.1",
}
"""The release behind each dialect; `draft` is the first wording of the ADRs, on top of the newest release."""

_OLDEST = (2, 10, 0)
_API_LEVELS = {(2, 15, 0): 5, (2, 14, 0): 4, (2, 12, 5): 3, (2, 12, 0): 2, (2, 11, 0): 1, _OLDEST: 0}
_LEVEL = re.compile(r"[+-]?[0-9]{1,18}")


def _in(since: tuple[int, int, int] = _OLDEST, *, until: tuple[int, int, int] | None = None) -> Any:
    """Declare a row: releases from `since` on have it, up to and excluding `until`."""
    return field(default=until is None, metadata={"since": since, "until": until or (9999, 0, 0)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The behaviour of one release of the server; `Profile.of` looks it up."""

    version: str
    api_level: int
    """The JetStream API level; 0 in releases before 2.11, which have none."""
    draft: bool = False
    """Whether the server speaks the first wording of the ADRs."""

    # Features.
    ttl: bool = _in((2, 11, 0))
    """Per-message TTLs and delete markers."""
    batch_get: bool = _in((2, 11, 0))
    """Direct Get knows `batch`, `multi_last`, `start_time` and `up_to_*`."""
    atomic: bool = _in((2, 12, 0))
    atomic_eob: bool = _in((2, 14, 0))
    """A batch can be committed by the value `eob` of `Nats-Batch-Commit`, without storing that message."""
    fast: bool = _in((2, 14, 0))
    pause: bool = _in((2, 11, 0))
    reset: bool = _in((2, 14, 0))
    durable_sourcing: bool = _in((2, 14, 0))
    """Copies can use a durable consumer, with the `flow_control` ack policy."""

    # Features that are not modelled: a release that has them refuses them.
    tracing: bool = _in((2, 11, 0))
    priorities: bool = _in((2, 11, 0))
    counters: bool = _in((2, 12, 0))
    schedules: bool = _in((2, 12, 0))

    # How a client finds out what the server has.
    strict: bool = _in((2, 12, 0))
    """INFO has `api_lvl`, `Nats-Required-Api-Level` is checked, and a request with an unknown field is refused."""
    metadata: bool = _in((2, 11, 0))
    """Configurations show the API levels and the server's version as metadata."""

    # Headers.
    expects_other_subject: bool = _in((2, 11, 0))
    """`Nats-Expected-Last-Subject-Sequence-Subject` is known."""
    source_header_has_identity: bool = _in((2, 15, 0))
    """`Nats-Stream-Source` names the identity of the origin, and a client may not publish it."""

    # Fast batches.
    fast_backward_gap: bool = _in((2, 15, 0))
    """A repeated or smaller sequence is reported as a gap before the final ack."""
    fast_ping_opens: bool = _in((2, 14, 0), until=(2, 15, 0))
    fast_lost_final_ack: bool = _in((2, 14, 0), until=(2, 14, 3))
    """With gap mode `ok`, a commit message that fails its checks never gets the final ack."""

    def meets_required_level(self, header: bytes) -> bool:
        """Whether the server has the API level that a header block requires, if it requires one."""
        text = get_header(header, "Nats-Required-Api-Level")
        return not text or (_LEVEL.fullmatch(text) is not None and int(text) <= self.api_level)

    @classmethod
    def of(cls, version: str, *, draft: bool = False, api_level: int | None = None) -> Self:
        """Return the profile of a release.

        Args:
            version: A release such as `"2.12.8"`; unlisted ones behave as their number implies.
            draft: Whether to speak the first wording of the ADRs.
            api_level: The API level to claim instead of the release's own.

        Raises:
            ValueError: `version` is not a version, or older than 2.10.
        """
        try:
            major, minor, patch = (int(part) for part in version.split("-")[0].split("."))
        except ValueError:
            raise ValueError(f"{version!r} is not a nats-server version; write it like '2.12.8'") from None
        release = (major, minor, patch)
        if release < _OLDEST:
            raise ValueError(f"the reference server models version 2.10.0 and newer, not {version}")
        level = next(level for since, level in _API_LEVELS.items() if since <= release)
        rows = {row.name: row.metadata for row in fields(cls) if row.metadata}
        profile = cls(version=version, api_level=level if api_level is None else api_level, draft=draft)
        return replace(profile, **{name: row["since"] <= release < row["until"] for name, row in rows.items()})
