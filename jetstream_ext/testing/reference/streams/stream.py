"""One stream: stores messages, detects duplicates, enforces limits and retention, expires and purges."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..context import ServerContext, Timer
from ..releases import Profile
from ..wire import golang
from ..wire.errors import ApiError, api_error
from ..wire.protocol import add_headers, get_header, parse_signed, remove_header
from .config import StreamConfig, config_json
from .store import Store, StoredMessage


class Consumers(Protocol):
    """The consumers of a stream, as far as the stream knows them."""

    def __len__(self) -> int: ...
    def want(self, subject: str) -> bool: ...
    def need(self, message: StoredMessage) -> bool: ...
    def message_stored(self, message: StoredMessage) -> None: ...
    def messages_removed(self, messages: list[StoredMessage]) -> None: ...
    def stream_purged(self, pattern: str) -> None: ...


class _Expiry:
    """Call `expire` with the sequences of messages whose time has come."""

    def __init__(self, context: ServerContext, expire: Callable[[list[int]], None]) -> None:
        self._context = context
        self._expire = expire
        self._heap: list[tuple[int, int]] = []
        self._timer = Timer(context, self._fire)

    def stop(self) -> None:
        self._timer.cancel()

    def add(self, seq: int, when: int | None) -> None:
        if when is not None:
            heapq.heappush(self._heap, (when, seq))
            self._arm()

    def restart(self, messages: Iterable[tuple[int, int | None]]) -> None:
        self._heap = [(when, seq) for seq, when in messages if when is not None]
        heapq.heapify(self._heap)
        self._arm()

    def _arm(self) -> None:
        self._timer.set(self._heap[0][0] if self._heap else None)

    def _fire(self) -> None:
        due = []
        while self._heap and self._heap[0][0] <= self._context.now:
            due.append(heapq.heappop(self._heap)[1])
        self._expire(due)
        self._arm()


class _Duplicates:
    """The message ids of the duplicate window, each with its sequence and time, oldest first."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._seen: dict[str, tuple[int, int]] = {}

    def find(self, msg_id: str, window: int) -> int:
        seq, stored = self._seen.get(msg_id, (0, 0))
        if seq and self._context.now - stored >= window:
            del self._seen[msg_id]
            return 0
        return seq

    def add(self, msg_id: str, seq: int, window: int) -> None:
        if not msg_id or not window:
            return
        now, seen = self._context.now, self._seen
        while seen and now - seen[oldest := next(iter(seen))][1] >= window:
            del seen[oldest]
        seen[msg_id] = (seq, now)

    def forget(self, seq: int) -> None:
        self._seen = {msg_id: seen for msg_id, seen in self._seen.items() if seen[0] != seq}


