"""How good a policy is: rollouts on held-out problems, and what may be concluded from them."""
