"""The command line: ``jetstream-ext``, or ``python -m jetstream_ext.cli``. Needs ``nats-jetstream-ext[cli]``.

::

    __main__.py     the entry point; names what to install if the extra is missing
    app.py          the group of commands and their exit statuses
    connection.py   a connection from options, environment variables and contexts of the ``nats`` tool
    output.py       progress bars, tables, JSON, and errors in one line
    doctor.py, serve.py, demo.py, snapshot.py, ingest.py, export.py   one command each (formats.py: the files of export)
    bench.py        this library compared with plain nats-py (measuring.py: the cases)

The library imports nothing from here.
"""
