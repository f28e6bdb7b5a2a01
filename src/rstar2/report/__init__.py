"""What a run came to: the end table on the terminal and report.html. Reads only what record
wrote, so it can be made again at any time, also of a run that is still going on.
"""

from rstar2.report.page import write_report
from rstar2.report.table import end_table

__all__ = ["end_table", "write_report"]
