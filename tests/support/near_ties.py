"""What a near tie is: the one definition of tests. Who looks for them: conftest.Golden, tie_watch.NearTies.

The order of additions differs between programs, and within one with what is computed beside a row. Where logits are as
close as that moves them, or sums of log-probabilities, either token is right.
"""

NEAR_TIE = 1e-3
"""Between our logits and others' in float32. A golden prompt has the gap of each of its tokens stored; after a near tie
that went the other way nothing of it is compared."""

OWN_NEAR_TIE = 1e-4
"""Between two runs of ours in float32, by the same kernels: a hundred times what was seen. A request that is compared
with itself under load is watched while it runs alone; if a step of it was a near tie, it is not asked. So all that is
compared must be equal."""
