"""Generation: the sampling distribution, and a batched sampler with slot refill."""
