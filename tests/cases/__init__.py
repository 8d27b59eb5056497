"""Cases from public bug reports, run from their neutral notation through relay, fold and match."""
