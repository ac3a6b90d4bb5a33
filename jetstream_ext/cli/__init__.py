"""The command line: ``jetstream-ext``, or ``python -m jetstream_ext.cli``. Needs ``nats-jetstream-ext[cli]``.

::

    __main__.py     the door: says what to install where the extra is missing
    app.py          the group of commands, and what every failure becomes: one line (failures.py) and an exit status
    connection.py   from options, environment and the contexts of the ``nats`` tool to a connection (contexts.py)
    output.py       progress bars, tables and JSON
    doctor.py, serve.py, demo.py, snapshot.py   one command each (diagnosis.py: what the doctor finds)
    bench.py        this library against plain nats-py (measuring.py: the cases; plot.py: their picture)
    ingest.py       from a file into a stream (rows.py: the formats; resuming.py: where an earlier run stopped)
    export.py       from a stream into a file (parts.py: the unfinished file; formats.py: the formats)

Nothing here is imported by the library.
"""
