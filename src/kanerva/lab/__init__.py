"""Experiments, benchmarks, docs made from records, and shipping of weights. Only the command line
imports this."""
