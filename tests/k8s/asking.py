"""A client that asks the same again and again and prints each status and text, until its standard input ends."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request


def main(url: str) -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    body = json.dumps({"model": "emulated", "prompt": "w1 w2 w3", "max_tokens": 24, "seed": 1}).encode()
    while not over.is_set():
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                print(answer.status, json.load(answer)["choices"][0]["text"], flush=True)
        except urllib.error.HTTPError as error:
            print(error.code, error.read().decode(), flush=True)
        except OSError as error:
            print(0, error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
