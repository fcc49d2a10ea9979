"""Benchmarks, saved as records: throughput of a training step, agreement of its eager, compiled and
captured forms, time to a bound, and latency."""
