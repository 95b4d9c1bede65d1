"""The Python client: requests, retries, journals, results."""

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `outrider serve` listens unless told otherwise."""
