"""The stochastic optimum: lengths known only as scenarios, one plan for all of them, with a certified gap."""
