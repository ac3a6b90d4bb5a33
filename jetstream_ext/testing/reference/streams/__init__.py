"""Streams: configuration, checks of published messages, storage, limits, retention, expiry and Direct Get."""
