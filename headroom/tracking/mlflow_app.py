"""MLflow's server as `mlflow server --app-name headroom` runs it: MLflow's own, but for its
Assistant, which stays closed until somebody opens it. In a browser that is there for the first time
MLflow 3.17 opens it over a quarter of each page, and has no setting against that; a browser that
has been there keeps a mark, and so the page leaves that mark first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

MARK = "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1"  # see autoOpenedOnFirstLoad in its sources
SCRIPT = f"<script>try{{localStorage.setItem('{MARK}','true')}}catch(e){{}}</script>"


class Server:
    """The server, imported when it is first asked: `mlflow server` imports it too, to start it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await _make_app()(scope, receive, send)


app = Server()


@cache
def _make_app() -> Any:
    from flask import Response
    from mlflow.server import app as flask_app
    from mlflow.server.fastapi_app import app as whole

    def serve_page() -> Response:
        page = Path(str(flask_app.static_folder), "index.html").read_text(encoding="utf-8")
        page = page.replace("<head>", f"<head>{SCRIPT}", 1)
        return Response(page, mimetype="text/html", headers={"Cache-Control": "no-cache"})

    flask_app.view_functions["serve"] = serve_page  # of the page that holds all others
    return whole
