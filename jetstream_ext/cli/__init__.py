"""The command line: ``jetstream-ext``, or ``python -m jetstream_ext.cli``. Needs ``nats-jetstream-ext[cli]``.

::

    __main__.py     the entry point: the group of commands and their exit statuses
    connection.py   a connection from options, environment variables and contexts of the ``nats`` tool
    output.py       progress bars, tables, JSON, and errors in one line
    formats.py      CSV, JSON lines and Parquet files, read by ingest and written by export
    doctor.py, snapshot.py, ingest.py, export.py, bench.py   one command each
    local.py        serve and demo: the commands that only use a server of their own

The library imports nothing from here.
"""
