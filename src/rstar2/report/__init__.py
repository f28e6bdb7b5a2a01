"""The results of a run: the end table on the terminal and report.html. Both are made only from the
run directory, so they can be made at any time, also while the run is training.
"""

from rstar2.report.page import write_report
from rstar2.report.table import end_table

__all__ = ["end_table", "write_report"]
