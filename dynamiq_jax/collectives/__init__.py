"""The collectives: all-reduce and its halves, over pytrees."""
