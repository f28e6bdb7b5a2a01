"""The results of a run: the end table on the terminal (`table`) and report.html (`page`). Both are
made only from the run directory, so they can be made at any time, also while the run is training.
"""
