"""One trajectory: messages to tokens, text to tool calls, and the loop between model and tool."""
