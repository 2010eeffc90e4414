"""Process groups, sharding, recomputation, compilation and clipping: the models know nothing of any of them."""
