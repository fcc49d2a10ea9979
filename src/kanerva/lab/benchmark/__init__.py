"""How fast: throughput, agreement of a step's forms, time to a bound; as records."""
