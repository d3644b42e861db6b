"""The load benchmark: closed-loop streams at a server, and figures nobody has to doubt.

    measure.py   one concurrency measured: warm up, windows, drain, check (``measure``)
    clients.py   the client processes, seen from the parent
    worker.py    one client process: its share of the streams on one event loop
    stream.py    one connection: requests out, chunks in, each stamped as it arrives
    sse.py       bytes -> events -> tokens
    bodies.py    one fresh request body after another, from a seed
    prompts.py   what the bodies are cut from: text, token ids, a user's file
    server.py    the server's own word: counters, gauges, cache reset, health
    samples.py   the raw samples of a cell: columns in memory, Parquet on disk
    figures.py   what every number means
    checks.py    when a cell is void
    table.py     one line per concurrency

Knows nothing about trials, search or how the server was started. This file imports nothing: a client process has to
start in a fraction of a second.
"""
