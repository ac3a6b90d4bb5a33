"""JetStream: the streams of the server, each with its consumers, batches, Direct Get and copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .atomic import AtomicBatches
from .consumers.consumer import Consumers
from .context import ServerContext
from .fast import FastBatches, is_fast
from .router import Message, Subscription
from .sourcing import Puller
from .streams.config import StreamConfig
from .streams.direct_get import DirectGet
from .streams.publish import publish
from .streams.store import StoredMessage
from .streams.stream import Stream
from .wire import golang
from .wire.protocol import get_header, remove_header, strip_status


class HostedStream:
    """A stream with everything that the server runs for it."""

    def __init__(
        self,
        context: ServerContext,
        config: StreamConfig,
        hosted: Mapping[str, HostedStream],
        on_stored: Callable[[Stream, StoredMessage], None],
    ) -> None:
        self._context = context
        self._hosted = hosted
        self.consumers: Consumers = Consumers()
        self.stream: Stream = Stream(context, config, self.consumers, on_stored)
        self.atomic: AtomicBatches = AtomicBatches(
            self.stream, lambda: sum(len(each.atomic) for each in hosted.values())
        )
        self.fast: FastBatches = FastBatches(self.stream, lambda: sum(len(each.fast) for each in hosted.values()))
        self.pullers: list[Puller] = []
        self._direct_get = DirectGet(self.stream)
        self._subscriptions: list[Subscription] = []
        self._subscribe()

    def update(self, config: StreamConfig) -> None:
        for puller in self.pullers:
            puller.close()
        self._unsubscribe()
        self.stream.update(config)
        self._subscribe()
        self.start_pullers()

    def close(self) -> None:
        for puller in self.pullers:
            puller.close()
        self.consumers.close()
        self.atomic.forget_all()
        self.fast.forget_all()
        self._unsubscribe()
        self.stream.close()

    def start_pullers(self) -> None:
        config, find = self.stream.config, self._hosted.get
        mirrors = [Puller(self.stream, config["mirror"], find, mirror=True)] if config["mirror"] else []
        self.pullers = [*mirrors, *(Puller(self.stream, source, find, mirror=False) for source in config["sources"])]

    def change_leader(self, *, unsaved: int) -> None:
        """Continue under another leader, without the newest `unsaved` messages of fast batches."""
        self.fast.lose_unacked(unsaved)
        self.atomic.forget_all()
        self.fast.leader_changed()

    def info_json(self, *, deleted: bool = False, cluster: bool = False) -> dict[str, Any]:
        """Return the fields of an info reply."""
        info = self.stream.info_json(deleted=deleted)
        if cluster:
            info["cluster"] = {"leader": self._context.server_id}
        rows = [puller.info_json() for puller in self.pullers]
        if rows:
            info |= {"mirror": rows[0]} if self.stream.config["mirror"] else {"sources": rows}
        info["ts"] = golang.rfc3339(self._context.now)
        return info

    def _subscribe(self) -> None:
        config, respond_to = self.stream.config, self._context.router.respond_to
        self._subscriptions = [respond_to(subject, self._receive) for subject in config["subjects"]]
        names = [config["name"]] if config["allow_direct"] else []
        if config["mirror"] and config["mirror_direct"]:
            names.append(config["mirror"]["name"])
        for name in names:
            subject = f"$JS.API.DIRECT.GET.{name}"
            self._subscriptions.append(respond_to(subject, self._direct_get.by_request, queue="_sys_"))
            self._subscriptions.append(respond_to(f"{subject}.>", self._direct_get.by_subject, queue="_sys_"))
        if self._context.profile.draft and not config["allow_direct"]:
            # The first wording has no answer where Direct Get is disabled, not even 503.
            self._subscriptions.append(respond_to(f"$JS.API.DIRECT.GET.{config['name']}", lambda message: None))

    def _unsubscribe(self) -> None:
        self._context.router.unsubscribe(*self._subscriptions)
        self._subscriptions = []

    def _receive(self, message: Message) -> None:
        profile = self._context.profile
        header = strip_status(message.header)
        header = remove_header(header, "Nats-Request-Info") if header else header
        if profile.fast and is_fast(message.reply):
            self.fast.receive(message, header)
        elif profile.atomic and header and (batch_id := get_header(header, "Nats-Batch-Id")):
            self.atomic.receive(batch_id, message, header)
        else:
            publish(self.stream, message.subject, header, message.payload, reply=message.reply)


class JetStream:
    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.streams: dict[str, HostedStream] = {}

    def find_config(self, name: str) -> StreamConfig | None:
        hosted = self.streams.get(name)
        return None if hosted is None else hosted.stream.config

    def add(self, config: StreamConfig) -> HostedStream:
        name = config["name"]
        hosted = self.streams[name] = HostedStream(self.context, config, self.streams, self._on_stored)
        hosted.start_pullers()
        for puller in self._pullers():
            if puller not in hosted.pullers and puller.origin_name == name:
                puller.connect()
        return hosted

    def delete(self, name: str) -> None:
        self.streams[name].close()
        del self.streams[name]
        for puller in self._pullers():
            puller.origin_deleted(name)

    def interest_changed(self) -> None:
        for hosted in list(self.streams.values()):
            hosted.consumers.interest_changed()

    def _on_stored(self, origin: Stream, message: StoredMessage) -> None:
        for puller in self._pullers():
            puller.origin_stored(origin, message)

    def _pullers(self) -> list[Puller]:
        return [puller for hosted in self.streams.values() for puller in hosted.pullers]
