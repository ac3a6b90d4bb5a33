"""Sans-IO machines: bytes go in, bytes and decisions come out. No sockets, clocks, event loops or randomness."""
