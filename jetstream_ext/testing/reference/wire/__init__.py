"""Formats on the wire: the client protocol, header blocks, subjects, JSON, times and error codes."""

from .protocol import Close as Close
from .protocol import Command as Command
from .protocol import Connect as Connect
from .protocol import Deliver as Deliver
from .protocol import Line as Line
from .protocol import Output as Output
from .protocol import Parser as Parser
from .protocol import Ping as Ping
from .protocol import Pong as Pong
from .protocol import Publish as Publish
from .protocol import Refused as Refused
from .protocol import Subscribe as Subscribe
from .protocol import Unsubscribe as Unsubscribe
from .protocol import encode as encode

__all__ = [
    "Close",
    "Command",
    "Connect",
    "Deliver",
    "Line",
    "Output",
    "Parser",
    "Ping",
    "Pong",
    "Publish",
    "Refused",
    "Subscribe",
    "Unsubscribe",
    "encode",
]
