"""Sans-IO machines: bytes in, bytes and decisions out. No sockets, clocks, loops or randomness; `now` is an argument."""
