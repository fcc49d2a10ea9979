"""Benchmarks: throughput, agreement of a step's forms, time to a bound, latency; as records."""
