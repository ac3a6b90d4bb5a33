"""Streams: configuration, stored messages, limits, retention, expiry and Direct Get."""
