"""New weights by way of a store: trainer ranks put their shards there, followers beside engines fetch them."""

from .publish import StoredPushes

__all__ = ["StoredPushes"]
