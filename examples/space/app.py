"""The demo page as a Space of the Hub. The variable MODEL names a folder or a model of the Hub."""

import os

from vaswani.configuration.extras import needs

with needs("vaswani[demo]", SystemExit):
    from vaswani.demo.page import serve

if __name__ == "__main__":
    serve(os.environ.get("MODEL") or "runs/quickstart")
