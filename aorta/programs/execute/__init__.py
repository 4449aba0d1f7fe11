"""Host programs on real streams and process groups, and the ways of overlapping that compete with them."""
