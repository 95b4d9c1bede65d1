"""The Python client: requests, retries, journals, results."""
