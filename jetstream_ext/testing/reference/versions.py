"""What a release of the server can do, and where releases differ on the wire.

Every flag is an observation of real servers; `Profile.of` is the table of which release has it.
"""

from dataclasses import dataclass, replace
from typing import Self

__all__ = ["DIALECTS", "Profile"]

DIALECTS = {
    "2.10": "2.10.26",
    "2.11": "2.11.11",
    "2.12": "2.12.8",
    "2.14": "2.14.6",
    "2.15": "2.15.1",
    "draft": "2.15.1",
}
"""The release that each dialect speaks; `draft` is the ADRs' first wording, on top of the newest release."""

_BUILDS = {
    "2.10.26": ("2898698", "go1.24.0"),
    "2.11.11": ("ac1095e", "go1.25.4"),
    "2.12.0": ("96e2317", "go1.25.1"),
    "2.12.8": ("b692325", "go1.26.2"),
    "2.14.0": ("4828437", "go1.26.2"),
    "2.14.6": ("1aa10f9", "go1.27.0"),
    "2.15.1": ("b2fd3ef", "go1.27.2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One release, or the draft."""

    version: str
    api_level: int
    """The JetStream API level; 0 in releases that have none."""
    draft: bool = False
    git_commit: str = "0000000"
    go: str = "go1.27.2"

    announces_level: bool = True
    """INFO has `api_lvl`, and a second INFO follows the first PONG."""
    names_subject_in_503: bool = True
    strict_json: bool = True
    required_level: bool = True
    """`Nats-Required-Api-Level` is honoured by the JSON API and Direct Get."""
    required_level_in_batch: bool = True
    strips_status: bool = True
    """A status line in a published header block is not stored."""
    spaced_ack: bool = False
    metadata: bool = True
    stored_progress: bool = True
    """What a consumer's info says of deliveries is its stored state, not where it stands."""
    old_purge: bool = False
    """A purge below sequence 1 takes out everything; in memory, the last `keep` include those that are gone already."""

    batch_get: bool = True
    """Direct Get knows `batch`, `multi_last`, `start_time` and `up_to_*`."""
    get_options_on_subject: bool = True
    """The subject-appended Direct Get takes a payload, and any get `no_hdr`."""
    batch_counts_itself: bool = False
    """`Nats-Num-Pending` on a message of a batch counts that message."""
    multi_end_off_by_one: bool = False

    ttl: bool = True
    markers: bool = True

    atomic: bool = True
    atomic_eob: bool = True
    atomic_any_commit: bool = False
    """Any commit value commits, and that message is stored."""
    atomic_dedupe: bool = True
    atomic_busy_is_429: bool = True

    fast: bool = True
    fast_backward_gap: bool = True
    """A repeated or smaller sequence is reported as a gap before the final ack."""
    fast_ping_opens: bool = False
    fast_lost_final_ack: bool = False
    """In `ok` mode a commit message that fails its checks never gets the final ack."""

    reset: bool = True
    durable_sourcing: bool = True
    refuses_source_header: bool = True
    stream_identity: bool = True

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, for what one line of one module depends on."""
        return tuple(int(part) for part in self.version.split("-")[0].split("."))

    @classmethod
    def of(cls, version: str, *, draft: bool = False, api_level: int | None = None) -> Self:
        """Return the profile of a release.

        Args:
            version: Such as `"2.12.8"`; releases between the known ones behave as the numbers say.
            draft: Whether to speak the ADRs' first wording.
            api_level: The level to claim instead of the release's own.

        Raises:
            ValueError: It is not a version, or older than 2.10.
        """
        try:
            major, minor, patch = (int(part) for part in version.split("-")[0].split("."))
        except ValueError:
            raise ValueError(f"{version!r} is not a server version; write it like '2.12.8'") from None
        release = (major, minor, patch)
        if release < (2, 10, 0):
            raise ValueError(f"the reference server knows 2.10.0 and newer, not {version}")
        commit, go = _BUILDS.get(version, ("0000000", "go1.27.2"))
        v211, v212 = release >= (2, 11, 0), release >= (2, 12, 0)
        v214, v215 = release >= (2, 14, 0), release >= (2, 15, 0)
        level = 5 if v215 else 4 if v214 else 3 if release >= (2, 12, 5) else 2 if v212 else 1 if v211 else 0
        profile = cls(
            version=version,
            api_level=level,
            draft=draft,
            git_commit=commit,
            go=go,
            announces_level=v212,
            names_subject_in_503=v212,
            strict_json=v212,
            required_level=v212,
            required_level_in_batch=release >= (2, 12, 1),
            strips_status=release >= (2, 12, 1),
            spaced_ack=not v212,
            metadata=v211,
            stored_progress=release >= (2, 11, 3),
            old_purge=release < (2, 14, 2),
            batch_get=v211,
            get_options_on_subject=v212,
            batch_counts_itself=v211 and not v212,
            multi_end_off_by_one=v211 and not v212,
            ttl=v211,
            markers=v211,
            atomic=v212,
            atomic_eob=v214,
            atomic_any_commit=release == (2, 12, 0),
            atomic_dedupe=release >= (2, 12, 1),
            atomic_busy_is_429=v214,
            fast=v214,
            fast_backward_gap=v215,
            fast_ping_opens=v214 and not v215,
            fast_lost_final_ack=(2, 14, 0) <= release <= (2, 14, 2),
            reset=v214,
            durable_sourcing=v214,
            refuses_source_header=v215,
            stream_identity=v215,
        )
        return profile if api_level is None else replace(profile, api_level=api_level)
