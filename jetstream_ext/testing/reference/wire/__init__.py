"""Formats on the wire: the client protocol with its header blocks, subjects, the texts of Go, and error codes."""