class Stream:
    """A stream, as its leader sees it."""

    def __init__(
        self,
        context: ServerContext,
        config: StreamConfig,
        consumers: Consumers,
        on_stored: Callable[[Stream, StoredMessage], None],
    ) -> None:
        self.context = context
        self.config: StreamConfig = config
        self.created: int = context.now
        self.identity: str = context.make_name()
        """Distinguishes this stream from earlier and later ones of the same name."""
        self.store: Store = Store(file=config["storage"] == "file", first_seq=config["first_seq"])
        self.replica: Store | None = None
        """The older state that Direct Get reads while a fault makes the replicas lag."""
        self.last_msg_id: str = ""
        self.duplicates: _Duplicates = _Duplicates(context)
        self.shown: int = 0
        """The newest message that an answer has called stored: no leader shows one before the replicas have it."""
        self._consumers = consumers
        self._on_stored = on_stored
        self._expiry = _Expiry(context, self._expire)

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def profile(self) -> Profile:
        return self.context.profile

    @property
    def view(self) -> Store:
        """The store that Direct Get reads."""
        return self.store if self.replica is None else self.replica

    # Life cycle.

    def update(self, config: StreamConfig) -> None:
        self.config = config
        self._expiry.restart((message.seq, self._expires_at(message)) for message in self.store)
        self.enforce_limits(self.store.totals(">"))
        if config["retention"] == "interest":
            for message in self.store:
                if not self._consumers.want(message.subject):
                    self.remove(message.seq)

    def close(self) -> None:
        self._expiry.stop()

    # Adding messages.

    def append(self, subject: str, header: bytes, payload: bytes) -> int:
        """Store a message that has passed the checks of a publisher's message, and return its sequence.

        The caller calls `announce` once it has sent the acknowledgement.

        Raises:
            ApiError: The stream is full.
        """
        config = self.config
        msg_id = get_header(header, "Nats-Msg-Id") or ""
        if config["retention"] == "interest" and not self._consumers.want(subject):
            seq = self.store.skip()
        else:
            ttl = message_ttl(self.profile, header)
            marker_ttl = config["subject_delete_marker_ttl"] // golang.SECOND
            if 0 < ttl < marker_ttl and config["max_msgs_per_subject"] != 1:
                ttl = marker_ttl
                header = add_headers(remove_header(header, "Nats-TTL"), ("Nats-TTL", str(ttl)))
            self._check_room(subject, header, payload)
            seq = self._add(subject, header, payload, ttl).seq
        self.last_msg_id = msg_id
        self.duplicates.add(msg_id, seq, config["duplicate_window"])
        if config["allow_rollup_hdrs"] and not config["deny_purge"]:
            rollup = (get_header(header, "Nats-Rollup") or "").lower()
            if rollup in ("sub", "all"):
                self.purge(subject if rollup == "sub" else "", keep=1)
        return seq

    def append_copy(self, subject: str, header: bytes, payload: bytes, *, seq: int = 0, time: int = 0) -> None:
        """Store a message of another stream, without the checks of a publisher's message.

        A mirror keeps the sequence and time of the original; 0 means the next sequence and the current time.
        """
        msg_id = (get_header(header, "Nats-Msg-Id") or "") if not seq else ""
        if msg_id and self.duplicate_of(msg_id):
            return
        # The origin stored the message in spite of an invalid TTL, so the copy is stored as well.
        ttl = valid_ttl(self.profile, header) if self.config["allow_msg_ttl"] else 0
        stored = self._add(subject, header, payload, ttl, seq=seq, time=time)
        self.duplicates.add(msg_id, stored.seq, self.config["duplicate_window"])
        self.announce(stored.seq)

    def announce(self, seq: int) -> None:
        """Tell consumers and copies about a new message, unless a limit or roll-up has removed it already."""
        message = self.store.get(seq)
        if message is not None:
            self._consumers.message_stored(message)
            self._on_stored(self, message)

    def duplicate_of(self, msg_id: str) -> int:
        """Return the sequence of a message id inside the duplicate window, or 0."""
        seq = self.duplicates.find(msg_id, self.config["duplicate_window"])
        self.shown = max(self.shown, seq)
        return seq

    def undo_append(self, seq: int) -> bool:
        """Undo the newest message if it has this sequence and was not shown, and return whether it did."""
        if seq <= self.shown or not self.store.undo_add(seq):
            return False
        self.duplicates.forget(seq)
        return True

    def _add(
        self, subject: str, header: bytes, payload: bytes, ttl: int, *, seq: int = 0, time: int = 0
    ) -> StoredMessage:
        message = self.store.add(subject, header, payload, time or self.context.now, ttl, seq)
        self._expiry.add(message.seq, self._expires_at(message))
        self.enforce_limits([subject])
        return message

    def _check_room(self, subject: str, header: bytes, payload: bytes) -> None:
        config, store = self.config, self.store
        if config["discard"] != "new":
            return
        limit = config["max_msgs_per_subject"]
        replaces = 0 < limit <= store.count(subject)
        if 0 < config["max_msgs"] <= len(store) and not replaces:
            raise api_error(10077, "maximum messages exceeded")
        size = store.size(subject, header, payload)
        if 0 < config["max_bytes"] < store.bytes + size:
            oldest = store.next_for(subject, 0) if replaces else None
            if oldest is None or store.size(subject, oldest.header, oldest.payload) < size:
                raise api_error(10077, "maximum bytes exceeded")

    # Removing messages.

    def remove(self, seq: int) -> bool:
        message = self.store.remove(seq)
        if message is not None:
            self._consumers.messages_removed([message])
        return message is not None

    def acknowledged(self, seq: int) -> None:
        """Remove a message that a consumer has processed, if the retention policy says so and no other needs it."""
        retention = self.config["retention"]
        message = self.store.get(seq) if retention != "limits" else None
        if message is not None and (retention == "workqueue" or not self._consumers.need(message)):
            self.store.remove(seq)

    def drop_unneeded(self) -> None:
        """Remove the messages of an interest stream that no consumer needs."""
        if self.config["retention"] == "interest":
            for message in self.store:
                if not self._consumers.need(message):
                    self.store.remove(message.seq)
            if self.store.last == 0:
                self.store.compact(1)

    def purge(self, pattern: str = "", *, seq: int = 0, keep: int = 0) -> int:
        """Remove all messages that match a pattern, only those below `seq`, or all but the last `keep`; return how many."""
        removed = self._purge(pattern, seq, keep)
        self._consumers.stream_purged(pattern)
        return removed

    def enforce_limits(self, changed: Iterable[str]) -> None:
        """Remove the oldest messages above the limits; `changed` are the subjects that may have too many."""
        config, store = self.config, self.store
        removed: list[StoredMessage | None] = []
        limit = config["max_msgs_per_subject"]
        if limit > 0:
            for each in changed:
                while store.count(each) > limit:
                    oldest = store.next_for(each, 0)
                    assert oldest is not None
                    removed.append(store.remove(oldest.seq))
        if config["discard"] != "new":  # otherwise the messages that are already stored may stay
            while 0 < config["max_msgs"] < len(store) or 0 < config["max_bytes"] < store.bytes:
                removed.append(store.remove(store.first))
        # Remove all of them first: a consumer that continues because of one must not find the next.
        self._consumers.messages_removed([message for message in removed if message is not None])

    def _purge(self, pattern: str, seq: int, keep: int) -> int:
        store = self.store
        if seq == 1:
            return 0
        if pattern in ("", ">") and not keep:
            return len(store.compact(seq or store.last + 1))
        found = store.sequences(pattern)
        if keep:
            found = found[: max(len(found) - keep, 0)]
        elif seq:
            found = [each for each in found if each < seq]
        for each in found:
            store.remove(each)
        return len(found)

    # _Expiry.

    def _expires_at(self, message: StoredMessage) -> int | None:
        if message.ttl < 0:
            return None
        ages = (self.config["max_age"], message.ttl * golang.SECOND)
        return min((message.time + age for age in ages if age), default=None)

    def _expire(self, seqs: list[int]) -> None:
        expired = []
        for seq in seqs:
            message = self.store.get(seq)
            if message is not None:
                self.remove(seq)
                expired.append(message)
        marker_ttl = self.config["subject_delete_marker_ttl"]
        if not marker_ttl or self.config["mirror"]:
            return
        for message in expired:
            was_marker = get_header(message.header, _marker_reason(self.profile))
            if not was_marker and not self.store.count(message.subject):
                header = _marker_header(self.profile, marker_ttl)
                self.announce(self._add(message.subject, header, b"", marker_ttl // golang.SECOND).seq)

    # Replies and advisories.

    def send_advisory(self, subject: str, kind: str, fields: dict[str, Any]) -> None:
        """Publish an advisory; `subject` is without its prefix, and `kind` is the last part of the advisory's type."""
        advisory = {
            "type": f"io.nats.jetstream.advisory.v1.{kind}",
            "id": self.context.make_name(22),
            "timestamp": golang.rfc3339(self.context.now),
            "stream": self.name,
            **fields,
        }
        self.context.send(f"$JS.EVENT.ADVISORY.{subject}", golang.dumps(advisory))

    def send_batch_abandoned(self, batch_id: str, reason: str) -> None:
        """Publish the advisory that the server has dropped a batch."""
        kind = "batch_abandoned" if self.profile.draft else "stream_batch_abandoned"
        self.send_advisory(f"STREAM.BATCH_ABANDONED.{self.name}", kind, {"batch": batch_id, "reason": reason})

    def state_json(self, *, deleted: bool = False) -> dict[str, Any]:
        """Return the `state` of an info reply; `deleted` adds the deleted sequences."""
        store = self.store
        first = store.get(store.first)
        shown: dict[str, Any] = {
            "messages": len(store),
            "bytes": store.bytes,
            "first_seq": store.first,
            "first_ts": golang.ZERO_TIME if first is None else golang.rfc3339(first.time),
            "last_seq": store.last,
            "last_ts": golang.ZERO_TIME if store.last_time is None else golang.rfc3339(store.last_time),
        }
        if len(store):
            shown["num_subjects"] = len(store.totals(">"))
        if store.num_deleted:
            shown["num_deleted"] = store.num_deleted
            if deleted:
                shown["deleted"] = store.deleted()
        shown["consumer_count"] = len(self._consumers)
        return shown

    def info_json(self, *, deleted: bool = False) -> dict[str, Any]:
        """Return the fields of an info reply that are the stream's own."""
        return {
            "config": config_json(self.config, self.profile),
            "created": golang.rfc3339(self.created),
            "state": self.state_json(deleted=deleted),
        }


# -- TTLs and delete markers in headers (ADR-43) ----------------------------------------------------------------------


def message_ttl(profile: Profile, header: bytes) -> int:
    """Return the TTL of a message in whole seconds, 0 for none and -1 for never; raise an `ApiError` if it is invalid."""
    if not profile.ttl:
        return 0
    if profile.draft and get_header(header, "Nats-No-Expire") == "1":
        return -1
    text = get_header(header, "Nats-TTL")
    if not text or (profile.draft and text == "0"):
        return 0
    if text.lower() == "never":
        return -1
    duration = golang.parse_duration(text)
    if duration is not None:
        if duration < golang.SECOND:
            raise api_error(10165)
        return duration // golang.SECOND
    seconds = parse_signed(text)
    if seconds < 1:
        raise api_error(10165)
    return seconds


def valid_ttl(profile: Profile, header: bytes) -> int:
    """Return the TTL of a message as `message_ttl` does, and 0 for an invalid one."""
    try:
        return message_ttl(profile, header)
    except ApiError:
        return 0


def _marker_reason(profile: Profile) -> str:
    return "Nats-Applied-Limit" if profile.draft else "Nats-Marker-Reason"


def _marker_header(profile: Profile, ttl: int) -> bytes:
    """Return the header block of a delete marker that expires after `ttl` nanoseconds."""
    reason = (_marker_reason(profile), "MaxAge")
    if profile.draft:
        return add_headers(b"", reason, ("Nats-TTL", str(ttl // golang.SECOND)))
    return add_headers(b"", reason, ("Nats-TTL", golang.format_duration(ttl)), ("Nats-Rollup", "sub"))
