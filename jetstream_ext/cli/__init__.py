"""The command line: ``jetstream-ext``, or ``python -m jetstream_ext.cli``. Needs ``nats-jetstream-ext[cli]``."""
