"""The image's health check: exit code 0 if /live says 200. The standard library only: it runs every ten seconds.

With TLS the certificate is for the world's name and not for 127.0.0.1, so it is not checked here.
"""

import os
import ssl
import sys
import urllib.request

TIMEOUT_S = 4  # below the HEALTHCHECK's own


def main() -> int:
    """Ask once."""
    scheme = "https" if os.environ.get("PAGEWALK_TLS_CERT") else "http"
    url = f"{scheme}://127.0.0.1:{os.environ.get('PAGEWALK_PORT', '8000')}/live"
    unchecked = ssl._create_unverified_context() if scheme == "https" else None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=unchecked):
            return 0
    except OSError as error:  # URLError is one
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
