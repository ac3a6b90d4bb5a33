"""One stream: takes messages in, enforces its limits, forgets what is too old."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import headers, ids, times
from .acks import pub_ack, pub_error
from .atomic import AtomicBatches
from .checks import FULL, DuplicateMessageError, SilentRefusalError, check_direct, check_last_id, message_ttl
from .direct import DirectGet
from .errors import ApiError, api_error
from .expiry import Expiry
from .fast import SUFFIX, FastBatches, FastMessage
from .store import Store, StoredMessage
from .stream_config import StreamConfig, config_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from .connections import Message, Subscription
    from .consumer import Consumer
    from .jetstream import JetStream
    from .limits import Limits
    from .sourcing import Puller
    from .timers import Timer
    from .versions import Profile

__all__ = ["Stream"]


class Stream:
    """A stream, as its leader sees it."""

    def __init__(self, jetstream: JetStream, config: StreamConfig) -> None:
        self.jetstream = jetstream
        self.config: StreamConfig = config
        self.created: int = jetstream.now
        self.identity: str = ids.short(jetstream.random)
        """What tells this stream from an earlier or later one of its name."""
        self.store: Store = Store(file=config["storage"] == "file", first_seq=config["first_seq"])
        self.replica: Store | None = None
        """What Direct Get reads instead, while a fault makes the replicas lag."""
        self.last_msg_id: str = ""
        self.atomic: AtomicBatches = AtomicBatches(self)
        self.fast: FastBatches = FastBatches(self)
        self.consumers: dict[str, Consumer] = {}
        self.pullers: list[Puller] = []
        self._seen: dict[str, tuple[int, int]] = {}
        self._expiry = Expiry(self)
        self._subscriptions: list[Subscription] = []
        self._direct = DirectGet(self)

    # What the parts of a stream need from the server.

    @property
    def name(self) -> str:
        """The name."""
        return str(self.config["name"])

    @property
    def profile(self) -> Profile:
        """The release."""
        return self.jetstream.profile

    @property
    def limits(self) -> Limits:
        """The server's limits."""
        return self.jetstream.limits

    @property
    def now(self) -> int:
        """The instant."""
        return self.jetstream.now

    @property
    def random(self) -> Random:
        """The server's random numbers."""
        return self.jetstream.random

    @property
    def view(self) -> Store:
        """What Direct Get reads."""
        return self.store if self.replica is None else self.replica

    def at(self, when: int, call: Callable[[], None]) -> Timer:
        """Arrange a call."""
        return self.jetstream.at(when, call)

    def send(
        self, subject: str, payload: bytes = b"", *, header: bytes = b"", reply: str = "", shown: str = ""
    ) -> None:
        """Publish as the server; clients see the subject `shown`, if one is given."""
        self.jetstream.send(subject, payload, header=header, reply=reply, shown=shown)

    def count_atomic_batches(self) -> int:
        """Return how many atomic batches are open on the server."""
        return sum(len(stream.atomic) for stream in self.jetstream.streams.values())

    def count_fast_batches(self) -> int:
        """Return how many fast batches are open on the server."""
        return sum(len(stream.fast) for stream in self.jetstream.streams.values())

    # Life.

    def open(self) -> None:
        """Listen."""
        respond_to = self.jetstream.respond_to
        self._subscriptions = [respond_to(subject, self.receive) for subject in self.config["subjects"]]
        names = [self.name] if self.config["allow_direct"] else []
        if self.config["mirror"] and self.config["mirror_direct"]:
            names.append(self.config["mirror"]["name"])
        for name in names:
            subject = f"$JS.API.DIRECT.GET.{name}"
            self._subscriptions.append(respond_to(subject, self._direct.by_request, queue="_sys_"))
            self._subscriptions.append(respond_to(f"{subject}.>", self._direct.by_subject, queue="_sys_"))
        if self.profile.draft and not self.config["allow_direct"]:
            # The first wording has no answer at all where nobody may answer.
            self._subscriptions.append(respond_to(f"$JS.API.DIRECT.GET.{self.name}", lambda message: None))
        self._expiry.restart()

    def close(self) -> None:
        """Stop listening; the messages stay."""
        for subscription in self._subscriptions:
            self.jetstream.ignore(subscription)
        self._subscriptions = []
        self._expiry.stop()

    def update(self, config: StreamConfig) -> None:
        """Go on under another configuration."""
        self.close()
        lowered = 0 < config["max_msgs_per_subject"] < self.config["max_msgs_per_subject"]
        self.config = config
        self.open()
        # Older releases do not look back at every subject.
        self.enforce_limits(every_subject=lowered or self.profile.fast)
        if config["retention"] == "interest" and self.profile.release >= (2, 15, 0):
            for message in self.store:
                if not self._has_interest(message.subject):
                    self.remove(message.seq)

    # Messages in.

    def receive(self, message: Message) -> None:
        """Take a message that somebody published."""
        header = headers.strip_status(message.header) if self.profile.strips_status else message.header
        header = headers.remove(header, "Nats-Request-Info") if header else header
        if self.profile.fast and message.reply.endswith(SUFFIX) and len(message.reply) > len(SUFFIX):
            self.fast.receive(message, header)
        elif self.profile.atomic and header and (batch_id := headers.get(header, "Nats-Batch-Id")):
            self.atomic.receive(batch_id, message, header)
        else:
            self.process(message.subject, header, message.payload, reply=message.reply)

    def process(
        self,
        subject: str,
        header: bytes,
        payload: bytes,
        *,
        reply: str = "",
        batch: tuple[str, int] | None = None,
        fast: FastMessage | None = None,
    ) -> None:
        """Store a message and acknowledge it, or say why not.

        Args:
            subject: Its subject.
            header: Its header block.
            payload: Its payload.
            reply: Where the acknowledgement goes; empty for none.
            batch: The id and sequence, if it is part of a batch: then most checks were made before.
            fast: What its reply subject says, if the batch is a fast one.
        """
        answers = bool(reply) and not self.config["no_ack"]
        try:
            if batch is None:
                check_direct(self, subject, header, payload)
            elif header:
                check_last_id(self, header)
            seq = self._take(subject, header, payload)
        except DuplicateMessageError as duplicate:
            if answers:
                self.send(reply, pub_ack(self.profile, self.name, duplicate.seq, duplicate=True))
            return
        except ApiError as error:
            if answers:
                self.send(reply, pub_error(self.name, error))
            return
        except SilentRefusalError:
            return
        if fast is not None:
            self.fast.message_stored(fast, reply, seq)
        elif answers:
            self.send(reply, pub_ack(self.profile, self.name, seq, batch=batch))
        stored = self.store.get(seq)
        if stored is not None:
            self.announce(stored)

    def store_sourced(self, subject: str, header: bytes, payload: bytes, *, seq: int = 0, time: int = 0) -> None:
        """Store a message of another stream, without the checks of a publisher's.

        Args:
            subject: Its subject.
            header: Its header block.
            payload: Its payload.
            seq: The sequence it must have, in a mirror.
            time: The time it has, in a mirror; 0 is now.
        """
        msg_id = (headers.get(header, "Nats-Msg-Id") or "") if not seq else ""
        if msg_id and self.duplicate_of(msg_id):
            return
        ttl = self._ttl(header) if self.config["allow_msg_ttl"] else 0
        stored = self.store.add(subject, header, payload, time or self.now, ttl, seq)
        self._remember(msg_id, stored.seq)
        self._expiry.watch(stored)
        self.enforce_limits(subject)
        if self.store.get(stored.seq) is not None:
            self.announce(stored)

    def duplicate_of(self, msg_id: str) -> int:
        """Return the sequence under which a message id was stored inside the window, or 0."""
        seq, stored = self._seen.get(msg_id, (0, 0))
        if seq and self.now - stored >= self.config["duplicate_window"]:
            del self._seen[msg_id]
            return 0
        return seq

    def _remember(self, msg_id: str, seq: int) -> None:
        window, seen = self.config["duplicate_window"], self._seen
        if not msg_id or not window:
            return
        while seen and self.now - seen[oldest := next(iter(seen))][1] >= window:
            del seen[oldest]
        seen[msg_id] = (seq, self.now)

    def take_back(self, seq: int) -> bool:
        """Undo the newest message, if it has this sequence: as if it had never come."""
        if not self.store.take_back(seq):
            return False
        self._seen = {msg_id: seen for msg_id, seen in self._seen.items() if seen[0] != seq}
        return True

    def _take(self, subject: str, header: bytes, payload: bytes) -> int:
        msg_id = headers.get(header, "Nats-Msg-Id") or ""
        if self.config["retention"] == "interest" and not self._has_interest(subject):
            seq = self.store.skip()
        else:
            ttl = message_ttl(self.profile, header)
            marker_ttl = self.config["subject_delete_marker_ttl"] // times.SECOND
            if 0 < ttl < marker_ttl and self.config["max_msgs_per_subject"] != 1:
                ttl = marker_ttl
                header = headers.add(headers.remove(header, "Nats-TTL"), ("Nats-TTL", str(ttl)))
            self._check_room(subject, header, payload)
            stored = self.store.add(subject, header, payload, self.now, ttl)
            seq = stored.seq
            self._expiry.watch(stored)
            self.enforce_limits(subject)
        self.last_msg_id = msg_id
        self._remember(msg_id, seq)
        if self.config["allow_rollup_hdrs"] and not self.config["deny_purge"]:
            rollup = (headers.get(header, "Nats-Rollup") or "").lower()
            if rollup in ("sub", "all"):
                self.purge(subject if rollup == "sub" else "", keep=1)
        return seq

    def _ttl(self, header: bytes) -> int:
        try:
            return message_ttl(self.profile, header)
        except ApiError:
            return 0  # the origin stored it, so it is stored

    def _has_interest(self, subject: str) -> bool:
        return any(consumer.cursor.wants(subject) for consumer in self.consumers.values())

    def _check_room(self, subject: str, header: bytes, payload: bytes) -> None:
        config, store = self.config, self.store
        if config["discard"] != "new":
            return
        limit = config["max_msgs_per_subject"]
        replaces = 0 < limit <= store.count(subject)
        if replaces and config["discard_new_per_subject"] and not headers.get(header, "Nats-Rollup"):
            raise api_error(10077, FULL["subject"])
        if 0 < config["max_msgs"] <= len(store) and not replaces:
            raise api_error(10077, FULL["msgs"])
        size = store.size(subject, header, payload)
        # Before 2.14 a message that would just fit is one too many.
        if 0 < config["max_bytes"] < store.bytes + size + (not self.profile.fast):
            oldest = store.next_for(subject, 0) if replaces else None
            if oldest is None or store.size(subject, oldest.header, oldest.payload) < size:
                raise api_error(10077, FULL["bytes"])

    def announce(self, message: StoredMessage) -> None:
        """Tell consumers, mirrors and sources of a new message."""
        for consumer in list(self.consumers.values()):
            consumer.message_stored(message)
        self.jetstream.message_stored(self, message)

    def acknowledged(self, seq: int) -> None:
        """Let go of a message that a consumer is done with, if nobody else needs it."""
        retention = self.config["retention"]
        message = self.store.get(seq) if retention != "limits" else None
        if message is not None and (retention == "workqueue" or not self._is_needed(message)):
            self.store.remove(seq)

    def drop_uninteresting(self, *, deleted: bool = False) -> None:
        """Let go of what no consumer needs any more, in a stream that keeps messages for its consumers.

        Args:
            deleted: Whether that is because a consumer is gone.
        """
        if self.config["retention"] == "interest":
            for message in self.store:
                if not self._is_needed(message):
                    self.store.remove(message.seq)
            if self.store.last == 0 and (deleted or self.profile.release >= (2, 15, 0)):
                self.store.compact(1)  # as the server's own clean-up leaves an empty stream

    def _is_needed(self, message: StoredMessage) -> bool:
        return any(consumer.needs(message) for consumer in self.consumers.values())

    # Messages out.

    def remove(self, seq: int) -> bool:
        """Take out a message; return whether it was there."""
        message = self.store.remove(seq)
        if message is not None:
            self._tell_removed([message])
        return message is not None

    def _tell_removed(self, messages: list[StoredMessage]) -> None:
        for consumer in list(self.consumers.values()):
            for message in messages:
                consumer.message_removed(message)

    def purge(self, pattern: str = "", *, seq: int = 0, keep: int = 0) -> int:
        """Take out messages and return how many: all under a pattern, below `seq` or but for the last `keep`."""
        gone = self._purge(pattern, seq, keep)
        for consumer in list(self.consumers.values()):
            consumer.stream_purged(pattern)
        return gone

    def _purge(self, pattern: str, seq: int, keep: int) -> int:
        store = self.store
        every_subject = pattern in ("", ">")
        in_memory = every_subject and self.config["storage"] == "memory"
        compact = every_subject and not keep and seq != 1
        if seq == 1:
            if in_memory or not self.profile.old_purge:
                return 0
            seq = 0
        if in_memory and self.profile.old_purge and 0 < keep < len(store):
            seq, compact = store.last - keep + 1, True
        if compact:
            return len(store.compact(seq or store.last + 1))
        found = store.sequences(pattern)
        if keep:
            found = found[: max(len(found) - keep, 0)]
        elif seq:
            found = [each for each in found if each < seq]
        for each in found:
            store.remove(each)
        return len(found)

    def enforce_limits(self, subject: str | None = None, *, every_subject: bool = False) -> None:
        """Discard what is too much, of one subject or of every one."""
        config, store = self.config, self.store
        gone: list[StoredMessage | None] = []
        limit = config["max_msgs_per_subject"]
        if limit > 0:
            for each in list(store.totals(">")) if every_subject else [subject] if subject else []:
                while store.count(each) > limit:
                    oldest = store.next_for(each, 0)
                    assert oldest is not None
                    gone.append(store.remove(oldest.seq))
        if config["discard"] != "new":  # there, what is in it already may stay
            while 0 < config["max_msgs"] < len(store) or 0 < config["max_bytes"] < store.bytes:
                gone.append(store.remove(store.first))
        # All of them first: a consumer that goes on because of one must not find the next.
        self._tell_removed([message for message in gone if message is not None])

    # Replies.

    def state_json(self, *, deleted: bool = False) -> dict[str, Any]:
        """Return the `state` of an info reply."""
        state = self.store.state()
        shown: dict[str, Any] = {
            "messages": state.messages,
            "bytes": state.bytes,
            "first_seq": state.first_seq,
            "first_ts": times.ZERO_TIME if state.first_time is None else times.rfc3339(state.first_time),
            "last_seq": state.last_seq,
            "last_ts": times.ZERO_TIME if state.last_time is None else times.rfc3339(state.last_time),
        }
        if state.subjects:
            shown["num_subjects"] = state.subjects
        if state.deleted:
            shown["num_deleted"] = state.deleted
            if deleted:
                shown["deleted"] = self.store.deleted()
        if deleted and state.last_seq == state.first_seq == 0 and self.config["storage"] == "file":
            shown |= {"num_deleted": 1, "deleted": [0]}  # how an empty file store counts
        shown["consumer_count"] = len(self.consumers)
        return shown

    def info_json(self, *, deleted: bool = False, cluster: bool = False, stored: bool = False) -> dict[str, Any]:
        """Return what an info reply says about the stream; see `config_json` for `stored`."""
        info: dict[str, Any] = {
            "config": config_json(self.config, self.profile, stored=stored),
            "created": times.rfc3339(self.created),
            "state": self.state_json(deleted=deleted),
        }
        if cluster:
            info["cluster"] = {"leader": self.jetstream.server_name}
        rows = [puller.info_json() for puller in self.pullers]
        if rows:
            info |= {"mirror": rows[0]} if self.config["mirror"] else {"sources": rows}
        info["ts"] = times.rfc3339(self.now)
        return info
