"""The network: configurations, weights, the forward pass, sampling, and the executors that carry step plans out."""
