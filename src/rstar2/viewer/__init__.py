"""A local web page over run directories: read-only, loopback only, live while a run writes.

    run directory ──> tails, index (catalog) ──> run ──> query, detail ──> app (ASGI) ──> static/

Invariants
- Nothing is ever written into a run directory, and nothing but it is read (and a tokenizer that
  its recipe names).
- Memory grows with the number of rollouts, never with their tokens: lines are read by offset when
  somebody looks at them.
- Everything from a run is data: the server sends JSON, the page puts it into text nodes, and the
  content security policy forbids the rest.
- A line that is not whole yet does not exist; a line that cannot be read is counted and named.
"""
