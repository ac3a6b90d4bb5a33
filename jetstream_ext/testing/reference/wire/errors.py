"""The error codes that the reference server answers with, and their texts."""

from collections.abc import Callable, Iterable
from typing import Any

_NOT_MODELLED = 10999  # no server uses it
_TABLE: dict[int, tuple[int, str]] = {
    10003: (400, "bad request"),
    10014: (404, "consumer not found"),
    10017: (400, "consumer name in subject does not match durable name in request"),
    10018: (400, "consumer expected to be durable but a durable name was not set"),
    10020: (400, "consumer expected to be ephemeral but a durable name was set in request"),
    10025: (400, "invalid JSON: {}"),
    10026: (400, "maximum consumers limit reached"),
    10031: (400, "stream mirrors can not also contain other sources"),
    10034: (400, "stream mirrors can not contain subjects"),
    10037: (404, "no message found"),
    10038: (400, "expected an empty request payload"),
    10043: (400, "sequence {} not found"),
    10052: (500, "{}"),
    10054: (400, "message size exceeds maximum allowed"),
    10055: (400, "stream mirror configuration can not be updated"),
    10056: (400, "stream name in subject does not match request"),
    10057: (500, "{}"),
    10058: (400, "stream name already in use with a different configuration"),
    10059: (404, "stream not found"),
    10060: (400, "expected stream does not match"),
    10065: (400, "subjects overlap with an existing stream"),
    10070: (400, "wrong last msg ID: {}"),
    10071: (400, "wrong last sequence: {}"),
    10074: (500, "replicas > 1 not supported in non-clustered mode"),
    10077: (503, "{}"),
    10079: (400, "consumer deliver subject has wildcards"),
    10080: (400, "consumer in push mode can not set max waiting"),
    10081: (400, "consumer deliver subject forms a cycle"),
    10082: (400, "consumer requires ack policy for max ack pending"),
    10083: (400, "consumer idle heartbeat needs to be >= 100ms"),
    10084: (400, "consumer in pull mode requires explicit ack policy on workqueue stream"),
    10088: (400, "consumer idle heartbeat requires a push based consumer"),
    10089: (400, "consumer flow control requires a push based consumer"),
    10094: (400, "consumer delivery policy does not go with the optional {}"),
    10097: (400, "header size exceeds maximum allowed of 64k"),
    10098: (400, "workqueue stream requires explicit ack"),
    10099: (400, "multiple non-filtered consumers not allowed on workqueue stream"),
    10100: (400, "filtered consumer not unique on workqueue stream"),
    10101: (400, "consumer must be deliver all on workqueue stream"),
    10108: (400, "consumer with flow control also needs heartbeats"),
    10110: (500, "{}"),
    10111: (500, "{}"),
    10112: (400, "invalid push consumer deliver subject"),
    10116: (400, "max deliver is required to be > length of backoff values"),
    10127: (400, "Consumer name can not contain path separators"),
    10128: (400, "Stream name can not contain path separators"),
    10131: (400, "Consumer create request did not match filtered subject from create subject"),
    10132: (400, "Consumer Durable and Name have to be equal if both are provided"),
    10133: (400, "replicas count cannot be negative"),
    10136: (400, "consumer cannot have both FilterSubject and FilterSubjects specified"),
    10137: (400, "consumer with multiple subject filters cannot use subject based API"),
    10138: (400, "consumer subject filters cannot overlap"),
    10139: (400, "consumer filter in FilterSubjects cannot be empty"),
    10140: (400, "duplicate source configuration detected"),
    10141: (400, "sourced stream name is invalid"),
    10142: (400, "mirrored stream name is invalid"),
    10143: (400, "stream mirrors can not have first sequence configured"),
    10148: (400, "consumer already exists"),
    10149: (400, "consumer does not exist"),
    10164: (400, "wrong last sequence"),
    10165: (400, "invalid per-message TTL"),
    10166: (400, "per-message TTL is disabled"),
    10167: (429, "too many requests"),
    10174: (400, "atomic publish is disabled"),
    10175: (400, "atomic publish sequence is missing"),
    10176: (400, "atomic publish batch is incomplete"),
    10177: (400, "atomic publish unsupported header used: {}"),
    10179: (400, "atomic publish batch ID is invalid"),
    10185: (412, "JetStream minimum api level required"),
    10193: (400, "missing sequence for expected last sequence per subject"),
    10198: (400, "stream mirrors can not also use atomic publishing"),
    10199: (400, "atomic publish batch is too large: {}"),
    10200: (400, "atomic publish batch commit is invalid"),
    10201: (400, "atomic publish batch contains duplicate message id"),
    10204: (400, "invalid reset: {}"),
    10205: (400, "batch publish is disabled"),
    10206: (400, "batch publish pattern is invalid"),
    10207: (400, "batch publish ID is invalid"),
    10208: (400, "batch publish ID unknown"),
    10209: (400, "stream mirrors can not also use batch publishing"),
    10210: (429, "atomic publish too many inflight"),
    10211: (429, "batch publish too many inflight"),
    10213: (400, "stream mirror consumer config is invalid"),
    10214: (400, "stream mirror consumer requires flow control ack policy"),
    10215: (400, "stream source consumer config is invalid"),
    10216: (400, "duplicate stream source consumer detected"),
    10217: (400, "stream source consumer requires flow control ack policy"),
    10218: (400, "flow control ack policy requires a push based consumer"),
    10220: (400, "flow control ack policy requires max ack pending"),
    10221: (400, "flow control ack policy requires unset ack wait"),
    10222: (400, "flow control ack policy requires unset max deliver"),
    10227: (400, "message stream source header is not allowed"),
}


class ApiError(Exception):
    """A refusal by the server: the `error` field of a reply."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.code = code
        self.err_code = err_code
        self.description = description

    def as_json(self) -> dict[str, object]:
        return {"code": self.code, "err_code": self.err_code, "description": self.description}


def api_error(err_code: int, detail: object = "") -> ApiError:
    """Return the error with this code; `detail` fills the placeholder in its text."""
    code, text = _TABLE[err_code]
    return ApiError(code, err_code, text.format(detail))


Rule = tuple[Callable[[dict[str, Any]], object], int, str]
"""A reason to refuse a configuration: when it applies, the error code, and the detail of the error's text."""


def refuse(rules: Iterable[Rule], config: dict[str, Any]) -> None:
    """Raise the `ApiError` of the first rule that applies to a configuration."""
    for applies, err_code, detail in rules:
        if applies(config):
            raise api_error(err_code, detail)


def not_modelled(what: str) -> ApiError:
    """Return the refusal of a field, header or request that the reference server does not model."""
    return ApiError(501, _NOT_MODELLED, f"not modelled by the reference server: {what}")
