"""A local web page over run directories: read-only, loopback only, live while a run is writing.

    run directory ──> catalog (SQLite in memory) ──> run ──> query, overview, detail ──> server

Invariants
- The viewer never writes into a run directory, and reads no other files (except the tokenizer
  that the recipe names).
- Memory grows with the number of rollouts, not with their tokens: recorded lines are read by offset
  when a page needs them.
- All text of a run is data: the server sends JSON, the page puts it into text nodes, and the
  content security policy forbids everything else.
- An incomplete last line is ignored; a complete line that cannot be decoded is counted.
"""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
