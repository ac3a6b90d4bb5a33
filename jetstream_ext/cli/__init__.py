"""The command line: ``jetstream-ext``, or ``python -m jetstream_ext.cli``. Needs ``nats-jetstream-ext[cli]``.

::

    __main__.py     says what to install where the extra is missing
    app.py          the group of commands, and their exit statuses
    connection.py   from options, environment and the contexts of the ``nats`` tool to a connection
    output.py       progress bars, tables, JSON, and failures in one line
    doctor.py, serve.py, demo.py, snapshot.py, ingest.py, export.py   one command each (formats.py: what export writes)
    bench.py        this library against plain nats-py (measuring.py: the cases)

Nothing here is imported by the library.
"""
