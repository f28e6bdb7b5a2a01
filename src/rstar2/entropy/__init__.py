"""The entropy of a policy's sampled tokens, by class of token.

    trajectory + text of each token ──> classes (pure) ──> table (pure): shares, entropies, n-grams
    entropies: recorded by the engine, or computed exactly by the learner's model code (sources)

In every trajectory the 20% of sampled tokens with the highest entropy are marked. A marked token in
free reasoning is a *forking* token. One shortly after a tool response is a *reflection* token,
counted separately for responses that succeeded and that failed. Code, answers and the tags of the
format are separate classes.
"""
