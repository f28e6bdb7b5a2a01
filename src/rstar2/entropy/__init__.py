"""Where a policy is uncertain: entropy of its sampled tokens by what they were sampled for.

    trajectory + text of each token ──> classes (pure) ──> table (pure): shares, entropies, n-grams
    entropies: recorded by the engine, or computed exactly by the learner's own model (exact)

The paper shows two pictures; here are numbers. In every trajectory the 20% of sampled tokens with
the highest entropy are marked. A marked token in free reasoning is a *forking* token; one in the
window after a tool response is a *reflection* token, apart for responses that succeeded and that
failed; code, answers and the format's own tags are apart too.
"""
