"""Python client of Drover's REST, sync and async, typed: `Drover` and `AsyncDrover`."""

from drover_client.api import SCHEMA_VERSION, AsyncDrover, Drover
from drover_client.errors import DroverError
from drover_client.stream import StreamEvent

VERSION = "1.0.0"
__all__ = ["SCHEMA_VERSION", "VERSION", "AsyncDrover", "Drover", "DroverError", "StreamEvent"]
