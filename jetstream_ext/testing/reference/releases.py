"""Where releases of the server differ: one row for each difference, with the releases that have it.

Every row was observed on real servers. The rest of the reference server asks for a row and never compares versions.
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
_UNKNOWN_BUILD = ("0000000", "go1.27.2")
_BUILDS = {
    "2.10.26": ("2898698", "go1.24.0"),
    "2.11.11": ("ac1095e", "go1.25.4"),
    "2.12.0": ("96e2317", "go1.25.1"),
    "2.12.8": ("b692325", "go1.26.2"),
    "2.14.0": ("4828437", "go1.26.2"),
    "2.14.6": ("1aa10f9", "go1.27.0"),
    "2.15.1": ("b2fd3ef", "go1.27.2"),
}
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
    git_commit: str = _UNKNOWN_BUILD[0]
    go: str = _UNKNOWN_BUILD[1]

    # Connections.
    announces_level: bool = _in((2, 12, 0))
    """INFO has `api_lvl`, and a second INFO follows the first PONG."""
    names_subject_in_503: bool = _in((2, 12, 0))

    # The JSON API.
    strict_json: bool = _in((2, 12, 0))
    """A request with an unknown field is refused."""
    empty_request_is_default: bool = _in((2, 11, 0))
    """An empty payload, or one that is not an object, stands for a request without fields."""
    required_level: bool = _in((2, 12, 0))
    """The JSON API and Direct Get check `Nats-Required-Api-Level`."""
    reserves_unlimited: bool = _in(until=(2, 11, 0))
    """A stream without `max_bytes` counts as -1 byte of reserved storage."""
    metadata: bool = _in((2, 11, 0))
    """Configurations show the API levels and the server's version as metadata."""

    # Stream configurations.
    strict_config: bool = _in((2, 12, 0))
    """Values below -1 are normalized or refused, and streams with sources get no duplicate window."""
    templates: bool = _in(until=(2, 12, 0))
    """Stream templates exist, so a request may name a `template_owner`."""
    refuses_replicas_on_update: bool = _in((2, 14, 0))

    # Messages of a stream.
    strips_status: bool = _in((2, 12, 1))
    """The status line of a published header block is not stored."""
    ttl: bool = _in((2, 11, 0))
    """Per-message TTLs and delete markers."""
    exact_max_bytes: bool = _in((2, 14, 0))
    """A message may fill a stream with discard `new` up to the last byte."""
    trims_every_subject: bool = _in((2, 14, 0))
    """An update of the limits trims every subject, even if its own limit did not change."""
    update_drops_unneeded: bool = _in((2, 15, 0))
    """An update of an interest stream removes the messages that no consumer's filter matches."""
    empty_interest_restarts: bool = _in((2, 15, 0))
    """The clean-up of an empty interest stream always resets its first sequence, not only after a deletion."""
    old_purge: bool = _in(until=(2, 14, 2))
    """A purge below sequence 1 removes everything; in memory, `keep` also counts messages that are already deleted."""

    # Checks of a published message.
    spaced_ack: bool = _in(until=(2, 12, 0))
    """A PubAck has a space before `seq`."""
    checks_size_first: bool = _in((2, 15, 0))
    checks_id_first: bool = _in(until=(2, 12, 0))
    """A repeated message id is found before failed expectations."""
    expects_other_subject: bool = _in((2, 11, 0))
    """`Nats-Expected-Last-Subject-Sequence-Subject` is known."""
    refuses_subject_without_sequence: bool = _in((2, 12, 0))
    """That header without `Nats-Expected-Last-Subject-Sequence` is an error."""
    refuses_bad_rollup: bool = _in((2, 11, 0))
    """An unknown `Nats-Rollup` is refused; other releases drop the message without an answer."""
    refuses_source_header: bool = _in((2, 15, 0))
    """A client may not publish `Nats-Stream-Source`."""

    # Direct Get.
    batch_get: bool = _in((2, 11, 0))
    """Direct Get knows `batch`, `multi_last`, `start_time` and `up_to_*`."""
    get_options_on_subject: bool = _in((2, 12, 0))
    """The subject-appended Direct Get takes a payload, and every get knows `no_hdr`."""
    batch_counts_itself: bool = _in((2, 11, 0), until=(2, 12, 0))
    """`Nats-Num-Pending` on a message of a batch counts that message."""
    multi_end_off_by_one: bool = _in((2, 11, 0), until=(2, 12, 0))
    """`Nats-Num-Pending` at the end of a multi-subject batch is one too low."""

    # Atomic batches.
    atomic: bool = _in((2, 12, 0))
    atomic_eob: bool = _in((2, 14, 0))
    """A batch can be committed by the value `eob` of `Nats-Batch-Commit`, without storing that message."""
    atomic_any_commit: bool = _in((2, 12, 0), until=(2, 12, 1))
    """Any value of `Nats-Batch-Commit` commits, and that message is stored."""
    atomic_dedupe: bool = _in((2, 12, 1))
    """Messages of a batch may have message ids."""
    atomic_busy_is_429: bool = _in((2, 14, 0))
    required_level_in_batch: bool = _in((2, 12, 1))

    # Fast batches.
    fast: bool = _in((2, 14, 0))
    fast_backward_gap: bool = _in((2, 15, 0))
    """A repeated or smaller sequence is reported as a gap before the final ack."""
    fast_ping_opens: bool = _in((2, 14, 0), until=(2, 15, 0))
    fast_lost_final_ack: bool = _in((2, 14, 0), until=(2, 14, 3))
    """With gap mode `ok`, a commit message that fails its checks never gets the final ack."""

    # Consumers.
    pause: bool = _in((2, 11, 0))
    reset: bool = _in((2, 14, 0))
    stored_progress: bool = _in((2, 11, 3))
    """A consumer's info reports its stored state instead of its current one."""
    floor_at_start: bool = _in((2, 14, 0))
    """The acknowledgement floor of a new consumer is just below its first message."""
    purge_is_activity: bool = _in((2, 14, 0))
    """A purge of unacknowledged messages counts as activity of the acknowledgement floor."""
    starts_beyond_end: bool = _in((2, 11, 0))
    """A consumer with a start sequence beyond the end of the stream waits for that sequence."""
    end_is_404: bool = _in((2, 11, 0))
    """A pull request with `no_wait` ends with 404 instead of 408."""
    workqueue_ack_text: bool = _in((2, 11, 0))
    """The refusal of a pull consumer without acknowledgements mentions the work queue."""

    # Mirrors and sources.
    durable_sourcing: bool = _in((2, 14, 0))
    """Copies can use a durable consumer, with the `flow_control` ack policy."""
    mirror_filter_known: bool = _in((2, 12, 0))
    """A mirror shows its filter before the first answer of its origin."""
    source_header_has_subject: bool = _in((2, 12, 0))
    source_header_has_identity: bool = _in((2, 15, 0))

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers."""
        return tuple(int(part) for part in self.version.split("-")[0].split("."))

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
        commit, go = _BUILDS.get(version, _UNKNOWN_BUILD)
        level = next(level for since, level in _API_LEVELS.items() if since <= release)
        rows = {row.name: row.metadata for row in fields(cls) if row.metadata}
        profile = cls(
            version=version,
            api_level=level if api_level is None else api_level,
            draft=draft,
            git_commit=commit,
            go=go,
        )
        return replace(profile, **{name: row["since"] <= release < row["until"] for name, row in rows.items()})
