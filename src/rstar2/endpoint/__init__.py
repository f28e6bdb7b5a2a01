"""A token-exact, OpenAI-compatible endpoint for agent programs that know only a base URL.

segments  requests -> token ids: what the model sampled is spliced in, never re-tokenised (pure)
chat      the JSON of /v1/chat/completions, in and out (pure)
server    one base URL per rollout, served from the fleet
program   a rollout whose agent is a program or a command line
"""
