"""Problems and SFT conversations: the embedded task, files, cleaning of public data sets."""
