"""Formats on the wire: the client protocol, header blocks, subjects, JSON, times and error codes."""
