"""The checks, one file a group. Each function under `promise` is one check; `devconv.conformance.catalogue` reads them."""
