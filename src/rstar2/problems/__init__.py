"""Problems and SFT conversations: the embedded task, data files, cleaning of public data sets."""
