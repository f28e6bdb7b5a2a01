"""SFT data: public conversations and function calls to our messages form, with JSON tool calls."""
