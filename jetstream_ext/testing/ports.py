"""Ports that stay ours while no server listens on them."""

import socket
import sys

__all__ = ["HeldPort"]


class HeldPort:
    """Keep a TCP port of 127.0.0.1 from being given to anyone else while no server listens on it.

    The socket is bound but does not listen, so clients are refused as they would be without it. On Linux
    a server can listen on the port meanwhile; elsewhere the port is let go just before the server starts.
    """

    def __init__(self, port: int = 0) -> None:
        """Bind the port, or a free one.

        Args:
            port: The port to hold; 0 means any free one.

        Raises:
            OSError: The port is in use.
        """
        self._socket = socket.socket()
        try:
            if sys.platform != "win32":  # there, the option means to steal a port in use
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def make_way(self) -> None:
        """Let a server that is about to start bind the port."""
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Let the port go."""
        self._socket.close()
