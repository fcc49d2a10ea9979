"""The laboratory: experiments, benchmarks, docs from records, shipping of weights. Imported by the
command line only."""
