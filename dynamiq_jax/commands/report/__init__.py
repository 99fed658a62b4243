"""`dynamiq-jax report`: what a cluster is, and how fast it trains, in two files to send."""
