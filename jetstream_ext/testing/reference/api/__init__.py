"""The JSON API of JetStream on `$JS.API`: account, streams and consumers."""
