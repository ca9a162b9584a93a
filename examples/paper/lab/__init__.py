"""The laboratory behind the papers' figures: experiments, methods, workloads, tables, figures and the report."""
