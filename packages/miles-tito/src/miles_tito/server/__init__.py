"""The session server: HTTP routes in three dialects, in front of an engine."""

from importlib.util import find_spec

from miles_tito.errors import MissingDependency

if not (find_spec("starlette") and find_spec("uvicorn")):
    raise MissingDependency("pip install 'miles-tito[server]'")

from .app import create_app
from .http_server import serve

__all__ = ["create_app", "serve"]
