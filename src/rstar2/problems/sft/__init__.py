"""SFT data: convert public chat and function-calling data to messages with JSON tool calls."""
