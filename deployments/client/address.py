"""Where a server of this machine is asked when nobody says another place."""

DEFAULT_URL = "http://127.0.0.1:8000"
